// What the rest of the gateway knows of the streaming path: what comes in, and what is to be made of it now.
// Admission (proxy/admit-stream.ts) makes the second of the first.
import type { Moment } from "../../core/age.ts";
import type { Call } from "../../core/call.ts";
import type { Caller } from "../../core/caller.ts";
import type { InvocationKey } from "../invocations/service.ts";

/** A request to an agent's streaming path, as it came. */
export interface AskedStream {
  readonly caller: Caller;
  readonly agentId: string;
  readonly headers: Headers;
  readonly requestId: string;
  /** Aborted when the caller has gone. */
  readonly signal: AbortSignal;
}

/** A POST, as it came. */
export interface AskedCall extends AskedStream {
  readBody(): Promise<Uint8Array>;
  /** Adds a field to the request's line in the log. */
  note(name: string, value: string): void;
}

export interface InSession {
  /** The upstream's ID of the MCP session that the caller has shown to be its own. */
  readonly session: string | null;
}

export interface StreamRequest extends AskedStream, InSession {}

export interface StreamCall extends AskedCall, InSession {}

export interface StreamPermit {
  /** Once; a second time is nothing. */
  release(): void;
}

/** What is to be sent to the upstream. */
export interface OpenedRequest {
  readonly tenant: string;
  readonly agentId: string;
  readonly url: string;
  readonly credential_ref: string | null;
  /** Headers of the caller that pass. */
  readonly headers: Call["headers"];
  readonly request_id: string;
  readonly place: StreamPermit;
}

/** A GET or DELETE of an mcp agent: part of the connection, and no invocation. */
export interface OpenedConnection extends OpenedRequest {
  readonly method: "GET" | "DELETE";
}

/**
 * An invocation that is running from now on: whoever holds this makes its call, and ends it. The body is apart, since
 * it is let go of when it has been sent.
 */
export interface OpenedCall extends OpenedRequest {
  readonly key: InvocationKey;
  /** Of its claim. */
  readonly token: string;
  /** Before the claim was asked for. */
  readonly claimedAt: Moment;
  /** Whether it waited for its payment: until it is dialled, its caller may come back for it. */
  readonly isOwed: boolean;
  readonly capture: boolean;
  /** Whether a receipt will say the hash of the answer. */
  readonly receipt: boolean;
  /** Whether the answer may be one to `tools/list`. */
  readonly listsTools: boolean;
  /** Of the answer: what is told of a payment that was settled, and the policy's warning. */
  readonly told: Readonly<Record<string, string>>;
}
