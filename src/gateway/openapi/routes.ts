// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both are made at start-up and come from the
// binary; nothing is read from disk or from another host to show them.

import type { AnyElysia } from "elysia";
import { turnOf } from "../../concurrency/request-turns.ts";
import { ANSWER_WAIT_MS_MAX } from "../../core/limits.ts";
import {
  createLargeResponses,
  PIECE_CHARACTERS,
  piecesOfBytes,
  SMALL_CHARACTERS,
} from "../../http/large-response.ts";
import { notModified, routes, STRANGERS } from "../../http/server.ts";
import { type Asset, asset, pageAssets } from "./assets.ts";
import { apiDocument } from "./document.ts";

/** Routes that document `api`, which is every route of the gateway but these. */
export async function docsRoutes(api: AnyElysia, options: { readonly version: string }) {
  const assets = {
    ...pageAssets(),
    "/swagger/json": asset(await apiDocument(api, options.version), "application/json"),
  };
  const app = routes().get("/swagger/", () => Response.redirect("../swagger"), { detail: { hide: true } });
  for (const [path, file] of Object.entries(assets)) {
    app.get(path, ({ request }) => serve(request, file), { detail: { hide: true } });
  }
  return app;
}

/** Of the files that are being sent, a piece of each: none of it is a tenant's. */
const BYTES_MAX = 8 * 1024 * 1024;
const respond = createLargeResponses({ bytesMax: BYTES_MAX, waitMsMax: ANSWER_WAIT_MS_MAX });

async function serve(request: Request, { bytes, type, headers }: Asset): Promise<Response> {
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
