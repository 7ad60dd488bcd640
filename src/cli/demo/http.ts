// Plain HTTP as any caller of the gateway, or of a node, speaks it: JSON out, JSON in, with a limit on time and size.
// Answers are read field by field, since the demo shares nothing but the wire format with the servers.
// One per thread, since all parts of the demo may share the connections.
import type { AnswerHeaders } from "../../http/answer.ts";
import { readBody } from "../../http/body.ts";
import { createOutbound, OutboundError } from "../../http/outbound.ts";
import { DemoProblem } from "./problem.ts";

const ANSWER_BYTES_MAX = 1024 * 1024;

/** Everything that is called here is a part of the demo, on this machine. */
const outbound = createOutbound({ rules: null, extraCa: null });

export interface HttpRequest {
  readonly method: "GET" | "POST" | "PATCH";
  readonly url: string;
  readonly headers?: Readonly<Record<string, string>>;
  /** Sent as JSON. */
  readonly body?: unknown;
}

export interface HttpAnswer {
  readonly status: number;
  readonly headers: AnswerHeaders;
  /** Undefined when it is no JSON. */
  readonly body: unknown;
  readonly ms: number;
}

/** @throws DemoProblem when there is no answer; the signal's reason */
export async function ask({ method, url, headers = {}, body }: HttpRequest, signal: AbortSignal): Promise<HttpAnswer> {
  const startedAt = performance.now();
  const content = body === undefined ? null : new TextEncoder().encode(JSON.stringify(body));
  try {
    const response = await outbound.request(url, {
      method,
      headers: [...Object.entries(headers), ["content-type", "application/json"]],
      body: content,
      signal,
    });
    const { captured } = await readBody(response, {
      maxBytes: ANSWER_BYTES_MAX,
      captureBytes: ANSWER_BYTES_MAX,
    });
    const ms = performance.now() - startedAt;
    return { status: response.status, headers: response.headers, body: parsed(captured), ms };
  } catch (error) {
    signal.throwIfAborted();
    if (!(error instanceof OutboundError)) throw error;
    throw new DemoProblem(`no answer from ${new URL(url).origin} (${error.message})`, { cause: error });
  }
}

function parsed(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return undefined;
  }
}

/** The value below these names; undefined where there is none. */
export function at(value: unknown, ...names: readonly (string | number)[]): unknown {
  let found = value;
  for (const name of names) {
    if (typeof found !== "object" || found === null) return undefined;
    found = Object.getOwnPropertyDescriptor(found, name)?.value;
  }
  return found;
}

/** @throws DemoProblem when there is no text */
export function textAt(value: unknown, ...names: readonly (string | number)[]): string {
  const found = at(value, ...names);
  if (typeof found === "string") return found;
  throw new DemoProblem(`an answer holds no ${names.join(".")}`);
}
