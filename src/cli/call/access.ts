// A caller's requests to a gateway, with a token, for `tollgate call` and the demo.
import { readBody } from "../../http/client/body.ts";
import { type Answer, OutboundError } from "../../http/client/exchange.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import type { AnswerHeaders } from "../../http/client/response-parser.ts";

/** The longest answer is a page of agents. */
const ANSWER_BYTES_MAX = 16 * 1024 * 1024;

/** A tenant's access to the gateway. */
export interface GatewayAccess {
  /** Without a slash at its end. */
  readonly url: string;
  readonly token: string;
  readonly outbound: Outbound;
}

export interface AccessRequest {
  readonly method: "GET" | "POST" | "PATCH" | "DELETE";
  readonly path: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: Uint8Array;
  readonly signal: AbortSignal;
}

export interface GatewayAnswer {
  readonly status: number;
  readonly headers: AnswerHeaders;
  readonly text: string;
  /** Undefined when the text is not JSON. */
  readonly body: unknown;
}

/** Sends a request; the body of the answer is still to be read. @throws OutboundError, also when the signal ends the wait */
export async function openAnswer({ url, token, outbound }: GatewayAccess, request: AccessRequest): Promise<Answer> {
  const { path, headers = {}, ...rest } = request;
  const own = { authorization: `Bearer ${token}`, ...headers };
  return outbound.request(`${url}${path}`, { ...rest, headers: Object.entries(own) }).catch(lostIn(request));
}

/** @throws OutboundError when the answer ends early, and when it is too long */
export async function readAnswer(answer: Answer, request: AccessRequest): Promise<GatewayAnswer> {
  const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX };
  const { captured, tooLarge } = await readBody(answer, limits).catch(lostIn(request));
  if (tooLarge) throw new OutboundError("lost", "the answer is too long");
  const text = new TextDecoder().decode(captured);
  return { status: answer.status, headers: answer.headers, text, body: jsonOf(text) };
}

/** Sends a request and reads its answer. @throws OutboundError */
export async function ask(access: GatewayAccess, request: AccessRequest): Promise<GatewayAnswer> {
  return readAnswer(await openAnswer(access, request), request);
}

function lostIn({ signal }: AccessRequest) {
  return (error: unknown): never => {
    throw signal.aborted ? new OutboundError("lost", "no answer in time") : error;
  };
}

/** Undefined when the text is not JSON. */
export function jsonOf(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
