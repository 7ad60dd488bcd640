// A caller's requests to a gateway, with a token, for `tollgate call` and the demo, and the fields that `tollgate call` reads of
// the answers. The gateway may be a stranger's, so no field is taken to be what it should be.
import { type Static, type TSchema, Type } from "@sinclair/typebox";
import { Value } from "@sinclair/typebox/value";
import { attempt } from "../../core/fault.ts";
import { INVOCATION_STATUSES } from "../../core/states.ts";
import { readBody, Undecodable } from "../../http/client/body.ts";
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
  /** Why the body of a refusal could not be read. */
  readonly unread?: string;
}

/** Sends a request; the body of the answer is still to be read. @throws OutboundError, also when the signal ends the wait */
export async function openAnswer({ url, token, outbound }: GatewayAccess, request: AccessRequest): Promise<Answer> {
  const { path, headers = {}, ...rest } = request;
  const own = { authorization: `Bearer ${token}`, ...headers };
  return outbound.request(`${url}${path}`, { ...rest, headers: Object.entries(own) }).catch(lostIn(request));
}

/** @throws OutboundError when the answer ends early or is too long. The status of a refusal says enough without its body. */
export async function readAnswer(answer: Answer, { signal }: AccessRequest): Promise<GatewayAnswer> {
  const { status, headers } = answer;
  const end = status < 400 ? signal : AbortSignal.any([signal, AbortSignal.timeout(5000)]);
  const limits = { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX, signal: end };
  try {
    const { captured, tooLarge } = await readBody(answer, limits).catch(lostIn({ signal: end }));
    if (tooLarge) throw new OutboundError("lost", "the answer is too long");
    const text = new TextDecoder().decode(captured);
    return { status, headers, text, body: jsonOf(text) };
  } catch (error) {
    if (status < 400) throw error;
    return { status, headers, text: "", body: undefined, unread: outboundError(error).message };
  }
}

/** Sends a request and reads its answer. @throws OutboundError */
export const ask = async (access: GatewayAccess, request: AccessRequest): Promise<GatewayAnswer> =>
  readAnswer(await openAnswer(access, request), request);

const maybe = <T extends TSchema>(type: T) => Type.Optional(Type.Union([type, Type.Null()]));

export const AGENT = Type.Object({
  id: Type.String({ pattern: "^agt_[0-9a-f-]+$" }),
  name: Type.String(),
  protocol: Type.String(),
});
export const AGENTS = Type.Object({ data: Type.Array(AGENT), total: Type.Integer({ minimum: 0 }) });

/** The fields of the poll view that decide about the end of a run. */
export const CALL_VIEW = Type.Object({
  status: Type.Union(INVOCATION_STATUSES.map((status) => Type.Literal(status))),
  error_class: maybe(Type.String()),
  error_detail: maybe(Type.String()),
  upstream_status: maybe(Type.Integer()),
  settlement: maybe(
    Type.Object({ status: Type.String(), tx_hash: maybe(Type.String()), reason: maybe(Type.String()) }),
  ),
  response_truncated: Type.Boolean(),
  response_body_b64: Type.Optional(Type.String()),
});
export type CallView = Static<typeof CALL_VIEW>;

/** Why a value does not have the fields of a schema; null when it has. */
export function fieldProblem(schema: TSchema, value: unknown): string | null {
  const field = Value.Errors(schema, value).First()?.path.slice(1).replaceAll("/", ".");
  return field === undefined ? null : `${field || "a JSON object"} is missing or not valid`;
}

function lostIn({ signal }: Pick<AccessRequest, "signal">) {
  return (error: unknown): never => {
    throw signal.aborted ? new OutboundError("lost", "no answer in time") : outboundError(error);
  };
}

/** The error of an exchange without a complete answer. @throws any other error */
export function outboundError(error: unknown): OutboundError {
  if (error instanceof OutboundError) return error;
  if (error instanceof Undecodable) return new OutboundError("lost", error.message);
  throw error;
}

/** Undefined when the text is not JSON. */
export const jsonOf = (text: string): unknown => attempt(() => JSON.parse(text));
