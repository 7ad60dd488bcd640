// Markdown of the manual as HTML, and as the entries that its search looks through. Raw HTML is shown as text, and
// links between pages lead to where the pages are served.
import { Marked, type RendererObject, type Token, type Tokens } from "marked";

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

export function htmlOf(markdown: string): string {
  const html = marked.parse(markdown, { async: false });
  // Wide tables scroll by themselves, so that the page fits on a phone.
  return html.replaceAll("<table>", '<div class="table" tabindex="0"><table>').replaceAll("</table>", "</table></div>");
}

export function sectionsOf(page: string, markdown: string): Section[] {
  const sections: { page: string; anchor: string; title: string; text: string }[] = [];
  for (const token of marked.lexer(markdown)) {
    const last = sections.at(-1);
    if (token.type === "heading") {
      const isTitle = (token as Tokens.Heading).depth === 1;
      const title = plainText(token);
      sections.push({ page, anchor: isTitle ? "" : anchorOf(token["text"]), title, text: "" });
    } else if (last !== undefined) {
      last.text = `${last.text} ${plainText(token)}`.replace(/\s+/g, " ").trim();
    }
  }
  return sections;
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
