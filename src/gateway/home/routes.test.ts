import { describe, expect, test } from "bun:test";
import { silentLog } from "../../core/log.ts";
import { createAssets } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { createEdge } from "../../http/server.ts";
import { homeRoutes } from "./routes.ts";

const BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";

function edgeOf(changed: Partial<Parameters<typeof homeRoutes>[0]> = {}) {
  const options = {
    checkReady: async () => {},
    hasLocalIssuer: true,
    isBinary: true,
    publicUrl: null,
  };
  const app = routes().use(homeRoutes({ assets: createAssets(), ...options, ...changed }));
  return createEdge({ app, log: silentLog, authenticate: () => ({ tenant: "t", user: "u", scopes: new Set() }) });
}

function ask(edge: ReturnType<typeof edgeOf>, headers: Record<string, string>, method = "GET"): Promise<Response> {
  return edge.fetch(
    new Request("http://gate.example:8080/", { method, headers: { host: "gate.example:8080", ...headers } }),
  );
}

describe("the root", () => {
  test.each([
    [BROWSER, "text/html"],
    ["TEXT/HTML", "text/html"],
    ["application/json;q=0.5, text/html", "text/html"],
    ["", "application/json"],
    ["*/*", "application/json"],
    ["text/*", "application/json"],
    ["application/json", "application/json"],
    ["text/html;q=0", "application/json"],
    ["text/html;q=oops", "application/json"],
    ["text/html;q=0.5, application/json", "application/json"],
  ])("answers Accept %p with %s, and tells caches that it depends on it", async (accept, type) => {
    const answer = await ask(edgeOf(), { accept });
    expect([answer.status, answer.headers.get("content-type")?.split(";")[0]]).toEqual([200, type]);
    expect(answer.headers.get("vary")).toMatch(/^accept(, |$)/);
    expect(answer.headers.get("cache-control")).toBe("no-cache");
  });

  test("names absolute URLs below the configured one, else below the host that was asked", async () => {
    const linksAt = async (publicUrl: string | null, host: string) =>
      ((await (await ask(edgeOf({ publicUrl }), { host })).json()) as { links: Record<string, string> }).links;
    expect((await linksAt(null, "gate.example:8080"))["manual"]).toBe("http://gate.example:8080/docs");
    expect((await linksAt("https://public.example/below", "other"))["swagger"]).toBe(
      "https://public.example/below/swagger",
    );
    expect((await linksAt(null, "<b>"))["swagger"]).toBe("http://localhost/swagger");
  });

  test("is sent to a browser once for each state, and never says of a stale copy that it is current", async () => {
    let isReady = true;
    const edge = edgeOf({ checkReady: () => (isReady ? Promise.resolve() : Promise.reject(new Error("down"))) });
    const first = await ask(edge, { accept: BROWSER });
    const etag = first.headers.get("etag") ?? "";
    expect(await first.text()).toContain("Ready</span>: calls are accepted");
    const again = await ask(edge, { accept: BROWSER, "if-none-match": etag });
    expect([again.status, again.headers.get("vary"), await again.text()]).toEqual([304, "accept, accept-encoding", ""]);
    isReady = false;
    const changed = await ask(edge, { accept: BROWSER, "if-none-match": etag });
    expect(changed.status).toBe(200);
    expect(await changed.text()).toContain("Not ready</span>");
  });

  test("shows the command that mints a token only where that token is accepted", async () => {
    const page = async (hasLocalIssuer: boolean) => (await ask(edgeOf({ hasLocalIssuer }), { accept: BROWSER })).text();
    expect(await page(true)).toContain("<code>tollgate token --tenant acme --user me</code>");
    expect(await page(true)).toContain("the gateway's <code>--data-dir</code> or <code>DATABASE_URL</code>:");
    expect(await page(false)).not.toContain("tollgate token");
    expect(await page(false)).toContain("identity provider");
  });

  test("shows the command in the words of a clone where the gateway runs from its source", async () => {
    const page = await (await ask(edgeOf({ isBinary: false }), { accept: BROWSER })).text();
    expect(page).toContain(`<code>npx --yes bun@${Bun.version} src/main.ts token --tenant acme --user me</code>`);
    expect(page).toContain("Run this where the gateway runs, in the folder of the clone,\n");
  });

  test("runs no script but the manual's copy button, loads nothing from elsewhere, and is bound to that", async () => {
    const page = await ask(edgeOf(), { accept: BROWSER });
    expect(page.headers.get("content-security-policy")).toStartWith("default-src 'none'; script-src 'self';");
    expect(page.headers.get("content-security-policy")).not.toContain("blob:");
    const text = await page.text();
    expect(text).not.toMatch(/<script(?![^>]* src=)|<style| style=| on[a-z]+="/);
    const targets = [...text.matchAll(/(?:href|src)="([^"]+)"/g)].map(([, target = ""]) => target);
    expect(targets).toEqual(["swagger/favicon.png", "home.css", "docs/copy.js", "swagger", "docs", "docs/start"]);
  });

  test("has no other method", async () => {
    for (const method of ["POST", "PUT", "DELETE", "OPTIONS"]) {
      const answer = await ask(edgeOf(), { accept: BROWSER }, method);
      expect([answer.status, answer.headers.get("allow")]).toEqual([405, "GET, HEAD"]);
    }
    expect((await ask(edgeOf(), { accept: BROWSER }, "HEAD")).status).toBe(200);
  });
});
