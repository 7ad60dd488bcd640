// A streamed answer: the headers with which it goes on, and the record that is made while its body passes. The headers are the
// upstream's, but for those of its connection, those in which the gateway itself speaks, and those that would speak for the
// gateway: to the caller about the whole origin, which is no single upstream's, or to the proxies that stand before it.
import { createHash } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { type ErrorClass, errorClassOf } from "../../core/states.ts";
import { type Answer, isEncoded } from "../../http/client/answer.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare } from "../../kernel/share.ts";
import { freeMemory } from "../../wire/body.ts";
import type { Ending } from "../invocations/service.ts";

const LEFT_BEHIND = new Set([
  "connection",
  "keep-alive",
  "proxy-authenticate",
  "proxy-authorization",
  "proxy-connection",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
  "set-cookie",
  "set-cookie2",
  // The server writes its own, by what it sends.
  "content-length",
  "date",
  "x-request-id",
  "x-payment-response",
  "payment-response",
  // Of the gateway alone: it asks for payments, and for tokens. An upstream's 401 is about the gateway's credential.
  "payment-required",
  "www-authenticate",
  "authentication-info",
  // The caller would apply these to everything from the same origin.
  "alt-svc",
  "clear-site-data",
  "strict-transport-security",
  "nel",
  "report-to",
  "reporting-endpoints",
  "service-worker-allowed",
  "accept-ch",
  "critical-ch",
  "expect-ct",
  "public-key-pins",
  "public-key-pins-report-only",
  "set-login",
  "use-as-dictionary",
  // Orders to a proxy: what to send in this answer's place, what to keep for others.
  "x-sendfile",
  "x-lighttpd-send-file",
  "x-reproxy-url",
  "x-reproxy-file",
  "surrogate-control",
  "surrogate-key",
  "cache-tag",
  "edge-control",
]);

/** Of the gateway, of the whole origin, and orders to nginx and LiteSpeed, internal redirects among them. */
const PREFIXES_LEFT_BEHIND = ["x-service-", "access-control-", "x-accel-", "x-litespeed-"];
/** Asked of servers of event streams by MCP: it says that nothing may be held back. */
const BUFFERING = "x-accel-buffering";

function isLeftBehind(name: string): boolean {
  if (name === BUFFERING) return false;
  return (
    LEFT_BEHIND.has(name) ||
    PREFIXES_LEFT_BEHIND.some((prefix) => name.startsWith(prefix)) ||
    name.endsWith("cdn-cache-control")
  );
}

/** Headers that describe the encoded body: they stay behind when the body passes decoded. */
const OF_ENCODED = new Set(["content-encoding", "content-md5", "content-digest", "digest", "repr-digest"]);

/**
 * @param own headers that the gateway adds
 * @param isGet whether a shared cache may take the answer for one to everybody
 */
export function answerHeaders(response: Answer, own: Readonly<Record<string, string>>, isGet: boolean): Headers {
  const named = (response.headers.get("connection") ?? "").split(",");
  const left = new Set(named.map((name) => name.trim().toLowerCase()));
  const decoded = isEncoded(response.headers);
  const headers = new Headers();
  for (const [name, value] of response.headers) {
    if (isLeftBehind(name) || left.has(name)) continue;
    if (decoded && OF_ENCODED.has(name)) continue;
    headers.append(name, value);
  }
  if (response.status === 402) headers.set("cache-control", "no-store");
  else if (isGet) headers.set("cache-control", forOne(headers.get("cache-control")));
  for (const [name, value] of Object.entries(own)) headers.set(name, value);
  return headers;
}

/** A comma within a quoted string parts nothing (RFC 9110, section 5.6). */
const DIRECTIVE = /(?:"(?:[^"\\]|\\.?)*(?:"|$)|[^",])+/g;
/** What lets a shared cache keep an answer that was asked for with a token (RFC 9111, section 3.5). */
const SHARED = /^\s*(public|s-maxage|private)\s*(=|$)/i;

function forOne(cacheControl: string | null): string {
  const directives = cacheControl?.match(DIRECTIVE) ?? [];
  const kept = directives.filter((directive) => !SHARED.test(directive)).map((directive) => directive.trim());
  return [...kept.filter((directive) => directive !== ""), "private"].join(", ");
}

/** A path of the API, behind any prefix. */
const API = "/v1/";
const SOMEWHERE = "http://gateway.invalid";

/**
 * Whether a `Location` leads to the gateway's own API: a client that follows it would send its own token there.
 * @param hosts under which callers know the gateway
 */
export function leadsBack(location: string, hosts: readonly string[]): boolean {
  const url = URL.parse(location, `${SOMEWHERE}${API}proxy/agent/stream`);
  if (url === null || !isPathOfApi(url.pathname)) return false;
  return url.origin === SOMEWHERE || hosts.some((host) => URL.parse(`${url.protocol}//${host}`)?.host === url.host);
}

/** Also percent-encoded, as a proxy before the gateway may decode it. */
function isPathOfApi(path: string): boolean {
  try {
    return decodeURIComponent(path).includes(API);
  } catch {
    return true;
  }
}

// The record of an answer: its head, the time of its first byte, its length, the captured start, and the hash for the receipt.

const START_BYTES_FIRST = 4096;
/** When so much of an answer has come, its length is believed. */
const BELIEVED_BYTES = 64 * 1024;

export function createResponseRecorder({ capture, receipt }: Pick<Call, "capture" | "receipt">, memory: TenantBudget) {
  let dialledAt: number | null = null;
  let firstAt: number | null = null;
  let status: number | null = null;
  let contentType: string | null = null;
  let size = 0;
  /** As the answer tells it; of an encoded one no more than a hint. */
  let length = 0;
  let start = new Uint8Array();
  let captured = 0;
  const hash = receipt ? createHash("sha256") : null;

  const since = (from: number | null, to: number | null) =>
    from === null || to === null ? null : Math.max(0, Math.round(to - from));

  function grow(wanted: number): void {
    const more = memory.take(wanted - start.length);
    if (more === 0) return;
    const larger = new Uint8Array(start.length + more);
    larger.set(start);
    freeMemory(start);
    start = larger;
  }

  function roomFor(wanted: number): number {
    const ahead = wanted >= BELIEVED_BYTES && length > wanted ? length : 2 * start.length;
    return Math.min(MAX.capturedBytes, Math.max(wanted, ahead, START_BYTES_FIRST));
  }

  function keep(bytes: Uint8Array): void {
    const wanted = Math.min(captured + bytes.length, MAX.capturedBytes);
    // After a gap in the capture nothing belongs to the start any more.
    if (captured < size - bytes.length || wanted <= captured) return;
    if (wanted > start.length) grow(roomFor(wanted));
    const part = bytes.subarray(0, Math.min(wanted, start.length) - captured);
    start.set(part, captured);
    captured += part.length;
  }

  function ending(error_class: ErrorClass | null, isWhole: boolean): Ending {
    const whole = captured === start.length ? start : start.slice(0, captured);
    const response = status !== null && capture ? whole : null;
    memory.giveBack(start.length);
    start = new Uint8Array();
    return {
      status: error_class === null ? "succeeded" : "failed",
      error_class,
      upstream_status: status,
      latency_ms: since(dialledAt, performance.now()),
      ttft_ms: since(dialledAt, firstAt),
      resp_size: status === null ? null : size,
      resp_sha256: isWhole && hash !== null ? hash.digest("hex") : null,
      response,
      response_truncated: response !== null && (!isWhole || size > response.length),
      response_content_type: contentType,
    };
  }

  return {
    dialled() {
      dialledAt ??= performance.now();
    },
    head(response: Answer) {
      status = response.status;
      length = Number(response.headers.get("content-length")) || 0;
      // A longer content type would only fill the record.
      contentType = response.headers.get("content-type")?.slice(0, 256) ?? null;
    },
    piece(bytes: Uint8Array) {
      if (bytes.length === 0) return;
      firstAt ??= performance.now();
      size += bytes.length;
      hash?.update(bytes);
      if (capture) keep(bytes);
    },
    whole: () => ending(status === null ? "internal" : errorClassOf(status), true),
    broken: (errorClass: ErrorClass) => ending(errorClass, false),
  };
}

export type ResponseRecorder = ReturnType<typeof createResponseRecorder>;

/** Memory that all exchanges share, so that it is bounded however many there are. @returns the share of a tenant */
export function createBudget(bytesMax: number) {
  const memory = createFairShare({ size: bytesMax, least: 0 });
  const of = (tenant: string) => ({
    /** Takes as many of the bytes as the tenant may have now, and gives how many those are. */
    take(bytes: number) {
      const taken = Math.min(bytes, memory.roomOf(tenant));
      memory.take(tenant, null, taken);
      return taken;
    },
    giveBack: (bytes: number) => memory.giveBack(tenant, null, bytes),
  });
  return Object.assign(of, { inUse: () => memory.inUse });
}

export type Budget = ReturnType<typeof createBudget>;
export type TenantBudget = ReturnType<Budget>;
