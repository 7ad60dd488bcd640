// Swagger UI at /swagger and the OpenAPI document at /swagger/json. Both come from the binary and are made when they are
// first asked for; nothing is read from disk or from another host to show them. The page runs no inline script, and the
// policy of all pages holds the browser to that.

import { readFileSync } from "node:fs";
import faviconPath from "swagger-ui-dist/favicon-32x32.png" with { type: "file" };
import stylePath from "swagger-ui-dist/swagger-ui.css" with { type: "file" };
import bundlePath from "swagger-ui-dist/swagger-ui-bundle.js" with { type: "file" };
import { type Asset, type Assets, asset, pageAsset } from "../../http/assets.ts";
import type { Network } from "../../x402/network.ts";
import { apiDocument, type DescribedApi } from "./document.ts";
import initializer from "./initializer.js" with { type: "text" };

/** Routes that document `api`, which is every route of the gateway but these. */
export function docsRoutes(api: DescribedApi, { routesOf }: Assets, version: string, network: Network) {
  return routesOf("/swagger", {
    "/swagger": () => pageAsset(PAGE),
    "/swagger/initializer.js": () => asset(initializer, "text/javascript; charset=utf-8"),
    "/swagger/swagger-ui-bundle.js": embedded(bundlePath, "text/javascript; charset=utf-8"),
    "/swagger/swagger-ui.css": embedded(stylePath, "text/css; charset=utf-8"),
    "/swagger/favicon.png": embedded(faviconPath, "image/png"),
    "/swagger/json": async () => asset(await apiDocument(api, version, network), "application/json"),
  });
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

function embedded(path: string, type: string): () => Asset {
  return () => asset(readFileSync(path), type);
}
