// Small JSON documents of other servers: an issuer's keys, a vault's secrets, a facilitator's answers. They are bounded
// in time and size, whatever the server does.
import { readBody } from "./body.ts";
import { type Outbound, OutboundError, type OutboundRequest } from "./outbound.ts";

export interface JsonLimits {
  readonly timeoutMs: number;
  readonly bytesMax: number;
}

export interface JsonAnswer {
  readonly status: number;
  /** As it was sent. */
  readonly retryAfter?: string | undefined;
  /** As it was sent. */
  readonly finalAfter?: string | undefined;
  /** Undefined when the body is no JSON. */
  readonly body: unknown;
}

/** A facilitator of ours says with it in how many seconds its answer is final: a reorganisation may change the hash before. */
export const FINAL_AFTER = "settlement-final-after";

const LIMITS: JsonLimits = { timeoutMs: 5000, bytesMax: 1024 * 1024 };

function parse(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    return undefined;
  }
}

/**
 * Sends a request and reads the JSON of its answer, whatever its status.
 *
 * @throws OutboundError, also for an answer of more than `bytesMax`; the signal's reason
 */
export async function exchangeJson(
  outbound: Outbound,
  url: string,
  request: OutboundRequest,
  bytesMax: number,
): Promise<JsonAnswer> {
  const headers = [["accept", "application/json"] as const, ...request.headers];
  const response = await outbound.request(url, { ...request, headers });
  const body = await readBody(response, { maxBytes: bytesMax, captureBytes: bytesMax });
  if (body.tooLarge) throw new OutboundError("lost", `the answer is larger than ${bytesMax} bytes`);
  return {
    status: response.status,
    retryAfter: response.headers.get("retry-after") ?? undefined,
    finalAfter: response.headers.get(FINAL_AFTER) ?? undefined,
    body: parse(body.captured),
  };
}

/**
 * A GET, whatever its status.
 *
 * @throws OutboundError, also when the limits are met
 */
export async function fetchJson(
  outbound: Outbound,
  url: string,
  headers: Readonly<Record<string, string>> = {},
  limits: JsonLimits = LIMITS,
): Promise<JsonAnswer> {
  const { timeoutMs, bytesMax } = limits;
  const signal = AbortSignal.timeout(timeoutMs);
  try {
    return await exchangeJson(outbound, url, { method: "GET", headers: Object.entries(headers), signal }, bytesMax);
  } catch (error) {
    if (signal.aborted) throw new OutboundError("lost", `no answer within ${timeoutMs} ms`);
    throw error;
  }
}

/**
 * The JSON document at a URL.
 *
 * @throws OutboundError when there is none
 */
export async function fetchDocument(outbound: Outbound, url: string): Promise<unknown> {
  const { status, body } = await fetchJson(outbound, url);
  if (status !== 200) throw new OutboundError("lost", `answered ${status}`);
  if (body === undefined) throw new OutboundError("lost", "the answer is no JSON");
  return body;
}
