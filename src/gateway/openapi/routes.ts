// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both come from the binary and are made when they are
// first asked for; nothing is read from disk or from another host to show them. The page runs no inline script, and the
// policy of all pages holds the browser to that.

import { readFileSync } from "node:fs";
import faviconPath from "swagger-ui-dist/favicon-32x32.png" with { type: "file" };
import stylePath from "swagger-ui-dist/swagger-ui.css" with { type: "file" };
import bundlePath from "swagger-ui-dist/swagger-ui-bundle.js" with { type: "file" };
import { type Asset, type Assets, asset, pageAsset } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { apiDocument, type DescribedApi } from "./document.ts";

/** Routes that document `api`, which is every route of the gateway but these. */
export function docsRoutes(api: DescribedApi, { madeOnce }: Assets, { version }: { readonly version: string }) {
  const files = {
    ...pageAssets(),
    "/swagger/json": async () => asset(await apiDocument(api, version), "application/json"),
  };
  const app = routes().get("/swagger/", () => Response.redirect("../swagger"), { detail: { hide: true } });
  for (const [path, make] of Object.entries(files)) {
    app.get(path, madeOnce(make), { detail: { hide: true } });
  }
  return app;
}

/** Paths are relative to the page, so that it works below a proxy's prefix too. */
const PAGE = `<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>tollgate API</title>
    <link rel="icon" type="image/png" href="swagger/favicon.png">
    <link rel="stylesheet" href="swagger/swagger-ui.css">
    <script src="swagger/swagger-ui-bundle.js" defer></script>
    <script src="swagger/initializer.js" defer></script>
  </head>
  <body>
    <div id="swagger-ui"></div>
  </body>
</html>
`;

/** `validatorUrl: null` keeps the page from sending the document's address to a public validator. */
const SETTINGS = {
  url: "swagger/json",
  dom_id: "#swagger-ui",
  validatorUrl: null,
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  // A token stays in the page's memory: the browser's storage would keep it after the page is closed.
  persistAuthorization: false,
};

/**
 * Endpoints of other servers are shown but can't be tried: the page calls only the gateway that it came from. Lines of JSON
 * are shown as text: by itself the page shows nothing of a type that it does not know.
 */
const INITIALIZER = `const isHere = (state, path, method) => {
  const servers = state.getIn(["json", "paths", path, method, "servers"]);
  return servers === undefined || servers.some((server) => server.get("url") === "/");
};
const OwnServerOnly = {
  statePlugins: {
    spec: { wrapSelectors: { allowTryItOutFor: () => isHere } },
  },
};
const linesAsText = async (response) => {
  const { data, headers } = response;
  if (!(data instanceof Blob) || !headers["content-type"]?.startsWith("application/jsonl")) return response;
  const text = await data.text();
  return { ...response, data: text, text, headers: { ...headers, "content-type": "text/plain" } };
};
const settings = ${JSON.stringify(SETTINGS)};
SwaggerUIBundle({ ...settings, plugins: [OwnServerOnly], responseInterceptor: linesAsText });
`;

function embedded(path: string, type: string): () => Asset {
  return () => asset(readFileSync(path), type);
}

/** Everything below /swagger but the document itself, by path. */
function pageAssets(): Readonly<Record<string, () => Asset>> {
  return {
    "/swagger": () => pageAsset(PAGE),
    "/swagger/initializer.js": () => asset(INITIALIZER, "text/javascript; charset=utf-8"),
    "/swagger/swagger-ui-bundle.js": embedded(bundlePath, "text/javascript; charset=utf-8"),
    "/swagger/swagger-ui.css": embedded(stylePath, "text/css; charset=utf-8"),
    "/swagger/favicon.png": embedded(faviconPath, "image/png"),
  };
}
