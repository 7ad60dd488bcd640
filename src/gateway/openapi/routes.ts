// The routes of Swagger UI at /swagger and of the OpenAPI document at /swagger/json, both made at their first request
// from the binary alone. The page runs no inline script, which the content security policy of all pages forbids.
import { readFileSync } from "node:fs";
import faviconPath from "swagger-ui-dist/favicon-32x32.png" with { type: "file" };
import libraryStylePath from "swagger-ui-dist/swagger-ui.css" with { type: "file" };
import bundlePath from "swagger-ui-dist/swagger-ui-bundle.js" with { type: "file" };
import { type Asset, type Assets, asset, pageAsset } from "../../http/assets.ts";
import type { Network } from "../../x402/network.ts";
import { apiDocument, type DescribedApi } from "./document.ts";
import initializer from "./initializer.js" with { type: "text" };
import style from "./style.css" with { type: "text" };

/** The routes that document `api`, which are all routes of the gateway except these. */
export function docsRoutes(api: DescribedApi, { routesOf }: Assets, version: string, network: Network) {
  return routesOf("/swagger", {
    "/swagger": () => pageAsset(PAGE, SHOWS_RESPONSES),
    "/swagger/initializer.js": () => asset(initializer, "text/javascript; charset=utf-8"),
    "/swagger/style.css": () => asset(style, "text/css; charset=utf-8"),
    "/swagger/swagger-ui-bundle.js": embedded(bundlePath, "text/javascript; charset=utf-8"),
    "/swagger/swagger-ui.css": embedded(libraryStylePath, "text/css; charset=utf-8"),
    "/swagger/favicon.png": embedded(faviconPath, "image/png"),
    "/swagger/json": async () => asset(await apiDocument(api, version, network), "application/json"),
  });
}

/** Lets the page show images, audio and video of agents' responses from data: and blob: URLs, whose bytes the page holds. */
const SHOWS_RESPONSES = { "img-src": "'self' data: blob:", "media-src": "blob:" };

/** Its paths are relative, so that the page works below a proxy's prefix too. */
const PAGE = `<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>tollgate API</title>
    <link rel="icon" type="image/png" href="swagger/favicon.png">
    <link rel="stylesheet" href="swagger/swagger-ui.css">
    <link rel="stylesheet" href="swagger/style.css">
    <script src="swagger/swagger-ui-bundle.js" defer></script>
    <script src="swagger/initializer.js" defer></script>
  </head>
  <body>
    <noscript>
      <p>This page needs JavaScript. Without it, read the <a href="docs/api">manual</a> or the <a href="swagger/json">document of the API</a>.</p>
    </noscript>
    <div id="swagger-ui"></div>
    <p id="said" role="status"></p>
  </body>
</html>
`;

const embedded =
  (path: string, type: string): (() => Asset) =>
  () =>
    asset(readFileSync(path), type);
