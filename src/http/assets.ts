// Files that the server shows to a browser, each made or read once, when it is first asked for. Each has a tag, so that a copy that is still
// good is not sent again; pages have a policy that limits the browser to this server and to files of its own.

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

/** An asset that a browser keeps and asks about before each further use, because its address names no version. */
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

/** The files of a server, which share a budget: a piece of each that is being sent. They count to no tenant. */
export function createAssets() {
  const { respond, inUse } = createLargeResponses({ bytesMax: MAX.assetBytes });
  /**
   * A handler that makes its file for the first request, so that no start waits for it (Swagger's files and the document
   * took a fifth of every start).
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
    /** Routes of a page and the files that belong to it, by path; a slash after the page leads to the page. */
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
