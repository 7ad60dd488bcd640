// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both are made at start-up and come from the
// binary; nothing is read from disk or from another host to show them.
import type { AnyElysia } from "elysia";
import { piecesOfBytes, respondLarge } from "../../http/large-response.ts";
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

async function serve(request: Request, { bytes, type, headers }: Asset): Promise<Response> {
  const known = request.headers.get("if-none-match") ?? "";
  const isCurrent = known.split(",").some((tag) => tag.trim().replace(/^W\//, "") === headers["etag"]);
  if (isCurrent) return notModified({ ...headers, "content-type": type });
  const answer = { tenant: STRANGERS, request, type, headers, weight: bytes.length };
  return respondLarge(answer, async () => ({ weight: bytes.length, pieces: piecesOfBytes(bytes) }));
}
