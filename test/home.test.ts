// The root of the gateway as a stranger meets it: in a real browser, on a phone and on a desk, by day and by night, and by a program.
import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { hostname } from "node:os";
import { join } from "node:path";
import type { Browser } from "playwright-core";
import { findings } from "./support/axe.ts";
import { BROWSER_TEST_MS_MAX, browserPath, launchBrowser, visit, whyNoBrowser } from "./support/browser.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { until } from "./support/until.ts";

setDefaultTimeout(BROWSER_TEST_MS_MAX);

const HTML = { accept: "text/html", "accept-encoding": "identity" };

let gateway: Gateway;
beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway?.[Symbol.asyncDispose]());

const page = async () => (await fetch(gateway.url, { headers: HTML })).text();

describe("the root", () => {
  test("gives a program the name, the version and links that all lead somewhere", async () => {
    const { name, version, links } = (await (await fetch(gateway.url)).json()) as {
      name: string;
      version: string;
      links: Record<string, string>;
    };
    expect(name).toBe("tollgate");
    expect(version).toBe(((await (await fetch(`${gateway.url}/version`)).json()) as { version: string }).version);
    expect(Object.keys(links)).toEqual(expect.arrayContaining(["swagger", "manual"]));
    for (const url of Object.values(links)) {
      expect(url).toStartWith(`${gateway.url}/`);
      expect([url, (await fetch(url)).status]).toEqual([url, 200]);
    }
  });

  test("answers HEAD with the page's length and no body", async () => {
    const head = await fetch(gateway.url, { method: "HEAD", headers: HTML });
    expect([head.status, head.headers.get("content-type")]).toEqual([200, "text/html; charset=utf-8"]);
    expect([Number(head.headers.get("content-length")), await head.text()]).toEqual([
      Buffer.byteLength(await page()),
      "",
    ]);
  });

  test("names nothing of the machine", async () => {
    const all =
      (await page()) + JSON.stringify(await (await fetch(gateway.url, { headers: { host: "other.example" } })).json());
    const { port } = new URL(gateway.url);
    for (const fact of [gateway.dataDir, process.cwd(), hostname(), port, "127.0.0.1"]) expect(all).not.toContain(fact);
  });

  test("shows whether calls are accepted, and a thousand visits cost the database no more than a few probes", async () => {
    expect(await page()).toContain("Ready</span>");
    using database = new Database(join(gateway.dataDir, "tollgate.db"));
    const probes = () =>
      database.query<{ next_at: number }, []>("select next_at from job_leases where job = 'probe'").get()?.next_at ?? 0;
    const [before, began] = [probes(), performance.now()];
    for (let visits = 0; visits < 1_000; visits += 50) await Promise.all(Array.from({ length: 50 }, page));
    expect(probes() - before).toBeLessThanOrEqual(Math.ceil((performance.now() - began) / 1_000) + 1);

    database.run("pragma busy_timeout = 10000");
    database.run("begin immediate");
    await until(async () => (await page()).includes("Not ready</span>"));
    database.run("rollback");
    await until(async () => (await page()).includes('"ready">Ready</span>'));
  });
});

const looks = [
  { viewport: { width: 390, height: 844 }, colorScheme: "light", ground: "rgb(255, 255, 255)" },
  { viewport: { width: 390, height: 844 }, colorScheme: "dark", ground: "rgb(20, 23, 26)" },
  { viewport: { width: 1400, height: 1000 }, colorScheme: "light", ground: "rgb(255, 255, 255)" },
  { viewport: { width: 1400, height: 1000 }, colorScheme: "dark", ground: "rgb(20, 23, 26)" },
] as const;

(browserPath === null ? describe.skip : describe)(`the root in a browser${whyNoBrowser}`, () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await launchBrowser("tollgate.test");
  });
  afterAll(() => browser?.close());

  test.each(looks)("fits, is readable by everybody, and asks nobody else: %o", async ({ ground, ...look }) => {
    await using visited = await visit(browser, `${gateway.url}/`, look);
    const { page, strays, complaints } = visited;
    expect(await page.evaluate<number>("document.documentElement.scrollWidth")).toBe(look.viewport.width);
    expect(await page.evaluate<string>("getComputedStyle(document.body).backgroundColor")).toBe(ground);
    expect(await page.locator("body").textContent()).toContain("tollgate token --tenant acme --user me");
    expect(await findings(page)).toEqual([]);
    expect([strays, complaints]).toEqual([[], []]);
  });

  test("copies the command that mints a token by the keyboard, and says so", async () => {
    await using visited = await visit(browser, `${gateway.url}/`);
    const { page, complaints } = visited;
    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    const button = page.getByRole("button", { name: "Copy" });
    await page.locator("pre").focus();
    await page.keyboard.press("Tab");
    expect(await button.evaluate((element) => element === element.ownerDocument.activeElement)).toBe(true);
    await page.keyboard.press("Enter");
    await page.getByRole("button", { name: "Copied" }).waitFor();
    expect(await page.getByRole("status").textContent()).toBe("Copied");
    expect(await page.evaluate<string>("navigator.clipboard.readText()")).toBe(
      "tollgate token --tenant acme --user me",
    );
    expect(complaints).toEqual([]);
  });

  test("leads to Swagger and the manual by the keyboard", async () => {
    for (const [tabs, path] of [
      [1, "/swagger"],
      [2, "/docs"],
    ] as const) {
      await using visited = await visit(browser, `${gateway.url}/`);
      for (let pressed = 0; pressed < tabs; pressed++) await visited.page.keyboard.press("Tab");
      await visited.page.keyboard.press("Enter");
      await visited.page.waitForURL(`${gateway.url}${path}`);
    }
  });
});
