// Makes the files of the manual's site from its Markdown: pages whose code is highlighted here and not in the reader's
// browser, and the index of the search. Raw HTML in the Markdown is shown as text, and links between pages are
// rewritten to their paths at /docs. The build makes all files (./built.ts), so that the binary holds neither this
// module nor its libraries. From source, each file is made at its first request.
import { Marked, type RendererObject, type Token, type Tokens } from "marked";
import MiniSearch from "minisearch";
import { VERSION } from "../../../core/startup.ts";
import { STRANGERS } from "../../../http/server.ts";
import { inTurn } from "../../../kernel/turns.ts";
import { OPTIONS } from "../find.js";
import { NO_PAGE, PAGES, type Page, SEARCH_WORDS, SECTIONS } from "../pages.ts";
import { highlight } from "./highlight.js";

const SECTION_SUMMARIES: Readonly<Record<Page["section"], string>> = {
  Start: "From nothing to a first success, step by step.",
  "How-to": "How to get one thing done on a system that runs.",
  Reference: "Every endpoint, variable, command, metric and event.",
  Explanation: "How it works inside, and why it is built this way.",
};

/** @param path below /docs: a page's name, `search.json`, NO_PAGE, or empty for the contents @throws Error for any other */
export async function manualFile(path: string): Promise<string> {
  if (path === "") return contentsHtml();
  if (path === NO_PAGE) return noPageHtml();
  if (path === "search.json") return searchJson();
  const at = PAGES.findIndex(({ name }) => name === path);
  const page = PAGES[at];
  if (page === undefined) throw new Error(`the manual has no file ${path}`);
  return pageHtml(page, PAGES[at - 1], PAGES[at + 1]);
}

/** All files by their paths below /docs. */
export async function manualFiles(): Promise<Record<string, string>> {
  const files: Record<string, string> = {};
  for (const path of ["", "search.json", NO_PAGE, ...PAGES.map(({ name }) => name)])
    files[path] = await manualFile(path);
  return files;
}

async function pageHtml(page: Page, previous: Page | undefined, next: Page | undefined): Promise<string> {
  const { html, headings } = await renderMarkdown(page.text);
  const main = `${html}${neighboursHtml(previous, next)}`;
  const description = `${page.title}: ${page.summary}`;
  return siteHtml({ title: page.title, description, below: "", current: page.name, headings, main });
}

function neighboursHtml(previous: Page | undefined, next: Page | undefined): string {
  const link = (page: Page | undefined, rel: string, label: string) =>
    page === undefined
      ? ""
      : `<a rel="${rel}" href="${page.name}"><small>${label}</small> ${Bun.escapeHTML(page.title)}</a>\n`;
  return `<nav class="neighbours" aria-label="Previous and next page">
${link(previous, "prev", "Previous")}${link(next, "next", "Next")}</nav>
`;
}

function contentsHtml(): string {
  const sections = SECTIONS.map((section) => {
    const items = PAGES.filter((page) => page.section === section).map(
      ({ name, title, summary }) =>
        `<li><a href="docs/${name}">${Bun.escapeHTML(title)}</a>: ${Bun.escapeHTML(summary)}</li>\n`,
    );
    return `<h2>${section}</h2>\n<p>${SECTION_SUMMARIES[section]}</p>\n<ul>\n${items.join("")}</ul>\n`;
  });
  const main = `<h1>The manual</h1>\n<p>Try the API in <a href="swagger">Swagger</a>.</p>\n${sections.join("")}`;
  const description = "The manual of tollgate, a multi-tenant gateway for agents";
  return siteHtml({ title: "The manual", description, below: "docs/", current: null, headings: [], main });
}

/** What a browser gets at an address that has nothing. */
function noPageHtml(): string {
  const main = `<h1>No such page</h1>
<p>Nothing is at this address. Go to the <a href="../">front page</a> of the gateway, to the <a href="../docs">contents</a> or the
<a href="start">start</a> of its manual, or search the manual with the field on this page.</p>
`;
  const description = "Nothing is at this address";
  return siteHtml({ title: "No such page", description, below: "", current: null, headings: [], main });
}

interface Site {
  readonly title: string;
  readonly description: string;
  /** The path from the page to the folder of the pages; relative, so that the site works below a proxy's prefix too. */
  readonly below: "" | "docs/";
  readonly current: string | null;
  readonly headings: readonly Heading[];
  readonly main: string;
}

function siteHtml({ title, description, below, current, headings, main }: Site): string {
  const home = below === "" ? "../docs" : "docs";
  return `<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="description" content="${Bun.escapeHTML(description)}">
    <title>${Bun.escapeHTML(title)} · tollgate</title>
    <link rel="icon" type="image/png" href="${below === "" ? "../" : ""}swagger/favicon.png">
    <link rel="stylesheet" href="${below}style.css">
    <script src="${below}search.js" defer></script>
    <script src="${below}copy.js" type="module"></script>
  </head>
  <body>
    <a class="skip" href="#content">Skip to the content</a>
    <header>
      <p><a class="home" href="${home}">tollgate</a> <span class="version">${Bun.escapeHTML(VERSION)}</span></p>
      <div role="search" hidden>
        <input id="search" type="search" placeholder="Search ( / )" aria-label="Search the manual" aria-controls="found" autocomplete="off" spellcheck="false">
        <ol id="found" aria-label="Results" hidden></ol>
      </div>
      <nav class="pages" aria-label="Pages">
        <details>
          <summary>All pages</summary>
${pagesHtml(below, current)}        </details>
      </nav>
    </header>
${outlineHtml(headings)}    <main id="content" tabindex="-1">
${main}    </main>
    <p id="said" class="unseen" role="status"></p>
  </body>
</html>
`;
}

function pagesHtml(below: string, current: string | null): string {
  const parts = SECTIONS.map((section, at) => {
    const items = PAGES.filter((page) => page.section === section).map(({ name, title }) => {
      const mark = name === current ? ' aria-current="page"' : "";
      return `<li><a href="${below}${name}"${mark}>${Bun.escapeHTML(title)}</a></li>\n`;
    });
    return `<p id="section-${at}">${section}</p>\n<ul aria-labelledby="section-${at}">\n${items.join("")}</ul>\n`;
  });
  return parts.join("");
}

function outlineHtml(headings: readonly Heading[]): string {
  const items = headings
    .filter(({ depth }) => depth === 2 || depth === 3)
    .map(({ depth, anchor, html }) => `<li class="depth-${depth}"><a href="#${anchor}">${html}</a></li>\n`);
  if (items.length < 2) return "";
  return `    <nav class="outline" aria-label="On this page">
      <details>
        <summary>On this page</summary>
        <ul>
${items.join("")}        </ul>
      </details>
    </nav>
`;
}

interface Heading {
  readonly depth: number;
  readonly anchor: string;
  readonly html: string;
}

/** The anchor of a heading, as GitHub makes it. */
function anchorOf(heading: string): string {
  return heading
    .toLowerCase()
    .replace(/[^\p{L}\p{N}_\- ]/gu, "")
    .replaceAll(" ", "-");
}

const RENDERER: RendererObject = {
  heading({ tokens, depth, text }: Tokens.Heading) {
    const anchor = anchorOf(text);
    const inner = this.parser.parseInline(tokens);
    return `<h${depth} id="${anchor}"><a href="#${anchor}">${inner}</a></h${depth}>\n`;
  },
  link({ href, tokens }: Tokens.Link) {
    // Links are `payments.md#get-paid` in the repository, and `payments#get-paid` here.
    const served = href.replace(/^([a-z-]+)\.md(?=#|$)/, "$1");
    return `<a href="${Bun.escapeHTML(served)}">${this.parser.parseInline(tokens)}</a>`;
  },
  code({ text, lang = "" }: Tokens.Code) {
    // After the language some blocks have a word for the tests.
    const html = highlight(text, lang.replace(/ .*/, "")) ?? Bun.escapeHTML(text);
    return `<div class="code"><pre tabindex="0"><code>${html}\n</code></pre></div>\n`;
  },
  table({ header, rows }: Tokens.Table) {
    const cellsOf = (cells: readonly Tokens.TableCell[], isHead: boolean) =>
      cells.map(({ tokens }, at) => {
        const inner = this.parser.parseInline(tokens);
        // A header cell without a text names nothing.
        if (isHead) return inner === "" ? "<td></td>" : `<th scope="col">${inner}</th>`;
        return `<td data-column="${Bun.escapeHTML(header[at]?.text.replaceAll("`", "") ?? "")}">${inner}</td>`;
      });
    const head = `<thead>\n<tr>${cellsOf(header, true).join("")}</tr>\n</thead>\n`;
    const body = rows.map((row) => `<tr>${cellsOf(row, false).join("")}</tr>\n`).join("");
    // Wide tables scroll by themselves, so that the page fits in a narrow window.
    return `<div class="table" tabindex="0"><table>\n${head}<tbody>\n${body}</tbody>\n</table></div>\n`;
  },
  html({ text }: Tokens.HTML | Tokens.Tag) {
    return Bun.escapeHTML(text);
  },
};

const marked = new Marked({ gfm: true, renderer: RENDERER });

/** A page as HTML, made in a turn for each part: in one piece, the longest page took 30 ms when it came first (measured). */
export async function renderMarkdown(markdown: string): Promise<{ html: string; headings: readonly Heading[] }> {
  let html = "";
  const headings: Heading[] = [];
  for (const part of pagePartsOf(markdown)) {
    const made = await inTurn(STRANGERS, () => marked.parse(part, { async: false }));
    html += made;
    const [, depth, anchor = "", inner = ""] = /^<h(\d) id="([^"]*)"><a [^>]*>(.*?)<\/a><\/h\d>\n/.exec(made) ?? [];
    // A link in a heading would be a link inside that of the outline.
    if (depth !== undefined) headings.push({ depth: Number(depth), anchor, html: inner.replace(/<\/?a\b[^>]*>/g, "") });
  }
  return { html, headings };
}

/** A section of a page, from one heading to the next: the unit that the search finds. */
export interface Section {
  /** The page's name, then `#` and the heading's anchor unless the section begins the page. */
  readonly id: string;
  readonly page: string;
  readonly title: string;
  /** Other words by which readers look for it. */
  readonly words: string;
  /** What its tables explain, such as variables and the values of fields: the first cells, one a line. */
  readonly explained: string;
  /** The text without Markdown. */
  readonly text: string;
  readonly weight: number;
}

/** A reader who searches usually wants to get something done, so the pages on reasons come last. */
const WEIGHTS: Readonly<Record<Page["section"], number>> = {
  Start: 1.4,
  "How-to": 1.2,
  Reference: 1.2,
  Explanation: 0.7,
};
/** Pages for those who change tollgate or compare its versions. */
const RARELY_WANTED = ["development", "contributing", "changelog", "decisions"];

/** The index of the search, which is made here, so that the browser only loads it. */
async function searchJson(): Promise<string> {
  const index = new MiniSearch<Section>(OPTIONS);
  for (const page of PAGES) {
    for (const section of await sectionsOf(page)) await inTurn(STRANGERS, () => index.add(section));
  }
  const plain = await inTurn(STRANGERS, () => index.toJSON());
  return inTurn(STRANGERS, () => JSON.stringify(plain));
}

/** The sections of a page, each in a turn: all pages in one piece would hold the event loop for 75 ms (measured). */
export async function sectionsOf({ name, section, title, text: markdown }: Page): Promise<Section[]> {
  const sections: Section[] = [];
  const weight = WEIGHTS[section] * (RARELY_WANTED.includes(name) ? 0.2 : 1);
  for (const part of pagePartsOf(markdown)) {
    const [heading, ...rest] = await inTurn(STRANGERS, () => marked.lexer(part));
    if (heading?.type !== "heading") continue;
    const id = (heading as Tokens.Heading).depth === 1 ? name : `${name}#${anchorOf(heading["text"])}`;
    const text = rest.map(plainText).join(" ").replace(/\s+/g, " ").trim();
    const tables = rest.filter((token) => token.type === "table") as Tokens.Table[];
    const rows = tables.flatMap(({ header, rows }) => [header, ...rows]);
    const explained = rows.map(([first]) => inner(first?.tokens ?? [])).join("\n");
    sections.push({
      id,
      page: title,
      title: plainText(heading),
      words: SEARCH_WORDS[id] ?? "",
      explained,
      text,
      weight,
    });
  }
  return sections;
}

/** Splits a page into parts that begin at its headings. A link can't refer to a definition in another part. */
function pagePartsOf(markdown: string): string[] {
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
    const { rows } = token as Tokens.Table;
    return rows.flatMap((row) => row.map((cell) => inner(cell.tokens))).join(" · ");
  }
  if (token.type === "list") return (token as Tokens.List).items.map(plainText).join(" ");
  if ("tokens" in token && token.tokens !== undefined) return inner(token.tokens);
  return "text" in token ? token.text : "";
}

const inner = (tokens: readonly Token[]): string => tokens.map(plainText).join("");
