// Files for browsers, such as the manual and Swagger. Each is made when it is first requested, and compressed at the same time.
// Each has an ETag, so that a current copy is not sent again. Pages have a content security policy that limits the browser to
// files of this server.
import { promisify } from "node:util";
import zlib from "node:zlib";
import { MAX } from "../kernel/limits.ts";
import { turnOf } from "../kernel/turns.ts";
import { routes } from "./elysia.ts";
import pageStyle from "./page.css" with { type: "text" };
import {
  createLargeResponses,
  type LargeResponses,
  notModified,
  PIECE_CHARACTERS,
  piecesOfBytes,
  SMALL_CHARACTERS,
} from "./responses.ts";
import { STRANGERS } from "./server.ts";

const PAGE_POLICY = {
  "default-src": "'none'",
  "script-src": "'self'",
  "style-src": "'self'",
  "img-src": "'self' data:",
  "connect-src": "'self'",
  "base-uri": "'none'",
  "form-action": "'none'",
  "frame-ancestors": "'none'",
};

/** A compressed file that is larger than this part of the plain one is not worth the work of the browser. */
const COMPRESSED_MAX = 0.9;

export interface Asset {
  readonly bytes: Uint8Array;
  readonly type: string;
  readonly headers: Readonly<Record<string, string>>;
}

/** An asset that a browser caches but revalidates before each use, since its URL names no version. */
export function asset(content: string | Uint8Array, type: string): Asset {
  const bytes = Buffer.from(content);
  const etag = `"${new Bun.CryptoHasher("sha256").update(bytes).digest("base64url")}"`;
  return { bytes, type, headers: { etag, "cache-control": "no-cache", "x-content-type-options": "nosniff" } };
}

export const styleAsset = (own: string): Asset => asset(`${pageStyle}${own}`, "text/css; charset=utf-8");

/** A page without inline scripts and styles, and with nothing from other hosts. @param widened its own directives of the policy */
export function pageAsset(html: string, widened: Readonly<Record<string, string>> = {}): Asset {
  const page = asset(html, "text/html; charset=utf-8");
  const directives = Object.entries({ ...PAGE_POLICY, ...widened }).map((directive) => directive.join(" "));
  const guards = { "content-security-policy": directives.join("; "), "referrer-policy": "no-referrer" };
  return { ...page, headers: { ...page.headers, ...guards } };
}

export type Assets = ReturnType<typeof createAssets>;

/** The assets of a server. They share one memory budget, which a response uses by a piece at a time; no tenant is charged. */
export function createAssets() {
  const { respond, inUse } = createLargeResponses({ bytesMax: MAX.assetBytes });
  /** Makes its file at the first request: to make Swagger's files and the API document at the start took a fifth of its time. */
  const madeOnce = (make: () => Asset | Promise<Asset>) => {
    let made: Promise<Representations> | null = null;
    const forget = (error: unknown): never => {
      made = null;
      throw error;
    };
    return async ({ request }: { readonly request: Request }): Promise<Response> => {
      made ??= Promise.try(make).then(representationsOf).catch(forget);
      return serveAsset(respond, request, await made);
    };
  };
  return {
    madeOnce,
    /** Routes for a page and its files, by path. The page's path with a slash at its end redirects to the page. */
    routesOf(page: string, files: Readonly<Record<string, () => Asset | Promise<Asset>>>) {
      const hidden = { detail: { hide: true } };
      const app = routes().get(`${page}/`, () => Response.redirect(`..${page}`), hidden);
      for (const [path, make] of Object.entries(files)) app.get(path, madeOnce(make), hidden);
      return app;
    },
    inUse,
  };
}

/** The forms in which one asset is sent. They differ in ETag, as strong tags must (RFC 9110, section 8.8.3). */
interface Representations {
  readonly plain: Asset;
  /** Null for a file that does not get smaller, such as an image. */
  readonly gzip: Asset | null;
}

const compress = promisify(zlib.gzip);

/** Compresses outside of the event loop, since the largest file takes 60 ms. */
async function representationsOf(asset: Asset): Promise<Representations> {
  const { bytes, type } = asset;
  const compressed = await compress(bytes, { level: 9 });
  if (compressed.length > bytes.length * COMPRESSED_MAX) return { plain: asset, gzip: null };
  const vary = [asset.headers["vary"] ?? [], "accept-encoding"].flat().join(", ");
  const headers: Asset["headers"] = { ...asset.headers, vary };
  const etag = (headers["etag"] ?? "").replace(/"$/, '-gzip"');
  return {
    plain: { bytes, type, headers },
    gzip: { bytes: compressed, type, headers: { ...headers, etag, "content-encoding": "gzip" } },
  };
}

/** Whether the request's Accept-Encoding names gzip, or stands for all codings, and does not refuse it by `q=0`. */
function takesGzip(request: Request): boolean {
  const codings = request.headers.get("accept-encoding") ?? "";
  return (weightOf(codings, "gzip") ?? weightOf(codings, "*") ?? 0) > 0;
}

/** Caches must tell a page from the JSON at its address. */
export const VARIES = { vary: "accept" };

/** Whether a caller asks for HTML by its name, and not for JSON first. Programs that take anything get JSON. */
export function wantsHtml(accept: string): boolean {
  const weight = weightOf(accept, "text/html") ?? 0;
  return weight > 0 && weight >= (weightOf(accept, "application/json") ?? 0);
}

/** The weight that a list such as `Accept` gives a value by its own name (RFC 9110, section 12.4.2); null where it is not named. */
function weightOf(list: string, value: string): number | null {
  for (const member of list.toLowerCase().split(",")) {
    const [name, ...parameters] = member.split(";").map((part) => part.trim());
    if (name !== value) continue;
    const weight = parameters.find((parameter) => parameter.startsWith("q="));
    return weight === undefined ? 1 : Number(weight.slice(2)) || 0;
  }
  return null;
}

async function serveAsset(respond: LargeResponses["respond"], request: Request, { plain, gzip }: Representations) {
  const { bytes, type, headers } = gzip !== null && takesGzip(request) ? gzip : plain;
  const known = request.headers.get("if-none-match") ?? "";
  const tags = known.split(",").map((tag) => tag.trim().replace(/^W\//, ""));
  // A star stands for whatever there is (RFC 9110, section 13.1.2).
  const isCurrent = known.trim() === "*" || tags.includes(headers["etag"] ?? "");
  if (isCurrent) {
    const { "content-encoding": _, ...others } = headers;
    return notModified({ ...others, "content-type": type });
  }
  await turnOf(STRANGERS);
  if (bytes.length <= SMALL_CHARACTERS) return new Response(bytes, { headers: { ...headers, "content-type": type } });
  const answer = { tenant: STRANGERS, request, type, headers, weight: PIECE_CHARACTERS };
  return respond(answer, async () => ({ weight: PIECE_CHARACTERS, pieces: piecesOfBytes(bytes) }));
}
