import { beforeAll, describe, expect, test } from "bun:test";
import { gunzipSync } from "node:zlib";
import MiniSearch, { type AsPlainObject } from "minisearch";
import { silentLog } from "../../core/log.ts";
import { VERSION } from "../../core/startup.ts";
import { createAssets } from "../../http/assets.ts";
import { routes } from "../../http/elysia.ts";
import { createEdge, type Edge } from "../../http/server.ts";
import { find, OPTIONS } from "./find.js";
import { PAGES, type Page, SEARCH_WORDS, SECTIONS } from "./pages.ts";
import { renderMarkdown, type Section, sectionsOf } from "./render/render.ts";
import { manualRoutes, orPage } from "./routes.ts";

let edge: Edge;
beforeAll(() => {
  const app = routes().use(manualRoutes(createAssets()));
  const authenticate = () => ({ tenant: "t", user: "u", scopes: new Set<string>() });
  edge = createEdge({ app, log: silentLog, authenticate, missing: orPage });
});
/** Read to its end, as a browser does: what nobody reads counts as being sent. */
async function get(path: string, headers: Record<string, string> = {}): Promise<Response> {
  const answer = await edge.fetch(new Request(`http://localhost${path}`, { headers }));
  return new Response(answer.body === null ? null : await answer.bytes(), answer);
}

const NAMES = PAGES.map(({ name }) => `/docs/${name}`);
const SCRIPTS = ["/docs/copy.js", "/docs/search.js", "/docs/find.js", "/docs/minisearch.js"];
const FILES = ["/docs/style.css", ...SCRIPTS, "/docs/search.json"];

/** The page's HTML. */
const htmlOf = async (markdown: string) => (await renderMarkdown(markdown)).html;
const pageOf = (text: string): Page => ({ name: "p", section: "Start", title: "A title", summary: "", text });

describe("the manual's site", () => {
  test("has every page and file, each of its type", async () => {
    for (const path of ["/docs", ...NAMES]) {
      const page = await get(path);
      expect([path, page.status, page.headers.get("content-type")]).toEqual([path, 200, "text/html; charset=utf-8"]);
      expect(page.headers.get("content-security-policy")).toStartWith("default-src 'none'; script-src 'self';");
    }
    const types = await Promise.all(FILES.map(async (path) => (await get(path)).headers.get("content-type")));
    const scripts = SCRIPTS.map(() => "text/javascript; charset=utf-8");
    expect(types).toEqual(["text/css; charset=utf-8", ...scripts, "application/json"]);
  });

  test("loads nothing from elsewhere, and holds no inline script or style", async () => {
    for (const path of ["/docs", ...NAMES]) {
      const text = await (await get(path)).text();
      expect(text.match(/<(script|link|img|iframe)[^>]*(src|href)="(https?:)?\/\/[^>]*>/g) ?? []).toEqual([]);
      expect(text).not.toMatch(/<script(?![^>]* src=)|<style| style=| on[a-z]+="/);
    }
  });

  test("answers an address that has no page with a page that leads on, for a browser, and else with JSON", async () => {
    const accept = "text/html,application/xhtml+xml,*/*;q=0.8";
    for (const path of ["/nope", "/", "/nope/a?b=c", "/docs/nothing", "/docs/start/", "/docs/no-page", "/docs/a/b/c"]) {
      const page = await get(path, { accept });
      const headers = ["content-type", "vary", "etag"].map((name) => page.headers.get(name));
      expect([path, page.status, ...headers]).toEqual([path, 404, "text/html; charset=utf-8", "accept", null]);
      expect(page.headers.get("content-security-policy")).toStartWith("default-src 'none'; script-src 'self';");
      const text = await page.text();
      expect(text).toContain('<input id="search"');
      const links = [...text.matchAll(/ (?:href|src)="([^"#]+)"/g)].map(([, link = ""]) => link);
      const paths = links.map((link) => new URL(link, `http://localhost${path}`).pathname);
      expect(paths).toEqual(expect.arrayContaining(["/docs", "/docs/start", ...NAMES]));
      const own = paths.filter((linked) => !["/", "/swagger/favicon.png"].includes(linked));
      const statuses = await Promise.all(own.map(async (linked) => [linked, (await get(linked)).status]));
      expect(statuses).toEqual(own.map((linked) => [linked, 200]));
    }
    const json = { accept: "application/json" };
    const answers = [await get("/docs/strat"), await get("/docs/nothing/here", json), await get("/nope", json)];
    const told = async (answer: Response) => [answer.status, answer.headers.get("vary"), await answer.json()];
    expect(await Promise.all(answers.map(told))).toEqual([
      [404, "accept", { error: "no such route; did you mean /docs/start?" }],
      [404, "accept", { error: "no such route" }],
      [404, "accept", { error: "no such route" }],
    ]);
    const api = await get("/v1/nope", { accept });
    expect([api.status, await api.json()]).toEqual([404, { error: "no such route" }]);
    const post = await edge.fetch(new Request("http://localhost/nope", { method: "POST", headers: { accept } }));
    expect([post.status, await post.json()]).toEqual([404, { error: "no such route" }]);
    const head = await edge.fetch(new Request("http://localhost/docs/nothing", { method: "HEAD" }));
    expect(head.status).toBe(404);
    // A page would have thousands of long links.
    expect((await get(`/docs/${"a/".repeat(1000)}`, { accept })).headers.get("content-type")).toBe("application/json");
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

  test("is sent compressed where the browser takes that, and says that it depends on it", async () => {
    for (const path of ["/docs", ...NAMES, ...FILES]) {
      const plain = await get(path);
      const text = await plain.text();
      const tags = new Set([plain.headers.get("etag")]);
      for (const takes of ["gzip, deflate, br", "br;q=1.0, GZIP;q=0.5", "*"]) {
        const packed = await get(path, { "accept-encoding": takes });
        const bytes = await packed.bytes();
        tags.add(packed.headers.get("etag"));
        expect([packed.headers.get("content-encoding"), packed.headers.get("vary")]).toEqual([
          "gzip",
          "accept-encoding",
        ]);
        expect(new TextDecoder().decode(gunzipSync(bytes))).toBe(text);
        expect(bytes.length).toBeLessThan(text.length * 0.7);
      }
      expect([path, tags.size]).toEqual([path, 2]);
      for (const refuses of ["br", "gzip;q=0, *", "identity, *;q=0.000"]) {
        const sent = await get(path, { "accept-encoding": refuses });
        expect([sent.headers.get("content-encoding"), sent.headers.get("vary")]).toEqual([null, "accept-encoding"]);
        expect(sent.headers.get("etag")).toBe(plain.headers.get("etag"));
      }
    }
  });

  test("does not take a plain copy for a compressed one that is current", async () => {
    const plain = (await get("/docs/api")).headers.get("etag") ?? "";
    const gzip = { "accept-encoding": "gzip" };
    expect((await get("/docs/api", { ...gzip, "if-none-match": plain })).status).toBe(200);
    const packed = (await get("/docs/api", gzip)).headers.get("etag") ?? "";
    const current = await get("/docs/api", { ...gzip, "if-none-match": packed });
    expect([current.status, current.headers.get("vary")]).toEqual([304, "accept-encoding"]);
  });

  test("lists its pages by section, and leads from each to the one before and after", async () => {
    const contents = await (await get("/docs")).text();
    expect([...contents.matchAll(/<h2>(.+)<\/h2>/g)].map(([, title]) => title)).toEqual([...SECTIONS]);
    expect(PAGES.map(({ section }) => SECTIONS.indexOf(section))).toEqual(
      PAGES.map(({ section }) => SECTIONS.indexOf(section)).sort(),
    );
    const found: (string | undefined)[][] = [];
    for (const path of NAMES) {
      const html = await (await get(path)).text();
      found.push(["prev", "next"].map((rel) => new RegExp(`<a rel="${rel}" href="([^"]+)"`).exec(html)?.[1]));
    }
    expect(found).toEqual(PAGES.map((_, at) => [PAGES[at - 1]?.name, PAGES[at + 1]?.name]));
  });

  test("has an outline of each page, and its version", async () => {
    for (const path of NAMES) {
      const html = await (await get(path)).text();
      const [, outline = ""] = /<nav class="outline"(.*?)<\/nav>/s.exec(html) ?? [];
      const ids = [...html.matchAll(/<h[23] id="([^"]+)"/g)].map(([, id]) => id);
      const isOutlined = path !== "/docs/changelog" || ids.length > 1;
      expect([path, ids.length > 1]).toEqual([path, isOutlined]);
      expect([...outline.matchAll(/href="#([^"]+)"/g)].map(([, id]) => id)).toEqual(isOutlined ? ids : []);
      expect(html).toContain(`<span class="version">${VERSION}</span>`);
    }
  });
});

describe("the search of the manual", () => {
  let index: MiniSearch<Section>;
  let sections: Section[];
  beforeAll(async () => {
    index = MiniSearch.loadJS<Section>((await (await get("/docs/search.json")).json()) as AsPlainObject, OPTIONS);
    sections = (await Promise.all(PAGES.map(sectionsOf))).flat();
  });

  test("reads every heading of every page", async () => {
    for (const { name } of PAGES) {
      const html = await (await get(`/docs/${name}`)).text();
      const ids = [...html.matchAll(/<h[2-6] id="([^"]+)"/g)].map(([, id = ""]) => id);
      const found = sections.map(({ id }) => id).filter((id) => id.split("#")[0] === name);
      expect(found).toEqual([name, ...ids.map((id) => `${name}#${id}`)]);
      expect(found.filter((id) => !index.has(id))).toEqual([]);
      // Two of one name would make the second one unreachable.
      expect(new Set(ids).size).toBe(ids.length);
    }
    expect(index.documentCount).toBe(sections.length);
  });

  test("finds a section first by its heading", () => {
    const missed = sections.flatMap(({ title }) => {
      const [first] = find(index, title);
      return first?.["title"] === title ? [] : [[title, first?.["page"], first?.["title"]]];
    });
    expect(missed).toEqual([]);
  });

  test("finds what is mistyped, begun, or named by a variable", () => {
    const first = (words: string) => find(index, words)[0]?.id;
    expect(first("retenton")).toBe("operations#retention");
    expect(first("reorganistions")).toBe("facilitator#reorganisations");
    expect(first("shutd")).toBe("operations#shutdown");
    expect(["tokn", "tokne", "how do I get a tokn"].map(first)).toEqual(Array(3).fill(first("token")));
    expect(["polciy", "plicy", "poliyc"].map(first)).toEqual(Array(3).fill(first("policy")));
    expect(first("agnet")).toBe(first("agent"));
    expect(first("backpu")).toBe(first("backup"));
  });

  test.each([
    ["getting paid", "payments#get-paid"],
    ["how do I get paid", "payments#get-paid"],
    ["payment", "payments"],
    ["price", "payments#set-a-price"],
    ["token", "start#a-token"],
    ["--env-file", "configuration#variables-from-a-file"],
    ["env file", "configuration#variables-from-a-file"],
    ["TOLLGATE_PORT", "configuration#variables-of-both-services"],
    ["TOLLGATE_DRAIN_MS", "configuration#variables-of-both-services"],
    ["settlement set", "payments#get-paid"],
    ["connection refused", "api#failed-calls"],
    ["error_class", "api#failed-calls"],
    ["unknown key", "troubleshooting#401-for-a-good-token"],
    ["401", "troubleshooting#401-for-a-good-token"],
    ["429", "troubleshooting#429"],
    ["ratelimit", "api#rate-limits"],
    ["rate limit", "api#rate-limits"],
    ["rate-limit", "api#rate-limits"],
    ["backup", "backups#backup"],
    ["docker", "install#one-container"],
    ["kubernetes", "install#one-container"],
    ["postgres", "replicas#postgres"],
    ["first call", "start"],
    ["getting started", "start"],
    ["credential", "api#credentials"],
    ["x402", "payments"],
    ["claude", "clients#claude-code"],
    ["idempotency", "api#idempotency-keys"],
    ["retention", "operations#retention"],
    ["swagger", "api#open-paths"],
    ["metrics", "monitoring#metrics"],
    ["ssrf", "security#upstream-addresses"],
    ["testnet", "payments"],
    ["sepolia", "payments"],
    ["port in use", "troubleshooting#it-does-not-start"],
    ["health check", "operations#health"],
    ["api key", "api#credentials"],
    ["login", "start#a-token"],
    ["refund", "api#responses-to-a-paid-call"],
    ["connection_refused", "api#failed-calls"],
  ])("shows for %p one of its first two results at %s", (words, id) => {
    const found = find(index, words).map(({ id }) => id);
    expect(found.slice(0, 2)).toContain(id);
  });

  test.each([
    ["log in", "start#a-token"],
    ["how do I log in", "start#a-token"],
    ["sign in", "start#a-token"],
    ["log", "operations#log"],
    ["connection refused", "troubleshooting#no-connection-to-the-gateway"],
    ["refused", "troubleshooting#no-connection-to-the-gateway"],
    ["connection_refused", "api#failed-calls"],
    ["windows", "install#releases"],
    ["docker compose", "install#compose"],
    ["systemd", "install#binary-and-systemd"],
    ["nginx", "operations#tls"],
    ["reverse proxy", "operations#tls"],
    ["rate limit", "api#rate-limits"],
    ["cors", "clients#fetch"],
    ["api key", "api#credentials"],
    ["delete tenant", "security#tenants"],
    ["delete a tenant", "security#tenants"],
    ["timeout", "api#failed-calls"],
    ["retry", "api#idempotency-keys"],
    ["refund", "api#responses-to-a-paid-call"],
    ["tollgate call", "configuration#calls-from-the-command-line"],
    ["exit code", "configuration#calls-from-the-command-line"],
    ["prometheus", "monitoring#metrics"],
    ["opentelemetry", "monitoring#traces"],
    ["version", "upgrades"],
    ["localhost", "troubleshooting#400-for-localhost-or-a-private-address"],
    ["scopes", "security#scopes"],
    ["permissions", "security#scopes"],
    ["jwt", "security#tokens"],
    ["keycloak", "security#tokens"],
    ["typescript client", "clients#a-typed-client-in-typescript"],
    ["generate a client", "clients#a-typed-client-in-typescript"],
    ["javascript", "clients#fetch"],
    ["mcp", "streaming#connect-an-mcp-client"],
    ["sse", "streaming"],
    ["environment variables", "configuration"],
    ["change the port", "configuration#variables-of-both-services"],
    ["TOLLGATE_BATCH", "configuration#variables-of-the-facilitator"],
    ["tollgate doctor", "operations#doctor"],
    ["tollgate token", "start#a-token"],
    ["tollgate backup", "backups#backup"],
    ["max body size", "limits#connections-and-requests"],
    ["status codes", "api#errors"],
    ["performance", "growing#how-much-one-machine-carries"],
    ["high availability", "replicas"],
    ["load balancer", "replicas#several-gateways"],
    ["mtls", "facilitator#certificates"],
    ["gas", "facilitator#keys-and-gas"],
    ["pay for a call", "payments#pay-for-a-call"],
    ["block a tool", "api#policy"],
    ["revoke a token", "rotation#revoke-tokens"],
    ["cancel a call", "api#cancel"],
    ["restart", "operations#shutdown"],
    ["backup postgres", "backups#postgres"],
    ["encryption", "security#secrets"],
    ["unauthorized", "troubleshooting#401-for-a-good-token"],
    ["too many requests", "troubleshooting#429"],
    ["payment required", "api#responses-to-a-paid-call"],
    ["list invocations", "api#history"],
    ["logging", "operations#log"],
    ["custom CA", "configuration#variables-of-both-services"],
    ["demo", "install#from-source"],
    ["invalid token", "troubleshooting#401-for-a-good-token"],
    ["forgot token", "start#a-token"],
    ["why did my call fail", "start#when-a-call-fails"],
    ["install without docker", "install#binary-and-systemd"],
    ["change price", "payments#set-a-price"],
    ["change upstream url", "api#agents"],
    ["multiple gateways", "replicas#several-gateways"],
    ["stop gateway", "operations#shutdown"],
    ["payment declined", "api#responses-to-a-paid-call"],
    ["https certificate", "operations#tls"],
    ["double charge", "api#idempotency-keys"],
    ["response body base64", "start#a-call"],
    ["completion", "configuration#commands"],
    ["demo port", "install#from-source"],
    ["account add", "payments#start-a-facilitator"],
    ["websocket", "streaming"],
    ["tls certificate", "operations#tls"],
    ["my token was lost", "start#a-token"],
    ["lost token", "start#a-token"],
    ["token lifetime", "start#a-token"],
    ["call an agent", "start#a-call"],
    ["how do I get the result", "start#a-call"],
    ["poll for the result", "start#a-call"],
    ["start the gateway", "start#a-gateway"],
    ["gateway won't start", "troubleshooting#it-does-not-start"],
    ["it doesn't start", "troubleshooting#it-does-not-start"],
    ["access from another machine", "troubleshooting#no-connection-to-the-gateway"],
    ["bind to 0.0.0.0", "configuration#variables-of-both-services"],
    ["database location", "operations#data-directory"],
    ["migrate to postgres", "install#postgres-in-place-of-sqlite"],
    ["move to another server", "backups#move-a-service"],
    ["restore backup", "backups#restore"],
    ["downgrade", "upgrades#going-back"],
    ["rollback", "upgrades#going-back"],
    ["zero downtime", "upgrades#several-on-one-postgres"],
    ["update docker image", "install#upgrade"],
    ["release notes", "changelog"],
    ["who pays the gas", "facilitator#keys-and-gas"],
    ["out of gas", "facilitator#keys-and-gas"],
    ["payment failed", "api#responses-to-a-paid-call"],
    ["was I charged", "api#responses-to-a-paid-call"],
    ["insufficient funds", "troubleshooting#402-again-though-the-call-was-paid"],
    ["facilitator url", "payments#name-the-facilitator"],
    ["facilitator down", "troubleshooting#payments"],
    ["spending limit", "facilitator#ceilings"],
    ["client certificate expired", "facilitator#certificates"],
    ["renew certificate", "facilitator#certificates"],
    ["agent timed out", "api#failed-calls"],
    ["call is pending forever", "troubleshooting#calls"],
    ["response body missing", "troubleshooting#calls"],
    ["python example", "clients#python"],
    ["curl example", "clients#curl"],
    ["policy example", "api#policy"],
    ["dry run", "api#policy"],
    ["search calls", "api#history"],
    ["pagination", "api#history"],
    ["exactly once", "api#idempotency-keys"],
    ["requests per minute", "api#rate-limits"],
    ["invalid request", "api#errors"],
    ["upstream authentication", "api#credentials"],
    ["encrypt secrets", "security#secrets"],
    ["who can see my data", "security#what-is-logged-and-stored"],
    ["gdpr", "operations#retention"],
    ["delete history", "operations#retention"],
    ["scaling", "growing"],
    ["size of database", "growing#disk"],
    ["mysql", "growing#which-engines-fit"],
    ["second gateway", "replicas#several-gateways"],
    ["database down", "troubleshooting#the-database-was-away-or-failed-over"],
    ["slow calls", "troubleshooting#it-is-slow"],
    ["debug log", "operations#log"],
    ["health endpoint", "operations#health"],
    ["call localhost", "troubleshooting#400-for-localhost-or-a-private-address"],
    ["500 error", "troubleshooting#500-without-a-body"],
    ["503 service unavailable", "troubleshooting#503"],
    ["verify signature", "receipts#check-receipts-offline"],
    ["cve", "vulnerabilities"],
    ["support", "contributing#report-a-bug"],
    ["autocomplete", "configuration#commands"],
    ["regenerate token", "start#a-token"],
    ["dns error", "api#failed-calls"],
    ["pass authorization to agent", "api#credentials"],
    ["how many requests can it handle", "growing#how-much-one-machine-carries"],
    ["price per call", "payments#set-a-price"],
    ["same payment twice", "api#idempotency-keys"],
    ["does a call survive restart", "operations#shutdown"],
    ["role based access", "security#scopes"],
    ["separate customers", "security#tenants"],
    ["no space left on device", "troubleshooting#the-disk-fills"],
    ["high cpu", "troubleshooting#it-is-slow"],
    ["out of memory", "operations#memory"],
    ["change data folder", "operations#data-directory"],
    ["turn off body capture", "security#what-is-logged-and-stored"],
    ["gateway crashed", "troubleshooting#it-does-not-start"],
    ["why is my call failing", "start#when-a-call-fails"],
    ["charging for calls", "payments"],
    ["setting a price", "payments#set-a-price"],
    ["paying", "payments#pay-for-a-call"],
    ["uninstalling", "install#uninstall"],
    ["is it safe to retry", "api#idempotency-keys"],
    ["metrics grafana", "monitoring#metrics"],
    ["disable an agent", "api#agents"],
    ["disabling agents", "api#agents"],
    ["what happens when my agent is down", "api#failed-calls"],
    ["mainnet", "payments"],
    ["token expired", "troubleshooting#401-for-a-good-token"],
    ["localhost agent not allowed", "troubleshooting#400-for-localhost-or-a-private-address"],
    ["webhok", "api#calls"],
    ["add agent", "start#an-agent"],
    ["where is my token printed", "start#a-token"],
    ["remove agent", "api#agents"],
    ["go client", "clients"],
    ["chatgpt", "clients"],
    ["image response", "start#a-call"],
    ["node version", "install#from-source"],
    ["payout address", "payments#set-a-price"],
    ["how much does a call cost", "payments#set-a-price"],
    ["which wallet do I need", "facilitator#keys-and-gas"],
    ["how much did I earn", "payments#what-became-of-a-payment"],
    ["earnings", "payments#what-became-of-a-payment"],
    ["transaction hash", "payments#what-became-of-a-payment"],
    ["faucet", "payments"],
    ["coinbase facilitator", "api#payments"],
    ["public facilitator", "api#payments"],
    ["commission", "api#payments"],
    ["how to use https", "operations#tls"],
    ["put a domain name in front", "operations#tls"],
    ["default data directory", "operations#data-directory"],
    ["master.key permissions", "operations#data-directory"],
    ["reset everything", "operations#data-directory"],
    ["increase timeout", "configuration"],
    ["how long are results kept", "operations#retention"],
    ["second gateway on same machine", "growing"],
    ["what's new", "changelog"],
    ["sbom", "install#releases"],
    ["offline install", "install#releases"],
    ["verbose", "operations#log"],
    ["who called my agent", "api#history"],
    ["see request body", "api#history"],
    ["test a policy", "api#policy"],
    ["read only token", "security#scopes"],
    ["encrypt database", "security#secrets"],
    ["multi-tenancy", "security#tenants"],
    ["list tenants", "security#tenants"],
    ["proof of call", "receipts"],
  ])("shows for %p first %s", (words, id) => {
    expect(find(index, words)[0]?.id).toBe(id);
  });

  test("finds every form of a word, and follows few sections with all words by those with any", () => {
    const forms = (words: string) => find(index, words).map(({ id }) => id);
    for (const [form, other] of [
      ["retries", "retrying"],
      ["charges", "charged"],
      ["stopped", "stopping"],
    ] as const) {
      expect([form, forms(form)]).toEqual([form, forms(other)]);
    }
    const [first, ...others] = forms("userdel docker");
    expect([first, others.length > 3]).toEqual(["install#uninstall", true]);
  });

  test("finds nothing by a word that no page has", () => {
    for (const words of ["telegram", "xyzzy", "--", "?"]) expect([words, find(index, words)]).toEqual([words, []]);
  });

  test("has further words only for sections that are there", () => {
    const ids = sections.map(({ id }) => id);
    expect(Object.keys(SEARCH_WORDS).filter((id) => !ids.includes(id))).toEqual([]);
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
    expect(await sectionsOf(pageOf(page))).toEqual([
      {
        id: "p",
        page: "A title",
        title: "A title",
        words: "",
        explained: "",
        text: "One two",
        weight: expect.any(Number),
      },
      {
        id: "p#part-1",
        page: "A title",
        title: "Part (1)",
        words: "",
        explained: "a\nc",
        text: "three four c · d e | f",
        weight: expect.any(Number),
      },
    ]);
  });

  test("keeps a code block whole, whatever its lines begin with", async () => {
    const page = "# A\n\n1. one\n\n   ```text\n   b\n   # c\n   ```\n\n```text\n## d\n```\n\n## E\n";
    const titles = (await sectionsOf(pageOf(page))).map(({ title }) => title);
    expect(titles).toEqual(["A", "E"]);
    expect(await htmlOf(page)).toContain("<code>## d\n</code>");
  });

  test("shows code highlighted, and without its marks as it was written", async () => {
    const code = [
      ["sh tour", "export A='b' # c <d>"],
      ["json", '{ "a": 1, "b": null, "c": "<d>" }'],
      ["yaml compose", 'a: ["b"] # c'],
      ["js call.mjs", "const a = 'b'; // <d>"],
      ["ts call.ts", "const a: string = 'b'; // <d>"],
      ["python call.py", "import a # 'b'"],
      ["http", 'POST /v1/agents\n{ "name": "a" }\n→ 201 { "id": "agt_…" }\nX-Header: 1'],
      ["text", "a <b>"],
      ["no-language", "a & b"],
      ["", "plain"],
    ] as const;
    const marks: string[] = [];
    for (const [info, text] of code) {
      const html = await htmlOf(`\`\`\`${info}\n${text}\n\`\`\`\n`);
      const shown = html
        .replace(/<[^>]+>/g, "")
        .replaceAll("&lt;", "<")
        .replaceAll("&gt;", ">");
      expect(shown.replaceAll("&quot;", '"').replaceAll("&#x27;", "'").replaceAll("&amp;", "&").trim()).toBe(text);
      marks.push([...new Set(html.match(/hljs-\w+/g))].sort().join(" "));
    }
    expect(marks).toEqual([
      "hljs-built_in hljs-comment hljs-string",
      "hljs-attr hljs-keyword hljs-literal hljs-number hljs-punctuation hljs-string",
      "hljs-attr hljs-comment hljs-string",
      "hljs-comment hljs-keyword hljs-string",
      "hljs-attr hljs-built_in hljs-comment hljs-keyword hljs-string",
      "hljs-comment hljs-keyword",
      "hljs-attr hljs-keyword hljs-number hljs-string",
      "",
      "",
      "",
    ]);
  });

  test("is in no language that can't be highlighted", async () => {
    const infos = new Set(PAGES.flatMap(({ text }) => [...text.matchAll(/^```(\w+)/gm)].map(([, info = ""]) => info)));
    infos.delete("text");
    for (const info of infos) {
      const html = await htmlOf(`\`\`\`${info}\nimport "a" 1 POST /v1\na: 1\n\`\`\`\n`);
      expect([info, html.includes("hljs-")]).toEqual([info, true]);
    }
    expect(infos.size).toBeGreaterThan(4);
  });

  test("has no header cell that is empty", async () => {
    expect(await htmlOf("| a | |\n|---|---|\n| b | c |\n")).toContain('<tr><th scope="col">a</th><td></td></tr>');
  });

  test("has no link by reference, since each part of it is read by itself", () => {
    const defining = PAGES.filter(({ text }) => /^ {0,3}\[[^\]]+\]: /m.test(text)).map(({ name }) => name);
    expect(defining).toEqual([]);
  });
});
