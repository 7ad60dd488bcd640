import { beforeAll, describe, expect, test } from "bun:test";
import { silentLog } from "../../core/log.ts";
import { createAssets } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { createEdge, type Edge } from "../../http/server.ts";
import { PAGES } from "./pages.ts";
import { htmlOf, manualRoutes, type Section, sectionsOf } from "./routes.ts";

let edge: Edge;
beforeAll(() => {
  const app = routes().use(manualRoutes(createAssets()));
  const authenticate = () => ({ tenant: "t", user: "u", scopes: new Set<string>() });
  edge = createEdge({ app, log: silentLog, authenticate });
});
/** Read to its end, as a browser does: what nobody reads counts as being sent. */
async function get(path: string, headers: Record<string, string> = {}): Promise<Response> {
  const answer = await edge.fetch(new Request(`http://localhost${path}`, { headers }));
  return new Response(answer.body === null ? null : await answer.bytes(), answer);
}

const NAMES = PAGES.map(({ name }) => `/docs/${name}`);
const FILES = ["/docs/style.css", "/docs/search.js", "/docs/search.json"];

describe("the manual's site", () => {
  test("has every page and file, each of its type", async () => {
    for (const path of ["/docs", ...NAMES]) {
      const page = await get(path);
      expect([path, page.status, page.headers.get("content-type")]).toEqual([path, 200, "text/html; charset=utf-8"]);
      expect(page.headers.get("content-security-policy")).toStartWith("default-src 'none'; script-src 'self';");
    }
    const types = await Promise.all(FILES.map(async (path) => (await get(path)).headers.get("content-type")));
    expect(types).toEqual(["text/css; charset=utf-8", "text/javascript; charset=utf-8", "application/json"]);
  });

  test("loads nothing from elsewhere, and holds no inline script or style", async () => {
    for (const path of ["/docs", ...NAMES]) {
      const text = await (await get(path)).text();
      expect(text.match(/<(script|link|img|iframe)[^>]*(src|href)="(https?:)?\/\/[^>]*>/g) ?? []).toEqual([]);
      expect(text).not.toMatch(/<script(?![^>]* src=)|<style| style=| on[a-z]+="/);
    }
  });

  test("has no link that leads nowhere", async () => {
    const seen = new Map<string, string>();
    const read = async (path: string) => {
      const known = seen.get(path) ?? (await (await get(path)).text());
      seen.set(path, known);
      return known;
    };
    const elsewhere = ["/swagger", "/swagger/favicon.png"];
    let checked = 0;
    for (const path of ["/docs", ...NAMES]) {
      for (const [, href = ""] of (await read(path)).matchAll(/(?:href|src)="([^"]+)"/g)) {
        const { origin, pathname, hash } = new URL(href, `http://localhost${path}`);
        if (origin !== "http://localhost" || elsewhere.includes(pathname)) continue;
        expect([path, href, (await get(pathname)).status]).toEqual([path, href, 200]);
        if (hash !== "")
          expect([path, href, await read(pathname)]).toEqual([
            path,
            href,
            expect.stringContaining(` id="${hash.slice(1)}"`),
          ]);
        checked++;
      }
    }
    expect(checked).toBeGreaterThan(150);
  });

  test("sends a copy that is still good not again, and a stale one anew", async () => {
    for (const path of ["/docs", ...NAMES, ...FILES]) {
      const etag = (await get(path)).headers.get("etag") ?? "";
      const again = await get(path, { "if-none-match": `"other", W/${etag}` });
      expect([again.status, again.headers.get("etag"), await again.text()]).toEqual([304, etag, ""]);
      expect((await get(path, { "if-none-match": '"other"' })).status).toBe(200);
    }
  });

  test("leads a trailing slash to the contents, and has nothing else below them", async () => {
    const redirect = await get("/docs/");
    expect(new URL(redirect.headers.get("location") ?? "", "http://h/docs/").pathname).toBe("/docs");
    for (const path of ["/docs/nothing", "/docs/api.md", "/docs/api/", "/docs/../../package.json"]) {
      expect((await get(path)).status).toBe(404);
    }
  });

  test("has a search that reads every heading of every page", async () => {
    const sections = (await (await get("/docs/search.json")).json()) as Section[];
    for (const { name } of PAGES) {
      const html = await (await get(`/docs/${name}`)).text();
      const ids = [...html.matchAll(/<h[2-6] id="([^"]+)"/g)].map(([, id = ""]) => id);
      expect(sections.filter(({ page }) => page === name).map(({ anchor }) => anchor)).toEqual(["", ...ids]);
      // Two of one name would make the second one unreachable.
      expect(new Set(ids).size).toBe(ids.length);
    }
  });
});

describe("a page of the manual", () => {
  test("shows raw HTML as text", async () => {
    const html = await htmlOf("<script>a()</script>\n\nb <img src=x onerror=y> `<b>` [c](javascript:d)\n");
    expect(html).not.toMatch(/<(script|img|b)\b/);
    expect(html).toContain("&lt;script&gt;");
  });

  test("leads to other pages where they are served", async () => {
    expect(await htmlOf("[a](payments.md#get-paid) [b](api.md) [c](#d) [e](https://f.example/g.md)")).toBe(
      '<p><a href="payments#get-paid">a</a> <a href="api">b</a> <a href="#d">c</a> <a href="https://f.example/g.md">e</a></p>\n',
    );
  });

  test("is searched by its words, without marks", async () => {
    const page =
      "# A *title*\n\nOne `two`\n\n## Part (1)\n\n- three [four](#x)\n\n| a | b |\n|---|---|\n| **c** | d |\n\n```sh\ne | f\n```\n";
    expect(await sectionsOf("p", page)).toEqual([
      { page: "p", anchor: "", title: "A title", text: "One two" },
      { page: "p", anchor: "part-1", title: "Part (1)", text: "three four a b c d e | f" },
    ]);
  });

  test("keeps a code block whole, whatever its lines begin with", async () => {
    const page = "# A\n\n1. one\n\n   ```sh\n   b\n   # c\n   ```\n\n```sh\n## d\n```\n\n## E\n";
    const titles = (await sectionsOf("p", page)).map(({ title }) => title);
    expect(titles).toEqual(["A", "E"]);
    expect(await htmlOf(page)).toContain("<code>## d\n</code>");
  });

  test("has no link by reference, since each part of it is read by itself", () => {
    const defining = PAGES.filter(({ text }) => /^ {0,3}\[[^\]]+\]: /m.test(text)).map(({ name }) => name);
    expect(defining).toEqual([]);
  });
});
