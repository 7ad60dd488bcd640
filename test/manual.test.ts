// The manual as its reader uses it: a real browser opens what the compiled binary serves, on a phone and on a desk, by day and by
// night, by the keyboard, and without JavaScript.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import type { Browser, Page } from "playwright-core";
import { PAGES } from "../src/gateway/manual/pages.ts";
import { contrastFindings, findings, widthFindings } from "./support/axe.ts";
import { BROWSER_TEST_MS_MAX, browserPath, launchBrowser, visit, whyNoBrowser } from "./support/browser.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";

setDefaultTimeout(BROWSER_TEST_MS_MAX);

/** Another name that leads to the gateway: a browser gives no clipboard to a page that came from there without TLS. */
const OTHER_HOST = "tollgate.test";
const DESK = { width: 1400, height: 1000 };
const PHONE = { width: 390, height: 844 };
const PATHS = ["/docs", ...PAGES.map(({ name }) => `/docs/${name}`)];

const browserSuite = browserPath === null ? describe.skip : describe;

let gateway: Gateway;
beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway?.[Symbol.asyncDispose]());

/** What has the focus, by its ID or its text. */
const focused = (page: Page) =>
  page.evaluate<string>("document.activeElement.id || document.activeElement.textContent.trim()");

/** Runs in the browser: the results of the search that something else of the page covers at their right end. */
const COVERED = `(() => {
  const bottom = document.getElementById("found").getBoundingClientRect().bottom;
  return [...document.querySelectorAll("#found a")].flatMap((link) => {
    const { right, top, height } = link.getBoundingClientRect();
    const y = top + height / 2;
    return y > bottom || link.contains(document.elementFromPoint(right - 5, y)) ? [] : [link.textContent];
  });
})()`;

/**
 * Runs in the browser: how many blocks of code the page has and how many buttons for them, the lines of code that a
 * button lies over, the blocks whose code a button leaves less than the whole width, and the tables that a phone cuts off.
 */
const BENEATH_BUTTONS = `(() => {
  const buttons = [...document.querySelectorAll(".code button")];
  const lines = buttons.flatMap((button) => {
    const box = button.getBoundingClientRect();
    const pre = button.parentElement.querySelector("pre");
    const seen = pre.getBoundingClientRect();
    const range = document.createRange();
    const lies = (node) => {
      range.selectNodeContents(node);
      return [...range.getClientRects()].some(
        (text) =>
          Math.max(box.left, text.left, seen.left) < Math.min(box.right, text.right, seen.right) &&
          Math.max(box.top, text.top, seen.top) < Math.min(box.bottom, text.bottom, seen.bottom),
      );
    };
    const walker = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) if (lies(walker.currentNode)) found.push(walker.currentNode.data);
    return found;
  });
  const blocks = [...document.querySelectorAll(".code")];
  const narrow = blocks.filter((block) => block.querySelector("pre").clientWidth < block.clientWidth);
  const cut = [...document.querySelectorAll(".table")].filter((table) => table.scrollWidth > table.clientWidth);
  return { cut: cut.map((table) => table.textContent), buttons: buttons.length, blocks: blocks.length, lines: lines.concat(narrow.map((block) => block.textContent)) };
})()`;

/** Runs in the browser: the ring around what has the focus, and whether all four corners of the ring can be seen. */
const FOCUS = `(() => {
  const element = document.activeElement;
  const { outlineWidth, outlineStyle, outlineOffset } = getComputedStyle(element);
  const around = parseFloat(outlineWidth) + parseFloat(outlineOffset);
  const { left, right, top, bottom } = element.getBoundingClientRect();
  const corners = [[left, top, -1, -1], [right, top, 1, -1], [left, bottom, -1, 1], [right, bottom, 1, 1]];
  const isSeen = corners.every(([x, y, toX, toY]) => {
    const there = document.elementFromPoint(x + toX * around, y + toY * around);
    return there !== null && (there === element || there === element.parentElement);
  });
  return outlineWidth + " " + outlineStyle + (isSeen ? ", in view" : ", covered");
})()`;

interface Beneath {
  cut: string[];
  buttons: number;
  blocks: number;
  lines: string[];
}

const styleOf = (page: Page, element: string, property: string) =>
  page.evaluate<string>(`getComputedStyle(document.${element}).${property}`);

browserSuite(`the manual in a browser${whyNoBrowser}`, () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await launchBrowser(OTHER_HOST);
  });
  afterAll(() => browser?.close());

  const looks = [
    { viewport: PHONE, colorScheme: "dark", other: "light" },
    { viewport: DESK, colorScheme: "light", other: "dark" },
  ] as const;
  const GROUNDS = { light: "rgb(255, 255, 255)", dark: "rgb(20, 23, 26)" };
  describe("can be read by everybody, in light and in dark, on a phone and on a desk:", () => {
    // One reader goes from page to page: a new one for each would cost more than all that is asked of the page.
    let reader: Awaited<ReturnType<typeof visit>>;
    beforeAll(async () => {
      reader = await visit(browser, `${gateway.url}/docs`);
    });
    afterAll(() => reader?.[Symbol.asyncDispose]());

    test.each(PATHS)("%s", async (path) => {
      const { page, strays, complaints } = reader;
      await page.goto(`${gateway.url}${path}`);
      // Axe passes over what a closed part holds, and a desk shows the links in the closed parts all the same.
      await page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true");
      for (const { viewport, colorScheme, other } of looks) {
        await page.setViewportSize(viewport);
        // Where all rules hold in one color scheme, the other one can break those of contrast alone.
        await page.emulateMedia({ colorScheme: other });
        expect(await styleOf(page, "body", "backgroundColor")).toBe(GROUNDS[other]);
        expect(await contrastFindings(page)).toEqual([]);
        await page.emulateMedia({ colorScheme });
        expect(await page.evaluate<number>("document.documentElement.scrollWidth")).toBe(viewport.width);
        expect(await styleOf(page, "body", "backgroundColor")).toBe(GROUNDS[colorScheme]);
        const { cut, buttons, blocks, lines } = await page.evaluate<Beneath>(BENEATH_BUTTONS);
        expect([buttons, lines]).toEqual([blocks, []]);
        // A wider window shows by a bar that a table goes on.
        if (viewport === PHONE) expect(cut).toEqual([]);
        expect(await (viewport === PHONE ? findings : widthFindings)(page)).toEqual([]);
      }
      expect([strays, complaints]).toEqual([[], []]);
    });

    test("a cell, a link or a heading in a color that is hard to see would be found", async () => {
      const { page } = reader;
      await page.goto(`${gateway.url}/docs/limits`);
      for (const element of ["main tr:last-child td", "main p a", "main h2:last-of-type a"]) {
        const plant = (color: string) =>
          page.evaluate(`[...document.querySelectorAll("${element}")].at(-1).style.color = "${color}"`);
        await plant("rgb(128 128 128 / 40%)");
        expect(await findings(page)).toEqual([expect.stringMatching(/^color-contrast: <(td|a) [^|]+$/)]);
        await plant("");
      }
    });
  });

  for (const { viewport, colorScheme } of looks) {
    test(`is searched by the keyboard at ${viewport.width} pixels, also by words that are mistyped`, async () => {
      await using visited = await visit(browser, `${gateway.url}/docs/api`, { viewport, colorScheme });
      const { page, asked, strays, complaints } = visited;
      expect(asked.filter((path) => /find\.js|minisearch|search\.json/.test(path))).toEqual([]);
      await page.keyboard.press("/");
      expect(await focused(page)).toBe("search");
      await page.keyboard.type("retenton");
      const [first, second] = [page.locator("#found a").first(), page.locator("#found a").nth(1)];
      await first.waitFor();
      expect(asked.filter((path) => /find\.js|minisearch|search\.json/.test(path)).sort()).toEqual([
        "/docs/find.js",
        "/docs/minisearch.js",
        "/docs/search.json",
      ]);
      expect(await page.locator("#said").textContent()).toMatch(/^\d+ results$/);
      expect(await findings(page)).toEqual([]);
      expect(await page.evaluate<string[]>(COVERED)).toEqual([]);
      await page.keyboard.press("ArrowDown");
      expect(await page.locator("#found a:focus").textContent()).toBe(await first.textContent());
      await page.keyboard.press("ArrowDown");
      expect(await page.locator("#found a:focus").textContent()).toBe(await second.textContent());
      await page.keyboard.press("ArrowUp");
      await page.keyboard.press("Enter");
      await page.waitForURL(`${gateway.url}/docs/operations#retention`);
      await page.locator("#search").waitFor();
      await page.keyboard.press("/");
      await page.keyboard.type("xyzzy");
      await page.locator("#found").getByText("Nothing in the manual has “xyzzy”").waitFor();
      await page.getByRole("heading", { level: 1 }).click({ position: { x: 5, y: 5 } });
      expect(await page.locator("#found").isVisible()).toBe(false);
      await page.locator("#search").focus();
      await page.locator("#found").getByText("Nothing in the manual").waitFor();
      await page.keyboard.press("Tab");
      expect(await page.locator("#found").isVisible()).toBe(false);
      await page.keyboard.press("Shift+Tab");
      await page.locator("#found").getByText("Nothing in the manual").waitFor();
      await page.keyboard.press("Escape");
      expect(await page.locator("#found").isVisible()).toBe(false);
      expect([strays, complaints]).toEqual([[], []]);
    });
  }

  test("leads a reader with a keyboard past the links, and shows where the focus is", async () => {
    await using visited = await visit(browser, `${gateway.url}/docs/backups`, { viewport: DESK });
    const { page } = visited;
    await page.keyboard.press("Tab");
    expect(await focused(page)).toBe("Skip to the content");
    expect(await page.locator(".skip").evaluate((link) => link.getBoundingClientRect().top)).toBeGreaterThanOrEqual(0);
    await page.keyboard.press("Enter");
    expect(await focused(page)).toBe("content");
    await page.keyboard.press("Tab");
    const outline = await styleOf(page, "activeElement", "outlineStyle");
    expect([await page.locator("main :focus").count(), outline]).toEqual([1, "solid"]);
  });

  test.each(looks)("shows the focus on a button beside code: %o", async ({ viewport, colorScheme }) => {
    await using visited = await visit(browser, `${gateway.url}/docs/payments`, { viewport, colorScheme });
    const { page } = visited;
    const blocks = page.locator(".code");
    for (const block of await blocks.all()) {
      await block.locator("pre").focus();
      await page.keyboard.press("Tab");
      const button = block.getByRole("button", { name: "Copy" });
      expect(await page.evaluate<string>(FOCUS)).toBe("2px solid, in view");
      expect(await button.evaluate((element) => element === element.ownerDocument.activeElement)).toBe(true);
    }
    expect(await blocks.count()).toBeGreaterThan(5);
  });

  test("shows all pages and the outline beside a page on a desk, and folds them on a phone", async () => {
    for (const [viewport, isOpen] of [
      [DESK, true],
      [PHONE, false],
    ] as const) {
      await using visited = await visit(browser, `${gateway.url}/docs/monitoring`, { viewport });
      const { page } = visited;
      const links = [
        page.getByRole("navigation", { name: "Pages" }).getByRole("link", { name: "Configuration" }),
        page.getByRole("navigation", { name: "On this page" }).getByRole("link", { name: "Traces", exact: true }),
      ];
      for (const link of links) expect(await link.isVisible()).toBe(isOpen);
      if (!isOpen)
        for (const name of ["All pages", "On this page"]) await page.getByText(name, { exact: true }).click();
      await links[1]?.click();
      await page.waitForURL("**/docs/monitoring#traces");
      await links[0]?.click();
      await page.waitForURL("**/docs/configuration");
    }
  });

  for (const host of ["127.0.0.1", OTHER_HOST]) {
    test(`copies a block of code by the keyboard at ${host}, and says so`, async () => {
      const url = `${gateway.url.replace("127.0.0.1", host)}/docs/install`;
      await using visited = await visit(browser, url, { viewport: DESK });
      const { page, complaints } = visited;
      if (host === "127.0.0.1") await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
      const block = page.locator(".code").first();
      const button = block.getByRole("button", { name: "Copy" });
      await block.locator("pre").focus();
      await page.keyboard.press("Tab");
      await page.keyboard.press("Enter");
      await block.getByRole("button", { name: "Copied" }).waitFor();
      expect(await page.getByRole("status").textContent()).toBe("Copied");
      expect(await focused(page)).toBe("Copied");
      await page.locator("#search").focus();
      await page.keyboard.press("Control+V");
      expect(await page.locator("#search").inputValue()).toBe("sha256sum --check --ignore-missing SHA256SUMS");
      if (host === OTHER_HOST) await button.waitFor();
      expect(complaints).toEqual([]);
    });
  }

  test("works without JavaScript but for the search and the copy buttons", async () => {
    await using visited = await visit(browser, `${gateway.url}/docs`, { viewport: PHONE, javaScriptEnabled: false });
    const { page } = visited;
    await page.getByRole("main").getByRole("link", { name: "Install" }).click();
    await page.waitForURL("**/docs/install");
    expect([await page.locator("#search").isVisible(), await page.locator(".code button").count()]).toEqual([false, 0]);
    expect(await page.locator("pre .hljs-built_in").count()).toBeGreaterThan(0);
    await page.getByText("On this page", { exact: true }).click();
    await page.getByRole("link", { name: "Verify it" }).first().click();
    await page.waitForURL("**/docs/install#verify-it");
    await page.getByRole("link", { name: /^Next/ }).click();
    await page.waitForURL(`**/docs/${PAGES[1]?.name}`);
  });
});

describe("the manual of the binary", () => {
  test("is rendered at the build, so that the binary holds no renderer", async () => {
    const html = await (await fetch(`${gateway.url}/docs/api`)).text();
    expect(html).toContain('<span class="hljs-keyword">POST</span>');
    const binary = await Bun.file(new URL("../dist/tollgate", import.meta.url)).bytes();
    expect(Buffer.from(binary).includes("hljs-keyword")).toBe(true);
    // The name of the language that ../src/gateway/manual/render/highlight.js defines itself.
    expect(Buffer.from(binary).includes("HTTP exchange")).toBe(false);
  });
});
