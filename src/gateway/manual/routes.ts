// The routes of the manual at /docs: its pages, a style sheet, a script for the copy buttons and one for the search, the library
// of the search, the order of its results, and the index that it reads. All are part of the binary and need no token. No start
// waits for any of them: what makes a page is imported at the first request.
import { readFileSync } from "node:fs";
import minisearch from "minisearch" with { type: "file" };
import type { SearchResult } from "minisearch";
import { Fault } from "../../core/fault.ts";
import { type Assets, asset, pageAsset, styleAsset, VARIES, wantsHtml } from "../../http/assets.ts";
import copy from "./copy.js" with { type: "text" };
import finder from "./find.js" with { type: "file" };
import { NO_PAGE, PAGES } from "./pages.ts";
import script from "./search.js" with { type: "text" };
import style from "./style.css" with { type: "text" };

/** Only the build defines this. In `fileText` the build then drops the branch from source, and with that the renderer. */
declare const TOLLGATE_COMMIT: string | undefined;

export function manualRoutes({ routesOf }: Assets) {
  const javascript = "text/javascript; charset=utf-8";
  const shown = PAGES.map(({ name }) => [`/docs/${name}`, async () => pageAsset(await fileText(name))] as const);
  return routesOf("/docs", {
    "/docs": async () => pageAsset(await fileText("")),
    ...Object.fromEntries(shown),
    "/docs/style.css": () => styleAsset(style),
    "/docs/copy.js": () => asset(copy, javascript),
    "/docs/search.js": () => asset(script, javascript),
    // `finder` and `minisearch` are imported as files: their values are paths, whatever their types say.
    "/docs/find.js": () => asset(readFileSync(String(finder)), javascript),
    "/docs/minisearch.js": () => asset(readFileSync(String(minisearch)), javascript),
    "/docs/search.json": async () => asset(await fileText("search.json"), "application/json"),
  });
}

/** The refusal of a path where there is nothing: for a browser a page with links, else JSON. @param path that was requested */
export async function orPage(refusal: Fault, { method, headers }: Request, path: string): Promise<Fault> {
  const folders = path.split("/").length - 2;
  // Every folder of a path makes each link of its page longer.
  const isPage = method === "GET" && wantsHtml(headers.get("accept") ?? "") && folders <= 5;
  if (!isPage) {
    return new Fault(refusal.kind, refusal.message, { answer: { body: { error: refusal.message }, headers: VARIES } });
  }
  const html = (await fileText(NO_PAGE)).replaceAll(/ (?:href|src)="(?!#)/g, `$&${"../".repeat(folders)}docs/`);
  const page = pageAsset(html);
  const { etag: _, ...guards } = page.headers;
  const answer = { body: html, headers: { ...guards, ...VARIES, "content-type": page.type } };
  return new Fault(refusal.kind, refusal.message, { answer });
}

/** The sections of the manual about these words, best first: the page and the heading of each. */
export async function searchManual(wanted: string): Promise<(readonly [page: string, heading: string])[]> {
  const library: typeof import("minisearch") = await import(String(minisearch));
  const { find, OPTIONS }: typeof import("./find.js") = await import(String(finder));
  const index = library.default.loadJSON(await fileText("search.json"), OPTIONS);
  const found: SearchResult[] = find(index, wanted);
  return found.map(({ id, title }) => [id.replace(/#.*/, ""), title]);
}

async function fileText(path: string): Promise<string> {
  return typeof TOLLGATE_COMMIT === "string"
    ? ((await import("./render/built.ts")).BUILT_MANUAL[path] ?? "")
    : (await import("./render/render.ts")).manualFile(path);
}
