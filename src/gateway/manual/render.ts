// Markdown of the manual as HTML, and as the entries that its search looks through. Raw HTML is shown as text, and
// links between pages lead to where the pages are served.
import { Marked, type RendererObject, type Token, type Tokens } from "marked";
import type { Steps } from "../../concurrency/steps.ts";

/** A part of a page: what stands below one heading, up to the next one. */
export interface Section {
  /** The page's name. */
  readonly page: string;
  /** Empty for the part that the page begins with. */
  readonly anchor: string;
  readonly title: string;
  /** Without marks. */
  readonly text: string;
}

/** The anchor of a heading, as repository pages make it. */
function anchorOf(heading: string): string {
  return heading
    .toLowerCase()
    .replace(/[^\p{L}\p{N}_\- ]/gu, "")
    .replaceAll(" ", "-");
}

export function escapeHtml(text: string): string {
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

/** `payments.md#get-paid` of the repository is `payments#get-paid` of the site. */
function servedAt(href: string): string {
  return href.replace(/^([a-z]+)\.md(?=#|$)/, "$1");
}

/** The page as HTML, a step for each heading: the longest page took 30 ms in one piece where it was the first (measured). */
export function* htmlOf(markdown: string): Steps<string> {
  let html = "";
  for (const part of partsOf(markdown)) {
    html += marked.parse(part, { async: false });
    yield;
  }
  // Wide tables scroll by themselves, so that the page fits on a phone.
  return html.replaceAll("<table>", '<div class="table" tabindex="0"><table>').replaceAll("</table>", "</table></div>");
}

/** The sections of a page, each in a step. */
export function* sectionsOf(page: string, markdown: string): Steps<Section[]> {
  const sections: Section[] = [];
  for (const part of partsOf(markdown)) {
    const [heading, ...rest] = marked.lexer(part);
    if (heading?.type === "heading") {
      const anchor = (heading as Tokens.Heading).depth === 1 ? "" : anchorOf(heading["text"]);
      const text = rest.map(plainText).join(" ").replace(/\s+/g, " ").trim();
      sections.push({ page, anchor, title: plainText(heading), text });
    }
    yield;
  }
  return sections;
}

/** Each heading with what stands below it. No part may define what links of another refer to. */
function partsOf(markdown: string): string[] {
  const parts: string[][] = [[]];
  let isCode = false;
  for (const line of markdown.split(/(?<=\n)/)) {
    if (/^\s*(```|~~~)/.test(line)) isCode = !isCode;
    if (!isCode && /^#{1,6} /.test(line)) parts.push([]);
    parts.at(-1)?.push(line);
  }
  return parts.map((lines) => lines.join(""));
}

/** The words of a token and all within it. */
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
