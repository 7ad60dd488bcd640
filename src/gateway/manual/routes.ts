// The routes of the manual at /docs: its pages, a style sheet, a search script, and the index that the script reads. All are
// part of the binary and need no token. Each page is rendered at its first request, so that no start waits for it. Raw HTML in
// the Markdown is shown as text, and links between pages are rewritten to their paths at /docs.

import { Marked, type RendererObject, type Token, type Tokens } from "marked";
import { type Assets, asset, pageAsset } from "../../http/assets.ts";
import { STRANGERS } from "../../http/server.ts";
import { inTurn } from "../../kernel/turns.ts";
import { PAGES, type Page } from "./pages.ts";
import script from "./search.js" with { type: "text" };
import style from "./style.css" with { type: "text" };

export function manualRoutes({ routesOf }: Assets, pages: readonly Page[] = PAGES) {
  const shown = pages.map((page) => {
    const make = async () => pageAsset(await pageHtml(pages, page));
    return [`/docs/${page.name}`, make] as const;
  });
  return routesOf("/docs", {
    "/docs": () => pageAsset(contentsHtml(pages)),
    ...Object.fromEntries(shown),
    "/docs/style.css": () => asset(style, "text/css; charset=utf-8"),
    "/docs/search.js": () => asset(script, "text/javascript; charset=utf-8"),
    "/docs/search.json": async () => asset(await searchJson(pages), "application/json"),
  });
}

async function searchJson(pages: readonly Page[]): Promise<string> {
  const sections: Section[] = [];
  for (const { name, text } of pages) sections.push(...(await sectionsOf(name, text)));
  return JSON.stringify(sections);
}

async function pageHtml(pages: readonly Page[], page: Page): Promise<string> {
  const main = await htmlOf(page.text);
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
  /** The path from the page to the folder of the pages; relative, so that the site works below a proxy's prefix too. */
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

/** A section of a page, from one heading to the next: the unit that the search finds. */
export interface Section {
  /** The page's name. */
  readonly page: string;
  /** Empty for the part that the page begins with. */
  readonly anchor: string;
  readonly title: string;
  /** The text without Markdown. */
  readonly text: string;
}

/** The anchor of a heading, as GitHub makes it. */
function anchorOf(heading: string): string {
  return heading
    .toLowerCase()
    .replace(/[^\p{L}\p{N}_\- ]/gu, "")
    .replaceAll(" ", "-");
}

function escapeHtml(text: string): string {
  const named: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(/[&<>"]/g, (character) => named[character] ?? "");
}

const RENDERER: RendererObject = {
  heading({ tokens, depth, text }: Tokens.Heading) {
    const anchor = anchorOf(text);
    const inner = this.parser.parseInline(tokens);
    return `<h${depth} id="${anchor}"><a href="#${anchor}">${inner}</a></h${depth}>\n`;
  },
  link({ href, tokens }: Tokens.Link) {
    return `<a href="${escapeHtml(servedAt(href))}">${this.parser.parseInline(tokens)}</a>`;
  },
  code({ text }: Tokens.Code) {
    return `<pre tabindex="0"><code>${escapeHtml(text)}\n</code></pre>\n`;
  },
  html({ text }: Tokens.HTML | Tokens.Tag) {
    return escapeHtml(text);
  },
};

const marked = new Marked({ gfm: true, renderer: RENDERER });

/** Rewrites `payments.md#get-paid`, as links are in the repository, to `payments#get-paid`. */
function servedAt(href: string): string {
  return href.replace(/^([a-z]+)\.md(?=#|$)/, "$1");
}

/** The page as HTML, a turn for each heading: the longest page took 30 ms in one piece where it was the first (measured). */
export async function htmlOf(markdown: string): Promise<string> {
  let html = "";
  for (const part of bodyPartsOf(markdown)) html += await inTurn(STRANGERS, () => marked.parse(part, { async: false }));
  // Wide tables scroll by themselves, so that the page fits on a phone.
  return html.replaceAll("<table>", '<div class="table" tabindex="0"><table>').replaceAll("</table>", "</table></div>");
}

/** The sections of a page, each in a turn: all pages in one piece would hold the event loop for 75 ms (measured). */
export async function sectionsOf(page: string, markdown: string): Promise<Section[]> {
  const sections: Section[] = [];
  for (const part of bodyPartsOf(markdown)) {
    const [heading, ...rest] = await inTurn(STRANGERS, () => marked.lexer(part));
    if (heading?.type !== "heading") continue;
    const anchor = (heading as Tokens.Heading).depth === 1 ? "" : anchorOf(heading["text"]);
    const text = rest.map(plainText).join(" ").replace(/\s+/g, " ").trim();
    sections.push({ page, anchor, title: plainText(heading), text });
  }
  return sections;
}

/** Splits a page into parts that begin at its headings. A link can't refer to a definition in another part. */
function bodyPartsOf(markdown: string): string[] {
  const parts: string[][] = [[]];
  let isCode = false;
  for (const line of markdown.split(/(?<=\n)/)) {
    if (/^\s*(```|~~~)/.test(line)) isCode = !isCode;
    if (!isCode && /^#{1,6} /.test(line)) parts.push([]);
    parts.at(-1)?.push(line);
  }
  return parts.map((lines) => lines.join(""));
}

/** The text of a token and of all tokens inside it. */
function plainText(token: Token): string {
  if (token.type === "table") {
    const { header, rows } = token as Tokens.Table;
    return [header, ...rows].flatMap((row) => row.map((cell) => inner(cell.tokens))).join(" ");
  }
  if (token.type === "list") return (token as Tokens.List).items.map(plainText).join(" ");
  if ("tokens" in token && token.tokens !== undefined) return inner(token.tokens);
  return "text" in token ? token.text : "";
}

function inner(tokens: readonly Token[]): string {
  return tokens.map(plainText).join("");
}
