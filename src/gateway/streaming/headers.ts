// The headers of a streamed answer: the upstream's, but for those of its connection, its cookies, which would be the
// gateway's, and those in which the gateway itself speaks.
import { isEncoded } from "../../edge/body.ts";

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
]);

/** Of what was encoded, when it passes decoded. */
const OF_ENCODED = new Set(["content-encoding", "content-md5", "content-digest", "digest", "repr-digest"]);

export function answerHeaders(response: Response, own: Readonly<Record<string, string>>): Headers {
  const named = (response.headers.get("connection") ?? "").split(",");
  const left = new Set(named.map((name) => name.trim().toLowerCase()));
  const decoded = isEncoded(response);
  const headers = new Headers();
  for (const [name, value] of response.headers) {
    if (LEFT_BEHIND.has(name) || left.has(name) || name.startsWith("x-service-")) continue;
    if (decoded && OF_ENCODED.has(name)) continue;
    headers.append(name, value);
  }
  for (const [name, value] of Object.entries(own)) headers.set(name, value);
  return headers;
}

/** Where every path of the API is, whatever stands before it. */
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
  if (url === null || !url.pathname.includes(API)) return false;
  return (
    url.origin === SOMEWHERE || hosts.some((host) => URL.parse(`${url.protocol}//${host}`)?.host === url.host)
  );
}
