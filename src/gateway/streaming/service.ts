// What is to be sent on the streaming path: what a request (proxy/stream-routes.ts) has become when it is admitted.

import type { Call } from "../../core/call.ts";
import type { Moment } from "../../kernel/time.ts";
import type { InvocationKey } from "../invocations/service.ts";

export interface StreamPermit {
  /** A second call does nothing. */
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
 * A running invocation. The holder of this makes the call and must end it. The body is not part of it, so that its
 * memory is free as soon as it has been sent.
 */
export interface OpenedCall extends OpenedRequest {
  readonly key: InvocationKey;
  /** Of its claim. */
  readonly token: string;
  /** Before the claim was asked for. */
  readonly claimedAt: Moment;
  /** Whether it waited for its payment. Then the caller may come back for it until the upstream is dialled. */
  readonly isResumable: boolean;
  readonly capture: boolean;
  /** Whether a receipt will say the hash of the answer. */
  readonly receipt: boolean;
  /** Whether the answer may be one to `tools/list`, and of a protocol that tells caches what they may do; else null. */
  readonly listsTools: { readonly isNewest: boolean } | null;
  /** Headers of the answer: the settled payment, and the policy's warning. */
  readonly responseHeaders: Readonly<Record<string, string>>;
}
