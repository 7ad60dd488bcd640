// A streamed response: chooses the headers that pass to the caller, and makes the record while the body passes. All headers of
// the upstream pass except those of its connection, those that only the gateway sets, and those that would speak for the
// gateway: to the caller about the whole origin, which no single upstream owns, or to proxies in front of the gateway.
import { createHash } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { errorClassOf } from "../../core/states.ts";
import { isEncoded } from "../../http/client/body.ts";
import type { Answer } from "../../http/client/exchange.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare } from "../../kernel/share.ts";
import type { Ending } from "../invocations/service.ts";
import type { CallFailure } from "../upstream/failure.ts";
import { isDialling, listElements, newTrace, noteHead, sinceDialled, traced } from "../upstream/headers.ts";

const namesIn = (...lists: readonly string[]) => new Set(lists.flatMap((list) => list.split(" ")));

const DROPPED_HEADERS = namesIn(
  "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade",
  "set-cookie set-cookie2",
  // Set by the gateway's own HTTP server.
  "content-length date x-request-id x-payment-response payment-response",
  // Only the gateway asks callers for payments and tokens. An upstream's 401 is about the gateway's credential.
  "payment-required www-authenticate authentication-info",
  // The caller would apply these to everything from the same origin.
  "alt-svc clear-site-data strict-transport-security nel report-to reporting-endpoints service-worker-allowed",
  "accept-ch critical-ch expect-ct public-key-pins public-key-pins-report-only set-login use-as-dictionary",
  // Instructions to a proxy: what to send instead of this response, what to cache for others.
  "x-sendfile x-lighttpd-send-file x-reproxy-url x-reproxy-file surrogate-control surrogate-key cache-tag edge-control",
);

/** Headers of the gateway, of the whole origin, and instructions to nginx and LiteSpeed, such as internal redirects. */
const DROPPED_PREFIXES = ["x-service-", "access-control-", "x-accel-", "x-litespeed-"];
/** This one passes: MCP asks servers to set it on event streams, which turns off buffering. */
const BUFFERING = "x-accel-buffering";

function isDropped(name: string): boolean {
  if (name === BUFFERING) return false;
  if (DROPPED_HEADERS.has(name) || name.endsWith("cdn-cache-control")) return true;
  return DROPPED_PREFIXES.some((prefix) => name.startsWith(prefix));
}

/** Headers that describe the encoded body, dropped when the body passes decoded. */
const OF_ENCODED = namesIn("content-encoding content-md5 content-digest digest repr-digest");

/** @param own headers that the gateway adds @param isGet whether a shared cache could serve the response to others */
export function answerHeaders(response: Answer, own: Readonly<Record<string, string>>, isGet: boolean): Headers {
  const named = (response.headers.get("connection") ?? "").split(",");
  const ofConnection = new Set(named.map((name) => name.trim().toLowerCase()));
  const decoded = isEncoded(response.headers);
  const headers = new Headers();
  for (const [name, value] of response.headers) {
    if (isDropped(name) || ofConnection.has(name)) continue;
    if (decoded && OF_ENCODED.has(name)) continue;
    headers.append(name, value);
  }
  if (response.status === 402) headers.set("cache-control", "no-store");
  else if (isGet) headers.set("cache-control", asPrivate(headers.get("cache-control")));
  for (const [name, value] of Object.entries(own)) headers.set(name, value);
  return headers;
}

/** Directives to drop: those that let a shared cache keep the response (RFC 9111, section 3.5), and `private`, which is added. */
const SHARED = /^\s*(public|s-maxage|private)\s*(=|$)/i;

function asPrivate(cacheControl: string | null): string {
  const directives = listElements(cacheControl ?? "");
  const kept = directives.filter((directive) => !SHARED.test(directive)).map((directive) => directive.trim());
  return [...kept.filter((directive) => directive !== ""), "private"].join(", ");
}

/** A path of the API, behind any prefix. */
const API = "/v1/";
/** Stand-ins for the gateway's origin, over http and https: `https:/v1` is a path of the same host only where the base is https. */
const SOMEWHERE = ["http://gateway.invalid", "https://gateway.invalid"];

/** Whether a `Location` leads to the gateway's API, where a client would send its token. @param hosts the gateway's */
export function leadsBack(location: string, hosts: readonly string[]): boolean {
  return SOMEWHERE.some((origin) => {
    const url = URL.parse(location, `${origin}${API}proxy/agent/stream`);
    if (url === null || !isApiPath(url.pathname)) return false;
    return url.origin === origin || hosts.some((host) => URL.parse(`${url.protocol}//${host}`)?.host === url.host);
  });
}

/** Finds the API's path in percent-encoding too, since a proxy in front of the gateway may decode it. */
function isApiPath(path: string): boolean {
  try {
    return decodeURIComponent(path).includes(API);
  } catch {
    return true;
  }
}

// The record of a response: its head, the time of its first byte, its length, the captured start, and the hash for the receipt.

const START_BYTES_FIRST = 4096;
/** After this many bytes the buffer grows to the response's Content-Length. A false one would waste memory if used earlier. */
const BELIEVED_BYTES = 64 * 1024;

export function createResponseRecorder({ capture, receipt }: Pick<Call, "capture" | "receipt">, memory: TenantBudget) {
  const trace = newTrace();
  let firstAt: number | null = null;
  let size = 0;
  /** The Content-Length, which is only a hint if the body is encoded. */
  let length = 0;
  let start = new Uint8Array();
  let captured = 0;
  const hash = receipt ? createHash("sha256") : null;

  function grow(wanted: number): void {
    const more = memory.take(wanted - start.length);
    if (more > 0) start = new Uint8Array(start.buffer.transfer(start.length + more));
  }

  function roomFor(wanted: number): number {
    const ahead = wanted >= BELIEVED_BYTES && length > wanted ? length : 2 * start.length;
    return Math.min(MAX.capturedBytes, Math.max(wanted, ahead, START_BYTES_FIRST));
  }

  function keep(bytes: Uint8Array): void {
    const wanted = Math.min(captured + bytes.length, MAX.capturedBytes);
    // The capture ends at the first gap. A gap arises when memory runs out.
    if (captured < size - bytes.length || wanted <= captured) return;
    if (wanted > start.length) grow(roomFor(wanted));
    const part = bytes.subarray(0, Math.min(wanted, start.length) - captured);
    start.set(part, captured);
    captured += part.length;
  }

  function ending(failure: Pick<Ending, "error_class" | "error_detail">, isWhole: boolean): Ending {
    const whole = captured === start.length ? start : start.slice(0, captured);
    const hasHead = trace.upstream_status !== null;
    const response = hasHead && capture ? whole : null;
    memory.giveBack(start.length);
    start = new Uint8Array();
    return {
      status: failure.error_class === null ? "succeeded" : "failed",
      ...failure,
      ...traced(trace, performance.now()),
      ttft_ms: sinceDialled(trace, firstAt),
      resp_size: hasHead ? size : null,
      resp_sha256: isWhole && hash !== null ? hash.digest("hex") : null,
      response,
      response_truncated: response !== null && (!isWhole || size > response.length),
    };
  }

  return {
    dialled() {
      trace.dialled_at ??= performance.now();
    },
    head(response: Answer) {
      noteHead(trace, response);
      length = Number(response.headers.get("content-length")) || 0;
    },
    piece(bytes: Uint8Array) {
      if (bytes.length === 0) return;
      firstAt ??= performance.now();
      size += bytes.length;
      hash?.update(bytes);
      if (capture) keep(bytes);
    },
    connected() {
      trace.is_connected = true;
    },
    isDialling: () => isDialling(trace),
    whole() {
      const { upstream_status: status } = trace;
      return ending({ error_class: status === null ? "internal" : errorClassOf(status), error_detail: null }, true);
    },
    broken: ({ errorClass, errorDetail }: Pick<CallFailure, "errorClass" | "errorDetail">) =>
      ending({ error_class: errorClass, error_detail: errorDetail }, false),
  };
}

export type ResponseRecorder = ReturnType<typeof createResponseRecorder>;

/** Bounds the memory of all exchanges together, shared fairly by tenants. @returns a function that gives a tenant's share */
export function createBudget(bytesMax: number) {
  const memory = createFairShare({ size: bytesMax, least: 0 });
  const of = (tenant: string) => ({
    /** Takes as many of the bytes as the tenant may have now. @returns how many it has taken */
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
