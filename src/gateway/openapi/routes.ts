// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both come from the binary and are made when they are
// first asked for; nothing is read from disk or from another host to show them.
import { asset, madeOnce } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { pageAssets } from "./assets.ts";
import { apiDocument, type DescribedApi } from "./document.ts";

/** Routes that document `api`, which is every route of the gateway but these. */
export function docsRoutes(api: DescribedApi, { version }: { readonly version: string }) {
  const assets = {
    ...pageAssets(),
    "/swagger/json": async () => asset(await apiDocument(api, version), "application/json"),
  };
  const app = routes().get("/swagger/", () => Response.redirect("../swagger"), { detail: { hide: true } });
  for (const [path, make] of Object.entries(assets)) {
    app.get(path, madeOnce(make), { detail: { hide: true } });
  }
  return app;
}
