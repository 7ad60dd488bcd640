// The headers of a streamed answer: the upstream's, but for those of its connection, those in which the gateway itself
// speaks, and those that would speak for the gateway: to the caller about the whole origin, which is the gateway's and
// no single upstream's, or to the proxies that stand before it.
import { isEncoded } from "../../http/client/body.ts";
import type { Answer } from "../../http/client/exchange.ts";

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
 * Whether a `Location` leads to the gateway's own API. A client that follows redirects would make that request with
 * its own token, which is not an upstream's to use.
 *
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
