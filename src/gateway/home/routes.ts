// What the gateway answers at its root, to anybody: a page for a browser, and JSON for a program. Neither names
// anything of the machine. The page's links are relative, for proxies with a prefix. Its script is the manual's.
import { Type } from "@sinclair/typebox";
import { VERSION } from "../../core/startup.ts";
import { type Asset, type Assets, pageAsset, styleAsset, VARIES, wantsHtml } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { shape } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";
import { json } from "../../http/responses.ts";
import { baseUrl } from "../payment/service.ts";
import style from "./style.css" with { type: "text" };

const NAME = "tollgate";

/** The links of the JSON by name, each a path below the root and what it leads to. */
const LINKS: readonly (readonly [name: string, path: string, description: string])[] = [
  ["swagger", "/swagger", "The page on which the API can be tried."],
  ["openapi", "/swagger/json", "The API's OpenAPI document."],
  ["manual", "/docs", "The manual."],
  ["health", "/healthz", "Whether the process serves."],
  ["readiness", "/readyz", "Whether calls are accepted."],
  ["version", "/version", "The version, and the commit it was built from."],
  ["keys", "/.well-known/jwks.json", "The public signing keys."],
];

const linksOf = (base: string) => Object.fromEntries(LINKS.map(([name, path]) => [name, `${base}${path}`]));

const Links = Type.Object(
  Object.fromEntries(LINKS.map(([name, , description]) => [name, Type.String({ format: "uri", description })])),
  { description: "Absolute URLs: below TOLLGATE_PUBLIC_URL, or else below the request's own host." },
);

const service = operation({
  tag: "Service",
  open: true,
  summary: "Get the service",
  description: "For a browser (`Accept: text/html`) this is a page, which also says whether the gateway is ready.",
  response: {
    description: "What serves here, and where to go on.",
    schema: shape("Service", {
      name: Type.Literal(NAME, { description: "The product." }),
      version: Type.String({ description: "The version of the binary." }),
      links: Links,
    }),
    example: { name: NAME, version: "0.1.0", links: linksOf("https://gateway.example.com") },
  },
  errors: [],
});

interface HomeOptions {
  readonly assets: Pick<Assets, "madeOnce">;
  /** Rejects while calls are not accepted. */
  readonly checkReady: () => Promise<void>;
  /** Whether `tollgate token` mints the tokens; else a provider outside does. */
  readonly hasLocalIssuer: boolean;
  /** Whether this is the binary, and not the source in a clone, which has no command named tollgate. */
  readonly isBinary: boolean;
  readonly publicUrl: string | null;
}

export function homeRoutes({ assets, checkReady, hasLocalIssuer, isBinary, publicUrl }: HomeOptions) {
  const program = isBinary ? NAME : `npx --yes bun@${Bun.version} src/main.ts`;
  const token = hasLocalIssuer ? localToken(program, isBinary ? "" : ", in the folder of the clone") : FOREIGN_TOKEN;
  const pageOf = (isReady: boolean): Asset => {
    const page = pageAsset(pageHtml(isReady, token));
    return { ...page, headers: { ...page.headers, ...VARIES } };
  };
  const [ready, notReady] = [assets.madeOnce(() => pageOf(true)), assets.madeOnce(() => pageOf(false))];
  return routes()
    .get(
      "/",
      async ({ request }) => {
        const { headers } = request;
        if (wantsHtml(headers.get("accept") ?? "")) {
          const [check] = await Promise.allSettled([checkReady()]);
          return (check.status === "fulfilled" ? ready : notReady)({ request });
        }
        const links = linksOf(baseUrl(publicUrl, headers.get("host") ?? ""));
        return json("ok", { name: NAME, version: VERSION, links }, { ...VARIES, "cache-control": "no-cache" });
      },
      { detail: service },
    )
    .get(
      "/home.css",
      assets.madeOnce(() => styleAsset(style)),
      { detail: { hide: true } },
    );
}

/** @param program the words that run a command of this program */
const localToken = (
  program: string,
  folder: string,
) => `<p>Every request to <code>/v1</code> needs a token. Run this where the gateway runs${folder},
      with the gateway's <code>--data-dir</code> or <code>DATABASE_URL</code>:</p>
      <div class="code"><pre tabindex="0"><code>${program} token --tenant acme --user me</code></pre></div>
      <p>Paste the token that it prints into <strong>Authorize</strong> in Swagger, or send it as
      <code>Authorization: Bearer …</code>. <a href="docs/start">First call</a> goes on from here, step by step.</p>`;

const FOREIGN_TOKEN = `<p>Every request to <code>/v1</code> needs a token. Here the tokens come from an identity provider: ask who
      runs the gateway.</p>`;

const READY = '<span class="ready">Ready</span>: calls are accepted.';
const NOT_READY = '<span class="not-ready">Not ready</span>: calls are not accepted just now.';

function pageHtml(isReady: boolean, token: string): string {
  return `<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>${NAME}</title>
    <link rel="icon" type="image/png" href="swagger/favicon.png">
    <link rel="stylesheet" href="home.css">
    <script src="docs/copy.js" type="module"></script>
  </head>
  <body>
    <main>
      <h1>${NAME}</h1>
      <p>A gateway for agents: register an upstream, call it with a token, and let callers pay for each call (x402).</p>
      <dl>
        <dt>Version</dt>
        <dd>${VERSION}</dd>
        <dt>State</dt>
        <dd>${isReady ? READY : NOT_READY}</dd>
      </dl>
      <nav aria-label="Go on">
        <a href="swagger"><strong>Try the API</strong> <span>Swagger, in your browser.</span></a>
        <a href="docs"><strong>Read the manual</strong> <span>First steps, how-to, reference, explanation.</span></a>
      </nav>
      <h2>A token</h2>
      ${token}
    </main>
    <p id="said" class="unseen" role="status"></p>
  </body>
</html>
`;
}
