// The manual at /docs: its pages, a style, a script that searches, and what that searches through. All of it comes from
// the binary and needs no token. Each page is rendered once, when it is first asked for, so that no start waits for it.
import { inTurnSteps, type Steps } from "../../concurrency/steps.ts";
import { type Asset, asset, madeOnce, pageAsset } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { STRANGERS } from "../../http/server.ts";
import { PAGES, type Page } from "./pages.ts";
import { escapeHtml, htmlOf, type Section, sectionsOf } from "./render.ts";
import script from "./search.js" with { type: "text" };
import style from "./style.css" with { type: "text" };

export function manualRoutes(pages: readonly Page[] = PAGES) {
  const hidden = { detail: { hide: true } };
  const app = routes().get("/docs/", () => Response.redirect("../docs"), hidden);
  for (const [path, make] of Object.entries(manualAssets(pages))) {
    app.get(path, madeOnce(make), hidden);
  }
  return app;
}

function manualAssets(pages: readonly Page[]): Readonly<Record<string, () => Asset | Promise<Asset>>> {
  const shown = pages.map((page) => {
    const make = async () => pageAsset(await rendered(pageHtml(pages, page)));
    return [`/docs/${page.name}`, make] as const;
  });
  return {
    "/docs": () => pageAsset(contentsHtml(pages)),
    ...Object.fromEntries(shown),
    "/docs/style.css": () => asset(style, "text/css; charset=utf-8"),
    "/docs/search.js": () => asset(script, "text/javascript; charset=utf-8"),
    "/docs/search.json": async () => asset(await rendered(searchJson(pages)), "application/json"),
  };
}

/** In turns, since all pages in one piece would hold the event loop for 75 ms (measured). */
function rendered(steps: Steps<string>): Promise<string> {
  return inTurnSteps(steps, STRANGERS);
}

function* searchJson(pages: readonly Page[]): Steps<string> {
  const sections: Section[] = [];
  for (const { name, text } of pages) sections.push(...(yield* sectionsOf(name, text)));
  return JSON.stringify(sections);
}

function* pageHtml(pages: readonly Page[], page: Page): Steps<string> {
  const main = yield* htmlOf(page.text);
  return siteHtml({ title: page.title, below: "", pages, current: page.name, main });
}

function contentsHtml(pages: readonly Page[]): string {
  const items = pages.map(
    ({ name, title, summary }) => `<li><a href="docs/${name}">${escapeHtml(title)}</a>: ${escapeHtml(summary)}</li>\n`,
  );
  const main = `<h1>The manual</h1>\n<ul>\n${items.join("")}</ul>\n<p><a href="swagger">Try the API</a></p>\n`;
  return siteHtml({ title: "The manual", below: "docs/", pages, current: null, main });
}

interface Site {
  readonly title: string;
  /** From the page to the folder of the site: paths are relative, so that it works below a proxy's prefix too. */
  readonly below: "" | "docs/";
  readonly pages: readonly Page[];
  readonly current: string | null;
  readonly main: string;
}

function siteHtml({ title, below, pages, current, main }: Site): string {
  const links = pages.map(({ name, title: other }) => {
    const mark = name === current ? ' aria-current="page"' : "";
    return `<a href="${below}${name}"${mark}>${escapeHtml(other)}</a>\n`;
  });
  const home = below === "" ? "../docs" : "docs";
  return `<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>${escapeHtml(title)} · tollgate</title>
    <link rel="icon" type="image/png" href="${below === "" ? "../" : ""}swagger/favicon.png">
    <link rel="stylesheet" href="${below}style.css">
    <script src="${below}search.js" defer></script>
  </head>
  <body>
    <header>
      <a class="home" href="${home}">tollgate</a>
      <div role="search" hidden>
        <input id="search" type="search" placeholder="Search ( / )" aria-label="Search the manual" aria-controls="found" autocomplete="off">
        <ol id="found" aria-live="polite" hidden></ol>
      </div>
      <nav aria-label="Pages">
${links.join("")}      </nav>
    </header>
    <main>
${main}    </main>
  </body>
</html>
`;
}
