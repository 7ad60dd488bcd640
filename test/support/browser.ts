// A real browser, and visits to pages of a gateway that note what they may not do: ask another machine, or complain.
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";

/** Null where there is no browser on this machine. Chromium without its windows takes half as long as the whole of it. */
export const browserPath = Bun.which("chromium-headless-shell") ?? Bun.which("chromium");
export const whyNoBrowser =
  browserPath === null ? " (skipped: no chromium on the PATH; apt-get install chromium-headless-shell)" : "";

/** Only a hang takes so long: on a busy machine, a cold browser has needed half a minute for its first page. */
const UI_MS_MAX = 60_000;
/** For the tests of a file with a browser, each of which waits for many things: none may end before one of them has hung. */
export const BROWSER_TEST_MS_MAX = 10 * UI_MS_MAX;

/** @param localName a name that leads to this machine, for pages that behave differently where the host is not local */
export function launchBrowser(localName: string): Promise<Browser> {
  return chromium.launch({
    executablePath: browserPath ?? "",
    args: [
      ...["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"],
      ...["--disable-component-update", "--disable-sync", "--no-first-run", "--no-proxy-server"],
      `--host-resolver-rules=MAP ${localName} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1`,
    ],
  });
}

export interface Visit extends AsyncDisposable {
  readonly page: Page;
  /** Each request of the visit by its path. */
  readonly asked: string[];
  /** Requests to anything but the origin of the visited page. */
  readonly strays: string[];
  readonly complaints: string[];
}

export async function visit(browser: Browser, url: string, options: BrowserContextOptions = {}): Promise<Visit> {
  const { origin } = new URL(url);
  // What moves is drawn dozens of times a second, which takes more than all that the tests do.
  const context = await browser.newContext({ reducedMotion: "reduce", ...options });
  context.setDefaultTimeout(UI_MS_MAX);
  const [asked, strays, complaints]: [string[], string[], string[]] = [[], [], []];
  context.on("request", (request) => {
    const to = new URL(request.url());
    if (to.origin === origin) asked.push(to.pathname);
    else if (to.protocol !== "data:") strays.push(request.url());
  });
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  const page = await context.newPage();
  page.on("pageerror", (error) => complaints.push(String(error)));
  await page.goto(url);
  return { page, asked, strays, complaints, [Symbol.asyncDispose]: () => context.close() };
}
