// Files for browsers, such as the manual and Swagger. Each is made when it is first requested, and has an ETag, so that a
// current copy is not sent again. Pages have a content security policy that limits the browser to files of this server.

import { MAX } from "../kernel/limits.ts";
import { turnOf } from "../kernel/turns.ts";
import { routes } from "./elysia.ts";
import {
  createLargeResponses,
  type LargeResponses,
  notModified,
  PIECE_CHARACTERS,
  piecesOfBytes,
  SMALL_CHARACTERS,
} from "./responses.ts";
import { STRANGERS } from "./server.ts";

const PAGE_POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "img-src 'self' data:",
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join("; ");

export interface Asset {
  readonly bytes: Uint8Array;
  readonly type: string;
  readonly headers: Readonly<Record<string, string>>;
}

/** An asset that a browser caches but revalidates before each use, since its URL names no version. */
export function asset(content: string | Uint8Array, type: string): Asset {
  const bytes = Buffer.from(content);
  const digest = new Bun.CryptoHasher("sha256").update(bytes).digest("base64url");
  const headers = {
    etag: `"${digest}"`,
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
  };
  return { bytes, type, headers };
}

/** A page that loads nothing from another host and runs no inline script or style. */
export function pageAsset(html: string): Asset {
  const page = asset(html, "text/html; charset=utf-8");
  const guards = { "content-security-policy": PAGE_POLICY, "referrer-policy": "no-referrer" };
  return { ...page, headers: { ...page.headers, ...guards } };
}

export type Assets = ReturnType<typeof createAssets>;

/** The assets of a server. They share one memory budget, which a response uses by a piece at a time; no tenant is charged. */
export function createAssets() {
  const { respond, inUse } = createLargeResponses({ bytesMax: MAX.assetBytes });
  /**
   * A handler that makes its file at the first request: making Swagger's files and the API document at the start took a fifth
   * of its time.
   */
  const madeOnce = (make: () => Asset | Promise<Asset>) => {
    let made: Promise<Asset> | null = null;
    const forget = (error: unknown): never => {
      made = null;
      throw error;
    };
    return async ({ request }: { readonly request: Request }): Promise<Response> => {
      made ??= Promise.try(make).catch(forget);
      return serveAsset(respond, request, await made);
    };
  };
  return {
    madeOnce,
    /** The response with one of several files that stand at one path. */
    serve: (request: Request, file: Asset) => serveAsset(respond, request, file),
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

async function serveAsset(
  respond: LargeResponses["respond"],
  request: Request,
  { bytes, type, headers }: Asset,
): Promise<Response> {
  const known = request.headers.get("if-none-match") ?? "";
  const isCurrent = known.split(",").some((tag) => tag.trim().replace(/^W\//, "") === headers["etag"]);
  if (isCurrent) return notModified({ ...headers, "content-type": type });
  await turnOf(STRANGERS);
  if (bytes.length <= SMALL_CHARACTERS) {
    return new Response(bytes, { headers: { ...headers, "content-type": type } });
  }
  const answer = { tenant: STRANGERS, request, type, headers, weight: PIECE_CHARACTERS };
  return respond(answer, async () => ({ weight: PIECE_CHARACTERS, pieces: piecesOfBytes(bytes) }));
}
