// The headers of a call: reads the caller's strictly, chooses those that pass to the upstream, and makes the gateway's own. The
// last part is what both paths keep of an exchange: its times, and the head of the answer.
import { invalidField } from "../../core/fault.ts";
import type { Protocol } from "../../core/states.ts";
import { viaHeader } from "../../core/via.ts";
import type { Answer } from "../../http/client/exchange.ts";
import { MAX } from "../../kernel/limits.ts";
import { isSessionless } from "../../wire/jsonrpc.ts";
import type { JudgedMessage } from "../../wire/mcp-headers.ts";
import { echoProblem, isEchoedHeader, SESSION_HEADER, VERSION_HEADER } from "../../wire/mcp-headers.ts";

const PASSED = new Set(
  "content-type accept accept-language user-agent idempotency-key traceparent tracestate baggage".split(" "),
);

/** The headers that pass to the upstream on the polled path. @param pseudonym the name of this deployment in `Via` */
export function passedHeaders(headers: Headers, echoedMcpHeaders: boolean, pseudonym: string): [string, string][] {
  const passed = headersWhere(headers, (name) => isPassed(name, echoedMcpHeaders) && name !== SESSION_HEADER);
  passed.push(viaHeader(headers, pseudonym));
  return passed;
}

export interface StreamPassing {
  readonly protocol: Protocol;
  readonly echoedMcpHeaders: boolean;
  readonly pseudonym: string;
  /** The ID of the caller's MCP session, as the upstream knows it. */
  readonly session: string | null;
  /** Whether the caller asks for the rest of an event stream. */
  readonly resumes: boolean;
}

/**
 * The headers that pass on the streaming path. The body of an MCP message was judged as JSON in UTF-8, so the server gets that
 * content type: with another charset (Express accepts UTF-7) the server would read a different message.
 */
export function passedToStream(
  headers: Headers,
  { protocol, echoedMcpHeaders, pseudonym, session, resumes }: StreamPassing,
): [string, string][] {
  const via = viaHeader(headers, pseudonym);
  if (protocol !== "mcp") return [...headersWhere(headers, (name) => isPassed(name, echoedMcpHeaders)), via];
  const passed = headersWhere(headers, (name) => isPassed(name, echoedMcpHeaders) && name !== SESSION_HEADER);
  const outgoing = passed.map(([name, value]): [string, string] => {
    return [name, name === "content-type" ? "application/json" : value];
  });
  if (session !== null) outgoing.push([SESSION_HEADER, session]);
  if (resumes) outgoing.push(...headersWhere(headers, (name) => name === "last-event-id"));
  return [...outgoing, via];
}

/** Some servers read `_` in header names as `-`, so `Mcp-Session_Id` would smuggle in an unchecked session. */
function isPassed(name: string, echoedMcpHeaders: boolean): boolean {
  if (!name.startsWith("mcp-")) return PASSED.has(name);
  return isEchoedHeader(name) ? echoedMcpHeaders : !name.includes("_");
}

export const mcpVersion = (headers: Headers): string | null => headers.get(VERSION_HEADER);

/**
 * Whether the headers of an MCP message that repeat parts of its body pass: only in protocol versions that define them, since
 * servers of other versions don't compare them with the body.
 * @param judged the message in the body; null for a batch
 * @throws Fault `invalid_request` that names the header
 */
export function passesEchoedHeaders(
  headers: Headers,
  body: Uint8Array,
  judged: JudgedMessage | null,
  version: string | null,
): boolean {
  if (!isSessionless(version)) return false;
  const wrong = echoProblem(headers, body, judged);
  if (wrong !== null) throw invalidField(wrong.header, wrong.problem);
  return true;
}

function headersWhere(headers: Headers, passes: (name: string) => boolean): [string, string][] {
  const passed: [string, string][] = [];
  headers.forEach((value, name) => {
    if (passes(name)) passed.push([name, value]);
  });
  return passed;
}

/** The `X-Service-Model` header; null when absent or empty. Header bytes are read as UTF-8 where they are UTF-8. */
export function serviceModel(headers: Headers): string | null {
  const value = headers.get("x-service-model");
  if (value === null || value === "") return null;
  const bytes = headerBytes(value);
  if (bytes.byteLength > MAX.serviceModelBytes) {
    throw invalidField("X-Service-Model", `longer than ${MAX.serviceModelBytes} bytes`);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return value;
  }
}

/** The bytes of a header value: a Latin-1 string, unless the HTTP server has decoded it from UTF-8. */
function headerBytes(value: string): Uint8Array {
  for (const character of value) if (character > "\u00ff") return new TextEncoder().encode(value);
  return Buffer.from(value, "latin1");
}

const VISIBLE_ASCII = /^[\x21-\x7e]+$/;

export function idempotencyKey(headers: Headers): string | null {
  const value = headers.get("idempotency-key");
  if (value === null) return null;
  if (!VISIBLE_ASCII.test(value) || value.length > MAX.idempotencyKeyCharacters) {
    throw invalidField("Idempotency-Key", `must be 1 to ${MAX.idempotencyKeyCharacters} visible ASCII characters`);
  }
  return value;
}

/** The elements of a list header: a comma within a quoted string does not end one (RFC 9110, section 5.6). */
export const listElements = (value: string): readonly string[] =>
  value.match(/(?:"(?:[^"\\]|\\.?)*(?:"|$)|[^",])+/g) ?? [];

const NAMES_WAIT = /^\s*wait\s*(?:[=;]|$)/i;
const SECONDS = /^[^=;]*=\s*("?)(\d+)\1\s*(?:;|$)/;

/** The seconds of the first `Prefer: wait=N` (RFC 7240, sections 2 and 4.3), capped; 0 if absent or malformed. */
export function waitSeconds(headers: Headers): number {
  const prefer = headers.get("prefer");
  if (prefer === null) return 0;
  const wait = listElements(prefer).find((preference) => NAMES_WAIT.test(preference)) ?? "";
  return Math.min(Number(SECONDS.exec(wait)?.[2] ?? 0), MAX.waitSeconds);
}

// The headers that the gateway itself adds to a request to an upstream.

/** Its value is visible ASCII: see credentialHeader in credentials/resolve.ts. */
export interface CredentialHeader {
  readonly name: string;
  readonly value: string;
}

type HeaderList = Array<[name: string, value: string]>;

export const credentialHeaders = (credential: CredentialHeader | null): HeaderList =>
  credential === null ? [] : [[credential.name, credential.value]];

/** @param invocationId null for a connection that is not an invocation */
export function ownHeaders(requestId: string, invocationId: string | null): HeaderList {
  const own: HeaderList = [["x-request-id", requestId]];
  if (invocationId !== null) own.push(["x-service-invocation-id", invocationId]);
  return own;
}

// What is known of an exchange so far. It is filled in as the call goes on, so that the record of a failure has it too.

export interface Trace {
  /** When the first connection was dialled, by performance.now(); null before that. */
  dialled_at: number | null;
  is_connected: boolean;
  /** Set when the head of the final response has come. */
  upstream_status: number | null;
  response_content_type: string | null;
  /** Bytes of the decoded body, as far as it was read. */
  resp_size: number | null;
}

export function newTrace(): Trace {
  return { dialled_at: null, is_connected: false, upstream_status: null, response_content_type: null, resp_size: null };
}

export function noteHead(trace: Trace, response: Answer): void {
  trace.upstream_status = response.status;
  // A longer content type would only fill the record.
  trace.response_content_type = response.headers.get("content-type")?.slice(0, 256) ?? null;
  trace.resp_size = null;
}

/** Whether the call has begun to connect, and has no connection yet. */
export const isDialling = ({ dialled_at, is_connected }: Trace): boolean => dialled_at !== null && !is_connected;

/** Whole milliseconds from the first dial to `at`; null when one of the two never came. */
export const sinceDialled = ({ dialled_at }: Trace, at: number | null): number | null =>
  dialled_at === null || at === null ? null : Math.max(0, Math.round(at - dialled_at));

/** What the record keeps of a call, however the call went. */
export const traced = (trace: Trace, now: number) => ({
  upstream_status: trace.upstream_status,
  latency_ms: sinceDialled(trace, now),
  resp_size: trace.resp_size,
  response_content_type: trace.response_content_type,
});
