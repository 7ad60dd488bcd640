// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both are made at start-up and come from the
// binary; nothing is read from disk or from another host to show them.
import type { AnyElysia } from "elysia";
import { asset, serveAsset } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { pageAssets } from "./assets.ts";
import { apiDocument } from "./document.ts";

/** Routes that document `api`, which is every route of the gateway but these. */
export async function docsRoutes(api: AnyElysia, options: { readonly version: string }) {
  const assets = {
    ...pageAssets(),
    "/swagger/json": asset(await apiDocument(api, options.version), "application/json"),
  };
  const app = routes().get("/swagger/", () => Response.redirect("../swagger"), { detail: { hide: true } });
  for (const [path, file] of Object.entries(assets)) {
    app.get(path, ({ request }) => serveAsset(request, file), { detail: { hide: true } });
  }
  return app;
}
