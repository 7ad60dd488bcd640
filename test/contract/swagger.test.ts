// Swagger UI as a developer uses it: a real browser opens the page that the compiled binary serves, authorizes,
// and executes an operation. Nothing it does may reach for another machine. Opening the page costs most, so tests share it.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { Validator } from "@seriousme/openapi-schema-validator";
import type { Browser, Locator, Page } from "playwright-core";
import { contrastFindings, findings, widthFindings } from "../support/axe.ts";
import {
  BROWSER_TEST_MS_MAX,
  browserPath,
  launchBrowser,
  type Visit,
  visit,
  whyNoBrowser,
} from "../support/browser.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(BROWSER_TEST_MS_MAX);

/** Another name that leads to the gateway: pages behave differently where the host is not local. */
const OTHER_HOST = "tollgate.test";
const HOSTS = ["127.0.0.1", OTHER_HOST];
const DESK = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };

let gateway: Gateway;
beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway?.[Symbol.asyncDispose]());

/** Authorizes the page, in place of the token that it has. */
async function authorize(page: Page, token: string): Promise<void> {
  await page.locator(".auth-wrapper > .authorize").click();
  const dialog = page.getByRole("dialog");
  await dialog.getByRole("button", { name: /^(Authorize|Logout)$/ }).waitFor();
  const former = dialog.getByRole("button", { name: "Logout" });
  if ((await former.count()) > 0) await former.click();
  await dialog.getByRole("textbox").fill(token);
  await dialog.getByRole("button", { name: "Authorize" }).click();
  await dialog.getByRole("button", { name: "Close" }).last().click();
}

/** Opens an operation, with nothing left of an earlier try. */
async function open(block: Locator): Promise<void> {
  const control = block.locator(".opblock-summary-control");
  if ((await control.getAttribute("aria-expanded")) === "false") await control.click();
  await block.locator(".responses-wrapper").waitFor();
  const clear = block.getByRole("button", { name: "Clear" });
  if ((await clear.count()) === 0) return;
  await clear.click();
  await block.locator(".live-responses-table").waitFor({ state: "detached" });
}

async function opened(page: Page, method: string, path: string): Promise<Locator> {
  const block = page.locator(`.opblock-${method.toLowerCase()}:has([data-path="${path}"])`).first();
  await open(block);
  return block;
}

const idIn = (block: Locator, name = "id") => block.locator(`tr[data-param-name="${name}"] input`);

/** Resolves when the page has the colours of that look. */
async function look(page: Page, colorScheme: "light" | "dark"): Promise<void> {
  await page.emulateMedia({ colorScheme });
  await page.locator(colorScheme === "dark" ? "html.dark-mode" : "html:not(.dark-mode)").waitFor();
  // Colours change in steps, and between two of them they are those of neither look.
  await page.evaluate("Promise.allSettled(document.getAnimations().map(({ finished }) => finished))");
}

const hasFocus = (element: Locator) => element.evaluate((found) => found === found.ownerDocument.activeElement);

async function closeAll(page: Page): Promise<void> {
  const open = page.locator(".opblock.is-open .opblock-summary-control");
  while ((await open.count()) > 0) await open.first().click();
}

/**
 * Runs in the browser: lists what can be used within a part of the page, and notes what of it the focus comes to, and whether
 * that can be seen. A scrolling text counts too; the arrow of an operation does not, since its name does the same.
 */
const WATCH_FOCUS = `(part) => {
  const usable = [...part.querySelectorAll("a[href], button, input, select, textarea, [tabindex='0'], pre")].filter(
    (element) => element.checkVisibility() && !element.disabled && element.getAttribute("tabindex") !== "-1" &&
      (element.tagName !== "PRE" || element.scrollHeight > element.clientHeight || element.scrollWidth > element.clientWidth),
  );
  const [reached, unseen, others] = [new Set(), new Set(), new Set()];
  document.addEventListener("focusin", ({ target }) => {
    const { outlineStyle, outlineWidth } = getComputedStyle(target);
    (usable.includes(target) ? reached : others).add(target);
    if (outlineStyle !== "solid" || parseFloat(outlineWidth) < 2) unseen.add(target);
  });
  const shown = (elements) => [...elements].map((element) => element.outerHTML.slice(0, 150));
  globalThis.whatWasFocused = () => ({
    notReached: shown(usable.filter((element) => !reached.has(element))),
    unseen: shown(unseen),
    others: shown(others),
  });
  return usable.length;
}`;

/** Presses Tab until everything was focused that can be used in that part of the page, and nothing else was. */
async function walk(page: Page, part: Locator): Promise<void> {
  await part.evaluate((element) => Object.assign(globalThis, { part: element }));
  const count = await page.evaluate<number>(`(${WATCH_FOCUS})(part)`);
  expect(count).toBeGreaterThan(2);
  // The key is held down: were each step waited for, the browser would draw the page for each.
  await Promise.all(Array.from({ length: count + 5 }, () => page.keyboard.down("Tab")));
  await page.keyboard.up("Tab");
  const focused = await page.evaluate<object>("whatWasFocused()");
  expect(focused).toEqual({ notReached: [], unseen: [], others: [] });
}

/** Whether an operation that was executed has been sent, or asks for an ID that the page has not filled in. */
async function asksForId(block: Locator): Promise<boolean> {
  const asking = block.locator("input.invalid").first();
  await asking.or(block.locator(".live-responses-table .response .response-col_status")).waitFor();
  return (await asking.count()) > 0;
}

/** Executes an open operation just as the page offers it, with the example for its body. */
async function execute(block: Locator): Promise<{ status: string; body: string }> {
  await block.getByRole("button", { name: "Execute" }).click();
  if (await asksForId(block)) return { status: "asks", body: "" };
  const live = block.locator(".live-responses-table .response");
  const status = (await live.locator(".response-col_status").textContent()) ?? "";
  const shown = await live.locator(".response-col_description .highlight-code pre").allTextContents();
  return { status: status.slice(0, 3), body: shown[0] ?? "" };
}

/** What comes of each operation, in the order of the page, where the upstream of the example does not exist. */
const IN_ORDER = [
  "POST /v1/agents: 201",
  "GET /v1/agents: 200",
  "GET /v1/agents/{id}: 200",
  "PATCH /v1/agents/{id}: 200",
  "POST /v1/credentials: 201",
  "GET /v1/credentials: 200",
  "GET /v1/credentials/{id}: 200",
  "PUT /v1/credentials/{id}: 200",
  "POST /v1/proxy/{id}: 202",
  "GET /v1/proxy/{id}/invocations/{inv_id}: 200",
  // The call has ended, and there is no other.
  "POST /v1/proxy/{id}/invocations/{inv_id}/cancel: asks",
  "POST /v1/proxy/{id}/stream: 502",
  "GET /v1/proxy/{id}/stream: can't be tried",
  // Only an mcp agent has sessions.
  "DELETE /v1/proxy/{id}/stream: 405",
  "GET /v1/invocations: 200",
  "GET /v1/invocations/{id}: 200",
  "GET /v1/invocations/{id}/receipt: 200",
  "GET /v1/receipts: 200",
  // The credential of the example is nobody's, so a click sets no facilitator: what is set can't be removed again.
  "PATCH /v1/settlement/config: 400",
  "GET /v1/settlement/config: 404",
  "GET /v1/policy: 200",
  "PUT /v1/policy: 200",
  "GET /v1/policy/decisions: 200",
  "POST /v1/policy/evaluate: 200",
  "POST /settle: can't be tried",
  "GET /supported: can't be tried",
  "GET /healthz: 200",
  "GET /healthz: 200",
  "GET /readyz: 200",
  "GET /version: 200",
  "GET /.well-known/jwks.json: 200",
  "GET /: 200",
  "DELETE /v1/agents/{id}: 204",
  "DELETE /v1/credentials/{id}: 204",
];

/** Starts an agent that answers the index of a response with that response. */
async function startAgent(token: string, responses: readonly (() => Response)[]) {
  let calls = 0;
  const upstream = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    fetch: async (request) => {
      calls++;
      return responses[Number(await request.text())]?.() ?? new Response("no such response");
    },
  });
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const body = JSON.stringify({ name: "answering", upstream_url: `${upstream.url}` });
  await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
  return { calls: () => calls, [Symbol.asyncDispose]: () => upstream.stop(true) };
}

/** A WAV file of 8,000 samples of one byte, for one second. */
const SECOND_OF_SILENCE = Buffer.alloc(8_044, 0x80);
SECOND_OF_SILENCE.write(
  "RIFF\x64\x1f\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x40\x1f\0\0\x01\0\x08\0data\x40\x1f\0\0",
  "latin1",
);

/** A PNG of a black line, wider than any window. */
const LINE_OF_3000 = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAC7gAAAABAQAAAABmrN6TAAAADUlEQVR42mNgGAUDAQABeAABPE+B+QAAAABJRU5ErkJggg==",
  "base64",
);

/** Runs in the browser: counts the URLs of bytes. */
const COUNT_OBJECT_URLS = `(() => {
  const { createObjectURL, revokeObjectURL } = URL;
  globalThis.objectUrls = { made: [], revoked: 0 };
  URL.createObjectURL = (bytes) => { objectUrls.made.push(bytes.type); return createObjectURL.call(URL, bytes); };
  URL.revokeObjectURL = (url) => { objectUrls.revoked++; revokeObjectURL.call(URL, url); };
})()`;

const browserSuite = browserPath === null ? describe.skip : describe;

browserSuite(`the page in a browser${whyNoBrowser}`, () => {
  let browser: Browser;
  /** The page at each of the gateway's names. */
  const visits = new Map<string, Visit>();
  beforeAll(async () => {
    browser = await launchBrowser(OTHER_HOST);
    for (const host of HOSTS) {
      visits.set(host, await visit(browser, `${gateway.url.replace("127.0.0.1", host)}/swagger`, { viewport: DESK }));
    }
  });
  afterAll(() => browser?.close());
  const at = (host: string): Visit => visits.get(host)!;

  test.each(HOSTS)("at %s the page loads from the gateway alone, authorizes and creates an agent", async (host) => {
    const { page, strays, complaints } = at(host);
    expect(await page.locator(".info .title").textContent()).toContain("tollgate");
    const refused = await execute(await opened(page, "GET", "/v1/agents"));
    expect(refused.status).toBe("401");
    // The browser itself reports a failed request, and that one was meant to fail.
    expect(complaints.splice(0)).toEqual([expect.stringContaining("401")]);

    await authorize(page, await gateway.token({ tenant: host, user: "alice" }));
    const made = await execute(await opened(page, "POST", "/v1/agents"));
    expect(made.status).toBe("201");
    expect(JSON.parse(made.body)).toMatchObject({ id: expect.stringMatching(/^agt_/), created_by: "alice" });
    await closeAll(page);
    expect([strays, complaints]).toEqual([[], []]);
  });

  test("every operation can be tried as the page offers it, one after the other, and none is asked for what does not exist", async () => {
    const token = await gateway.token({ tenant: "clicking", user: "alice" });
    const headers = { authorization: `Bearer ${token}` };
    const receipts = async () => (await fetch(`${gateway.url}/v1/receipts`, { headers })).text();
    const { page, strays } = at("127.0.0.1");
    await authorize(page, token);
    const seen: string[] = [];
    for (const block of await page.locator(".opblock").all()) {
      const method = (await block.locator(".opblock-summary-method").textContent()) ?? "";
      const path = (await block.locator("[data-path]").getAttribute("data-path")) ?? "";
      // A receipt is made a moment after the call has ended.
      if (path.includes("receipt")) await until(async () => (await receipts()) !== "");
      await open(block);
      let status = "can't be tried";
      if ((await block.getByRole("button", { name: "Execute" }).count()) > 0) {
        ({ status } = await execute(block));
        const shown = await block.locator(".response-col_description").last().textContent();
        expect([path, shown]).toEqual([path, expect.not.stringMatching(/can't parse|unable to display|Download file/)]);
      }
      seen.push(`${method} ${path}: ${status}`);
      await block.locator(".opblock-summary-control").click();
    }
    expect(seen).toEqual(IN_ORDER);
    expect(strays).toEqual([]);
  });

  test("an ID that an operation needs is one of what the tenant has, though the page has made nothing", async () => {
    using upstream = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response("done") });
    const token = await gateway.token({ tenant: "receipts", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json", prefer: "wait=10" };
    const ask = async (path: string, body?: object) => {
      const init = body && { method: "POST", body: JSON.stringify(body) };
      return (await fetch(`${gateway.url}${path}`, { headers, ...init })).text();
    };
    const { page, asked, strays, complaints } = at(OTHER_HOST);
    await authorize(page, await gateway.token({ tenant: "without-anything", user: "alice" }));
    const caller = await opened(page, "POST", "/v1/proxy/{id}");
    const idle = asked.length;
    await caller.getByRole("button", { name: "Execute" }).click();
    await caller.locator("input.invalid").waitFor();
    expect([await idIn(caller).inputValue(), asked.slice(idle)]).toEqual(["", []]);

    const fields = { name: "receipted", upstream_url: `${upstream.url}`, emit_receipts: true };
    const { id } = JSON.parse(await ask("/v1/agents", fields)) as { id: string };
    await ask("/v1/agents", { name: "newer, and takes no calls" });
    for (const _ of [1, 2]) await ask(`/v1/proxy/${id}`, {});
    let lines = "";
    await until(async () => {
      lines = await ask("/v1/receipts");
      return lines.split("\n").length === 3;
    });
    // What is open already gets the ID too, as soon as there is a token.
    await authorize(page, token);
    await until(async () => (await idIn(caller).inputValue()) === id);
    expect((await execute(caller)).status).toBe("202");
    const poller = await opened(page, "GET", "/v1/proxy/{id}/invocations/{inv_id}");
    expect([await idIn(poller).inputValue(), await idIn(poller, "inv_id").inputValue()]).toEqual([
      id,
      expect.stringMatching(/^inv_/),
    ]);
    const judged = await opened(page, "POST", "/v1/policy/evaluate");
    expect(JSON.parse(await judged.locator("textarea").inputValue())).toMatchObject({ agent_id: id });
    const receipts = await execute(await opened(page, "GET", "/v1/receipts"));
    expect([receipts.status, receipts.body]).toEqual([
      "200",
      expect.stringContaining(lines.split("\n")[0] ?? "no line"),
    ]);

    await authorize(page, await gateway.token({ tenant: "without-anything", user: "alice" }));
    await until(async () => (await idIn(caller).inputValue()) === "");
    expect([strays, complaints]).toEqual([[], []]);
    await closeAll(page);
  });

  test("the newest IDs are filled in, with an invocation its agent, and what the reader typed stays", async () => {
    const { page } = at(OTHER_HOST);
    await authorize(page, await gateway.token({ tenant: "filling", user: "alice" }));
    const typed = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
    const patched = await opened(page, "PATCH", "/v1/agents/{id}");
    await idIn(patched).fill(typed);
    const judged = await opened(page, "POST", "/v1/policy/evaluate");
    const maker = await opened(page, "POST", "/v1/agents");
    const make = async (name: string): Promise<string> => {
      await maker.locator("textarea").fill(JSON.stringify({ name, upstream_url: "https://a.example.com" }));
      await maker.getByRole("button", { name: "Execute" }).click();
      const shown = maker.locator(".live-responses-table .response-col_description .highlight-code code").first();
      await shown.filter({ hasText: `"name": "${name}"` }).waitFor();
      return (JSON.parse((await shown.textContent()) ?? "") as { id: string }).id;
    };
    const first = await make("first");
    await execute(await opened(page, "POST", "/v1/proxy/{id}"));
    const second = await make("second");
    const poller = await opened(page, "GET", "/v1/proxy/{id}/invocations/{inv_id}");
    expect([await idIn(poller).inputValue(), await idIn(poller, "inv_id").inputValue()]).toEqual([
      first,
      expect.stringMatching(/^inv_/),
    ]);
    expect(await idIn(await opened(page, "GET", "/v1/agents/{id}")).inputValue()).toBe(second);
    expect(JSON.parse(await judged.locator("textarea").inputValue())).toMatchObject({ agent_id: second });
    expect(await idIn(patched).inputValue()).toBe(typed);
    const remover = await opened(page, "DELETE", "/v1/agents/{id}");
    await execute(remover);
    expect(await idIn(remover).inputValue()).toBe(first);
    const written = JSON.stringify({
      default: "deny",
      rules: [{ action: "allow", match: { agents: [first, second] } }],
    });
    const policy = await opened(page, "PUT", "/v1/policy");
    await policy.locator("textarea").fill(written);
    await make("third");
    expect(await policy.locator("textarea").inputValue()).toBe(written);
    await closeAll(page);
  });

  test("executing what the page fills in changes and deletes nothing that was there before", async () => {
    const token = await gateway.token({ tenant: "working", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const ask = async (method: string, path: string, body?: object): Promise<Record<string, unknown>> => {
      const response = await fetch(`${gateway.url}${path}`, { method, headers, body: body && JSON.stringify(body) });
      return (await response.json()) as Record<string, unknown>;
    };
    const key = {
      name: "key",
      auth_type: "bearer",
      source: "managed",
      plaintext: "k",
      allowed_hosts: ["*.example.org"],
    };
    const credential = await ask("POST", "/v1/credentials", key);
    const agent = await ask("POST", "/v1/agents", { name: "weather", upstream_url: "https://a.example.org/" });
    const settlement = { facilitator_url: "https://f.example.org:8443", facilitator_credential_ref: credential["id"] };
    const policy = {
      default: "deny",
      on_error: "deny",
      rules: [{ action: "allow", match: { agents: [agent["id"]] } }],
    };
    const there = async () => {
      const found: Record<string, unknown> = {};
      for (const path of ["/v1/agents", "/v1/credentials", "/v1/settlement/config", "/v1/policy"]) {
        const { version: _version, updated_at: _updated_at, ...rest } = await ask("GET", path);
        found[path] = rest;
      }
      return found;
    };

    await using visited = await visit(browser, `${gateway.url}/swagger`, { viewport: DESK });
    const { page } = visited;
    // A body that is open already becomes that of the tenant whose token is given.
    await authorize(page, await gateway.token({ tenant: "nothing-there", user: "alice" }));
    const first = await opened(page, "PUT", "/v1/policy");
    expect(JSON.parse(await first.locator("textarea").inputValue())).toMatchObject({ default: "allow" });
    await ask("PATCH", "/v1/settlement/config", settlement);
    await ask("PUT", "/v1/policy", policy);
    const before = await there();
    expect(before).toMatchObject({ "/v1/settlement/config": settlement, "/v1/policy": policy });
    await authorize(page, token);
    await until(async () => (await first.locator("textarea").inputValue()).includes(`${agent["id"]}`));
    expect((await execute(await opened(page, "GET", "/v1/agents"))).body).toContain(`${agent["id"]}`);
    expect((await execute(await opened(page, "GET", "/v1/credentials"))).body).toContain(`${credential["id"]}`);
    expect(await idIn(await opened(page, "GET", "/v1/agents/{id}")).inputValue()).toBe(`${agent["id"]}`);
    await closeAll(page);
    const outcomes: Record<string, string> = {};
    for (const block of await page.locator(".opblock-put, .opblock-patch, .opblock-delete").all()) {
      const id = (await block.getAttribute("id")) ?? "";
      await open(block);
      outcomes[id.split("-").at(-1) ?? ""] = (await execute(block)).status;
      // What is open is drawn at every step.
      await block.locator(".opblock-summary-control").click();
    }
    expect(outcomes).toEqual({
      updateAgent: "asks",
      rotateCredential: "asks",
      updateSettlementConfiguration: "200",
      replacePolicy: "200",
      deleteAgent: "asks",
      deleteCredential: "asks",
      endAgentSession: "asks",
    });
    expect(await there()).toEqual(before);
  });

  test("while nobody knows what a replacement would replace, its body is empty, and never that of another tenant", async () => {
    const tokens = await Promise.all(
      ["with-policy", "without-policy"].map((tenant) => gateway.token({ tenant, user: "alice" })),
    );
    const policy = { default: "warn", on_error: "deny", rules: [] };
    const headers = { authorization: `Bearer ${tokens[0]}`, "content-type": "application/json" };
    await fetch(`${gateway.url}/v1/policy`, { method: "PUT", headers, body: JSON.stringify(policy) });
    await using visited = await visit(browser, `${gateway.url}/swagger`, { viewport: DESK });
    const { page } = visited;
    let held = Promise.withResolvers<void>();
    await page.route("**/v1/policy", async (route) => {
      await held.promise;
      await route.continue();
    });
    await authorize(page, tokens[0] ?? "");
    const replace = await opened(page, "PUT", "/v1/policy");
    const body = async () => JSON.parse(await replace.locator("textarea").inputValue()) as { default?: string };
    expect(await body()).toEqual({});
    held.resolve();
    await until(async () => Bun.deepEquals(await body(), policy));
    held = Promise.withResolvers();
    await authorize(page, tokens[1] ?? "");
    expect(await body()).toEqual({});
    held.resolve();
    await until(async () => (await body()).default === "allow");
  });

  test("a call that was made on the page and still runs is offered to be cancelled, and no longer once it has ended", async () => {
    const held = Promise.withResolvers<Response>();
    using upstream = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => held.promise });
    const token = await gateway.token({ tenant: "cancelling", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const fields = JSON.stringify({ name: "slow", upstream_url: `${upstream.url}` });
    const agent = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body: fields });
    const { id } = (await agent.json()) as { id: string };
    // A call that the page has not made is not offered.
    await fetch(`${gateway.url}/v1/proxy/${id}`, { method: "POST", headers, body: "{}" });
    await using visited = await visit(browser, `${gateway.url}/swagger`, { viewport: DESK });
    const { page } = visited;
    await authorize(page, token);
    const canceller = await opened(page, "POST", "/v1/proxy/{id}/invocations/{inv_id}/cancel");
    expect(await idIn(canceller, "inv_id").inputValue()).toBe("");
    const calls: string[] = [];
    const caller = await opened(page, "POST", "/v1/proxy/{id}");
    // Else each response would wait for the end of its call.
    await idIn(caller, "Prefer").fill("");
    for (const _ of [1, 2]) {
      await open(caller);
      calls.push((JSON.parse((await execute(caller)).body) as { invocation_id: string }).invocation_id);
    }
    expect([await idIn(canceller).inputValue(), await idIn(canceller, "inv_id").inputValue()]).toEqual([id, calls[1]!]);
    expect((await execute(canceller)).status).toBe("200");
    expect(await idIn(canceller, "inv_id").inputValue()).toBe(calls[0]!);
    held.resolve(new Response());
    await fetch(`${gateway.url}/v1/proxy/${id}/invocations/${calls[0]}`, {
      headers: { ...headers, prefer: "wait=10" },
    });
    await canceller.locator(".opblock-summary-control").click();
    await open(canceller);
    expect(await idIn(canceller, "inv_id").inputValue()).toBe("");
  });

  test("every response is shown and can be downloaded whole, and none holds the page", async () => {
    const many = (text: string, count: number) => text.repeat(count);
    const LINE = 199_000;
    const responses: [type: string, body: string][] = [
      ["text/plain", many("x", LINE)],
      ["application/xml", `${many("<a>", 5_000)}the bottom${many("</a>", 5_000)}`],
      ["text/plain", many("0123456789abcde\n", 2 ** 21)],
      ["text/html", `<!doctype html>${many("<b>bold</b>", 14_000)}`],
      ["application/json", `${many("[", 5_000)}"the bottom"${many("]", 5_000)}`],
      ["application/json", JSON.stringify(Array.from({ length: 30_000 }, (_, number) => ({ number, word: "long" })))],
      ["text/plain", `a${many("\u0300", 99_999)}`],
      ["text/plain", `a${many("\u0483", 99_999)}`],
      ["application/json", `{"a":{"b":["${many("[", 200)}"]}}`],
    ];
    const token = await gateway.token({ tenant: "heavy", user: "alice" });
    const answers = responses.map(
      ([type, body]) =>
        () =>
          new Response(body, { headers: { "content-type": type } }),
    );
    await using _agent = await startAgent(token, answers);
    const { page, complaints } = at(OTHER_HOST);
    complaints.length = 0;
    await authorize(page, token);
    const streamed = await opened(page, "POST", "/v1/proxy/{id}/stream");
    const live = streamed.locator(".live-responses-table .response-col_description");
    for (const [index, [, text]] of responses.entries()) {
      await open(streamed);
      await streamed.locator("textarea").fill(`${index}`);
      const { status, body: shown } = await execute(streamed);
      const isLight = index === responses.length - 1;
      // A browser takes seconds to lay out marks.
      const most = /^a\p{M}/u.test(text) ? 20_000 : 100_000;
      const expected = isLight ? JSON.stringify(JSON.parse(text), null, "  ") : text.slice(0, most);
      expect([index, status, shown.length, shown === expected]).toEqual([index, "200", expected.length, true]);
      const pre = live.locator(".highlight-code pre").first();
      // A word of its own is an element of its own where the text is highlighted.
      expect([index, (await pre.locator("span").count()) > 0]).toEqual([index, isLight]);
      const cut = `The first ${most.toLocaleString("en")} of ${text.length.toLocaleString("en")} characters. Download has all of them.`;
      expect([index, await live.locator(".highlight-code > p").allTextContents()]).toEqual([
        index,
        text.length > most ? [cut] : [],
      ]);
      if (isLight) continue;
      const [download] = await Promise.all([
        page.waitForEvent("download"),
        live.getByRole("button", { name: "Download" }).first().click(),
      ]);
      expect([index, (await Bun.file(await download.path()).text()) === text]).toEqual([index, true]);
    }
    expect((await execute(await opened(page, "GET", "/version"))).status).toBe("200");
    expect(complaints).toEqual([]);
    await closeAll(page);
  });

  test("a response that is no text is shown where the browser can, and can be downloaded whole", async () => {
    const bytes = Uint8Array.from({ length: 256 }, (_, byte) => byte);
    const longText = Buffer.alloc(32 * 1024 * 1024 + 1, "x");
    const width = "document.querySelector('.bytes img').naturalWidth";
    const duration = "document.querySelector('.bytes audio').duration";
    const files: [type: string, body: Uint8Array, said: string, file: string, shown: [string, number] | null][] = [
      ["image/png", LINE_OF_3000, "(image/png, 70 bytes)", "response.png", [width, 3_000]],
      ["audio/wav", SECOND_OF_SILENCE, "(audio/wav, 8,044 bytes)", "response.wav", [duration, 1]],
      ["application/octet-stream", bytes, "(application/octet-stream, 256 bytes)", "response.bin", null],
      ["application/vnd.android.package-archive", bytes, "package-archive, 256 bytes)", "response.bin", null],
      ["multipart/x-mixed-replace; boundary=x", bytes, "boundary=x, 256 bytes)", "response.bin", null],
      ["image/svg", bytes, "(image/svg, 256 bytes)", "response.bin", null],
      ["text/plain", longText, "(text/plain, 33,554,433 bytes)", "response.bin", null],
      ["", bytes.subarray(0, 1), "(no content type, 1 byte)", "response.bin", null],
    ];
    const scripted = `<svg xmlns="http://www.w3.org/2000/svg" width="40" onload="fetch('/ran')"><script>fetch("/ran")</script></svg>`;
    const ATTACK = "<script>fetch('/ran')</script>";
    const asFile = { "content-type": "text/html", "content-disposition": "attachment; filename=attachment.exe" };
    const others = {
      attachment: [ATTACK, asFile],
      transfer: [ATTACK, { "content-type": "text/plain", "content-description": "File Transfer" }],
      named: [LINE_OF_3000, { ...asFile, "content-type": "image/png" }],
      drawing: [scripted, { "content-type": "image/svg+xml" }],
      nothing: ["", { "content-type": "image/png" }],
      words: ["plain words", { "content-type": "application/octet-stream" }],
    } as const;
    const answers = [
      ...files.map(([type, body]) => [body, type === "" ? {} : { "content-type": type }] as const),
      ...Object.values(others),
    ];
    const token = await gateway.token({ tenant: "showing", user: "alice" });
    // The server would name a type for a body that it gets whole.
    const piece = async function* (body: string | Uint8Array) {
      yield Buffer.from(body);
    };
    const responses = answers.map(
      ([body, headers]) =>
        () =>
          new Response(piece(body), { headers }),
    );
    await using agent = await startAgent(token, responses);
    const { page, asked, strays, complaints } = at(OTHER_HOST);
    complaints.length = 0;
    await authorize(page, token);
    await page.evaluate(COUNT_OBJECT_URLS);
    const streamed = await opened(page, "POST", "/v1/proxy/{id}/stream");
    const live = streamed.locator(".live-responses-table .response .response-col_description");
    const get = async (index: number): Promise<string> => {
      await open(streamed);
      await streamed.locator("textarea").fill(`${index}`);
      expect([index, (await execute(streamed)).status]).toEqual([index, "200"]);
      return (await live.textContent()) ?? "";
    };
    const getOther = (name: keyof typeof others) => get(files.length + Object.keys(others).indexOf(name));
    const download = async () => {
      const link = live.getByRole("link", { name: "Download" });
      const [downloaded] = await Promise.all([page.waitForEvent("download"), link.click()]);
      return { file: downloaded.suggestedFilename(), body: await Bun.file(await downloaded.path()).bytes() };
    };

    await page.setViewportSize(PHONE);
    for (const [index, [, body, said, file, shown]] of files.entries()) {
      expect(await get(index)).toContain(said);
      if (shown !== null) await until(async () => (await page.evaluate<number>(shown[0])) === shown[1]);
      expect([index, await live.locator("img, audio, video").count()]).toEqual([index, shown === null ? 0 : 1]);
      expect([index, await download()]).toEqual([index, { file, body: new Uint8Array(body) }]);
      expect([index, await page.evaluate("document.documentElement.scrollWidth")]).toEqual([index, PHONE.width]);
      if (index > 0) continue;
      expect(await findings(page)).toEqual([]);
      await look(page, "dark");
      expect(await contrastFindings(page)).toEqual([]);
      await look(page, "light");
    }
    await page.setViewportSize(DESK);
    await streamed.getByRole("button", { name: "Clear" }).click();
    const FILE = "application/octet-stream";
    const made = ["image/png", "audio/wav", FILE, FILE, FILE, FILE, FILE, FILE];
    const counts = { made, revoked: files.length };
    await until(async () => Bun.deepEquals(await page.evaluate("objectUrls"), counts));

    expect(await getOther("drawing")).toContain(scripted);
    expect(await live.locator("img").count()).toBe(0);
    expect(await getOther("nothing")).not.toContain("Response body");
    expect(await getOther("words")).toContain("plain words");
    for (const name of ["attachment", "transfer"] as const) expect(await getOther(name)).toContain(ATTACK);
    // No text has a URL at which its script would run with the origin of the page.
    expect(await page.evaluate<object>("objectUrls")).toEqual(counts);
    await getOther("named");
    expect(await download()).toEqual({ file: "response.png", body: new Uint8Array(LINE_OF_3000) });
    expect([agent.calls(), asked.includes("/ran"), strays, complaints]).toEqual([answers.length, false, [], []]);
    await closeAll(page);
  });

  test("what an agent answers chooses no ID that the page fills in", async () => {
    const chosen = "agt_00000000-0000-7000-8000-000000000bad";
    using upstream = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => Response.json({ id: chosen }) });
    const token = await gateway.token({ tenant: "choosing", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const body = JSON.stringify({ name: "chooser", upstream_url: `${upstream.url}` });
    const made = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
    const { id } = (await made.json()) as { id: string };
    const { page } = at(OTHER_HOST);
    await authorize(page, token);
    const streamed = await opened(page, "POST", "/v1/proxy/{id}/stream");
    await idIn(streamed).fill(id);
    expect((await execute(streamed)).body).toContain(chosen);
    expect(await idIn(await opened(page, "DELETE", "/v1/agents/{id}")).inputValue()).not.toBe(chosen);
    await closeAll(page);
  });

  test("the page is dark where the system is, and follows it", async () => {
    const { page, complaints } = at(OTHER_HOST);
    complaints.length = 0;
    const ground = () => page.evaluate<string>("getComputedStyle(document.documentElement).backgroundColor");
    await look(page, "dark");
    expect(await ground()).toBe("rgb(28, 32, 34)");
    await look(page, "light");
    expect([await ground(), complaints]).toEqual(["rgba(0, 0, 0, 0)", []]);
  });

  test("the dialog says what to paste, keeps the keyboard's focus until it is closed, and axe finds nothing in it", async () => {
    const { page } = at(OTHER_HOST);
    const authorizeButton = page.locator(".auth-wrapper > .authorize");
    await authorizeButton.focus();
    await page.keyboard.press("Enter");
    const dialog = page.getByRole("dialog");
    const former = dialog.getByRole("button", { name: "Logout" });
    if ((await former.count()) > 0) await former.click();
    await dialog.getByRole("textbox").waitFor();
    const said = await dialog.textContent();
    expect(said).toContain("tollgate token --tenant acme --user me");
    expect(said).not.toContain("certificate");
    expect(await findings(page)).toEqual([]);
    await walk(page, dialog);
    await dialog.getByRole("textbox").fill(await gateway.token({ tenant: "keys", user: "alice" }));
    await page.keyboard.press("Enter");
    const logout = dialog.getByRole("button", { name: "Logout" });
    await logout.waitFor();
    await until(() => hasFocus(logout));
    expect(await findings(page)).toEqual([]);
    await page.keyboard.press("Escape");
    await dialog.waitFor({ state: "detached" });
    expect(await hasFocus(authorizeButton)).toBe(true);

    // Only the operation that needs a client certificate speaks of one.
    await page.locator('.opblock:has([data-path="/settle"]) .authorization__btn').click();
    expect(await dialog.textContent()).toMatch(/certificate .* nothing to enter/);
    await page.keyboard.press("Escape");
    await dialog.waitFor({ state: "detached" });
  });

  test("open operations fit on a phone and on a desk, by day and by night; axe finds nothing, and the keyboard reaches everything", async () => {
    const { page, complaints } = at(OTHER_HOST);
    // Some paste the word of the header along.
    await authorize(page, `Bearer ${await gateway.token({ tenant: "looking", user: "alice" })}`);
    expect((await execute(await opened(page, "GET", "/version"))).status).toBe("200");
    expect((await execute(await opened(page, "GET", "/v1/agents"))).status).toBe("200");
    await opened(page, "POST", "/v1/agents");
    await opened(page, "PATCH", "/v1/settlement/config");
    // The page has asked what is there, and the browser itself reports that nothing is.
    expect(complaints.splice(0)).toEqual([expect.stringContaining("404")]);
    const closed = page.locator('.opblock-put:has([data-path="/v1/policy"]) .opblock-summary-control');
    await closed.focus();
    await page.keyboard.press("Enter");
    const policy = page.locator('.opblock-put:has([data-path="/v1/policy"])');
    await policy.locator(".responses-wrapper").waitFor();
    await policy.locator("textarea").fill("{}");
    const executing = policy.getByRole("button", { name: "Execute" });
    await executing.focus();
    await page.keyboard.press("Enter");
    await page.getByRole("status").filter({ hasText: "Response 400" }).waitFor();
    await until(() => hasFocus(executing));
    expect(complaints.splice(0)).toEqual([expect.stringContaining("400")]);
    await opened(page, "DELETE", "/v1/agents/{id}");
    await opened(page, "POST", "/settle");
    for (const [viewport, colorScheme, other] of [
      [PHONE, "light", "dark"],
      [{ width: 1400, height: 1000 }, "dark", "light"],
    ] as const) {
      await page.setViewportSize(viewport);
      // Where all rules hold in one color scheme, the other one can break those of contrast alone.
      await look(page, other);
      expect([viewport.width, other, await contrastFindings(page)]).toEqual([viewport.width, other, []]);
      await look(page, colorScheme);
      expect(await page.evaluate<number>("document.documentElement.scrollWidth")).toBe(viewport.width);
      const found = await (viewport === PHONE ? findings : widthFindings)(page);
      expect([viewport.width, colorScheme, found]).toEqual([viewport.width, colorScheme, []]);
      await walk(page, page.locator("body"));
    }
    await look(page, "light");
    await page.setViewportSize(DESK);
    await closeAll(page);
  });

  test("the page shows the facilitator's endpoints, and lets only this gateway's own be tried", async () => {
    const { page, strays, complaints } = at(OTHER_HOST);
    const facilitator = page.locator('.opblock-tag-section:has(> [id="operations-tag-Facilitator"])');
    const paths = await facilitator
      .locator("[data-path]")
      .evaluateAll((found) => found.map((element) => element.getAttribute("data-path")));
    expect(paths).toEqual(["/settle", "/supported", "/healthz"]);
    const buttons: Record<string, number> = {};
    for (const path of ["/settle", "/supported", "/healthz"]) {
      const block = facilitator.locator(`.opblock:has([data-path="${path}"])`);
      await open(block);
      buttons[path] = await block.getByRole("button", { name: /^(Execute|Try it out)/ }).count();
    }
    expect(buttons).toEqual({ "/settle": 0, "/supported": 0, "/healthz": 1 });
    expect(await facilitator.textContent()).toContain("facilitator.example.com:8443");
    expect([strays, complaints]).toEqual([[], []]);
    await closeAll(page);
  });
});

describe("the document of the binary", () => {
  interface Operation {
    operationId: string;
    summary?: string;
    tags?: string[];
    security?: Record<string, string[]>[];
    parameters?: { name: string; in: string; description?: string; example?: unknown; schema?: Schema }[];
    requestBody?: { content: Record<string, Content> };
    responses: Record<string, Answer>;
  }
  interface Answer {
    description?: string;
    headers?: Record<string, { description?: string }>;
    content?: Record<string, Content>;
  }
  interface Schema {
    $ref?: string;
    type?: string | string[];
    pattern?: string;
    description?: string;
    properties?: Record<string, Schema>;
    anyOf?: Schema[];
    items?: Schema;
    additionalProperties?: Schema | boolean;
  }
  interface Content {
    schema?: Schema;
    example?: unknown;
    examples?: unknown;
  }
  interface Document {
    paths: Record<string, Record<string, Operation>>;
    components: { securitySchemes: Record<string, { scheme: string }>; schemas: Record<string, Schema> };
  }
  let document: Document;
  beforeAll(async () => {
    document = (await (await fetch(`${gateway.url}/swagger/json`)).json()) as Document;
  });

  test("is valid OpenAPI", async () => {
    const result = await new Validator().validate(structuredClone(document) as unknown as Record<string, unknown>);
    expect(result.errors ?? []).toEqual([]);
    expect(result.valid).toBe(true);
  });

  test("fills in bodies that make an agent and change it, and leave it one that takes calls", async () => {
    const token = await gateway.token({ tenant: "filled-in", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    let id = "";
    for (const [method, path, status] of [
      ["post", "/v1/agents", 201],
      ["patch", "/v1/agents/{id}", 200],
    ] as const) {
      const [content] = Object.values(document.paths[path]?.[method]?.requestBody?.content ?? {});
      const [first] = Object.values((content?.examples ?? {}) as Record<string, { value: unknown }>);
      const body = JSON.stringify(content?.example ?? first?.value);
      const response = await fetch(gateway.url + path.replace("{id}", id), { method, headers, body });
      expect([path, response.status]).toEqual([path, status]);
      const agent = (await response.json()) as { id: string };
      expect(agent).toMatchObject({ status: "active", suspended: false });
      id = agent.id;
    }
  });

  test("fills in an agent whose name those of the tour leave free, and speaks of the user of the tour", async () => {
    const documents = ["README.md", "src/gateway/manual/start.md", "src/gateway/manual/install.md"];
    const texts = await Promise.all(documents.map((path) => Bun.file(`${import.meta.dir}/../../${path}`).text()));
    const names = texts.flatMap((text) => [...text.matchAll(/"name": "([^"]+)"/g)].map(([, name]) => name));
    expect(names).toContain("echo");
    const content = document.paths["/v1/agents"]?.["post"]?.requestBody?.content["application/json"];
    const examples = Object.values(content?.examples as Record<string, { value: { name: string } }>);
    expect(examples.map(({ value }) => value.name).filter((name) => names.includes(name))).toEqual([]);
    const users = (text: string) => [...new Set(text.match(/(?<=token --tenant acme --user )\w+/g))];
    expect([users(texts.join()), users(JSON.stringify(document))]).toEqual([["me"], ["me"]]);
  });

  test("describes every operation completely", () => {
    const gaps: string[] = [];
    const names: string[] = [];
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        names.push(operation.operationId);
        gaps.push(...gapsOf(operation, guardOf(path)).map((gap) => `${method} ${path}: ${gap}`));
      }
    }
    expect(gaps).toEqual([]);
    expect(names.length).toBeGreaterThan(15);
    expect(new Set(names).size).toBe(names.length);
    expect(names.filter((name) => !/^[a-z]+([A-Z][a-z]*){0,3}$/.test(name))).toEqual([]);
    expect(names.filter((name) => /(A|An|The)(?=[A-Z]|$)/.test(name))).toEqual([]);
    expect(names).toEqual(
      expect.arrayContaining(["createAgent", "listAgents", "getAgent", "callAgent", "settlePayment"]),
    );
    expect(document.components.securitySchemes["bearer"]?.scheme).toBe("bearer");
  });

  test("gives for errors what the gateway answers to that operation", async () => {
    const token = await gateway.token({ tenant: "refused", user: "alice" });
    const ask = (method: string, path: string, body?: string, more = {}) =>
      fetch(gateway.url + path, {
        ...{ method: method.toUpperCase(), body: body ?? null },
        headers: { authorization: `Bearer ${token}`, "content-type": "application/json", ...more },
      });
    const pricing = { amount: "10000", asset: "USDC", network: "base", pay_to: `0x${"11".repeat(20)}` };
    const agent = async (fields: object) =>
      (await (await ask("post", "/v1/agents", JSON.stringify(fields))).json()) as { id: string };
    const upstream_url = "https://nothing.invalid/";
    const { id } = await agent({ name: "plain", upstream_url });
    const { id: priced } = await agent({ name: "priced", upstream_url, pricing });
    const key = { "idempotency-key": "one" };
    const called = await ask("post", `/v1/proxy/${id}`, "1", { ...key, prefer: "wait=10" });
    const { invocation_id } = (await called.json()) as { invocation_id: string };
    const none = (prefix: string) => `${prefix}_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f`;
    const asked: [method: string, path: string, at: string, body?: string, more?: object][] = [
      ["get", "/v1/credentials/{id}", none("cred")],
      ["delete", "/v1/credentials/{id}", none("cred")],
      ["get", "/v1/agents/{id}", none("agt")],
      ["get", "/v1/invocations/{id}", none("inv")],
      ["get", "/v1/proxy/{id}/invocations/{inv_id}", `${id} ${none("inv")}`],
      ["get", "/v1/settlement/config", ""],
      ["get", "/v1/invocations?limit=x", ""],
      ["post", "/v1/agents", "", "{}"],
      ["post", "/v1/credentials", "", "{}"],
      ["put", "/v1/policy", "", "{}"],
      ["post", "/v1/policy/evaluate", "", "{}"],
      ["patch", "/v1/agents/{id}", id, "[]"],
      ["post", "/v1/proxy/{id}", id, "2", key],
      ["post", "/v1/proxy/{id}", id, "x".repeat(32 * 1024 ** 2 + 1)],
      ["post", "/v1/proxy/{id}", id, "2", { "x-payment": "a", "payment-signature": "a" }],
      ["post", "/v1/proxy/{id}/invocations/{inv_id}/cancel", `${id} ${invocation_id}`],
      ["get", "/v1/proxy/{id}/stream", id],
      ["post", "/v1/proxy/{id}/stream", priced, "2"],
    ];
    const wrong: unknown[] = [];
    for (const [method, path, ids, body, more] of asked) {
      const left = ids.split(" ");
      const response = await ask(
        method,
        path.replaceAll(/\{\w+\}/g, () => left.shift() ?? ""),
        body,
        more,
      );
      const content = document.paths[path.replace(/\?.*/, "")]?.[method]?.responses[response.status]?.content;
      const { example, examples = {} } = content?.["application/json"] ?? {};
      const [first] = Object.values(examples as Record<string, { value: unknown }>);
      const { error } = (await response.json()) as { error: string };
      const said = (example ?? first?.value) as { error: string } | undefined;
      if (said?.error !== error) wrong.push([method, path, response.status, error, said?.error]);
    }
    expect(wrong).toEqual([]);
    const text = JSON.stringify(document.paths["/v1/credentials/{id}"]);
    expect([text.includes("already in use"), text.includes("in use by")]).toEqual([false, true]);
  });

  test("describes every field of every schema, every parameter and every header", () => {
    expect(undescribed(document)).toEqual([]);
    const planted = structuredClone(document);
    delete planted.components.schemas["Agent"]?.properties?.["suspended"]?.description;
    expect(undescribed(planted)).toEqual(["Agent.suspended"]);
  });

  test("gives the bounds of lists, texts and IDs", () => {
    const parametersOf = (path: string) => document.paths[path]?.["get"]?.parameters ?? [];
    for (const path of ["/v1/agents", "/v1/invocations", "/v1/receipts"]) {
      const found = Object.fromEntries(parametersOf(path).map(({ name, schema }) => [name, schema]));
      expect(found).toMatchObject({
        limit: { type: "integer", minimum: 1, maximum: 100, default: 20 },
        offset: { type: "integer", minimum: 0, default: 0 },
      });
    }
    const [id] = parametersOf("/v1/agents/{id}");
    expect(new RegExp(id?.schema?.pattern ?? "").test("agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f")).toBe(true);
    const { AgentCreate, CredentialCreate } = document.components.schemas;
    expect(AgentCreate?.properties).toMatchObject({
      name: { minLength: 1, maxLength: 128 },
      tags: { maxItems: 32, items: { minLength: 1, maxLength: 64 } },
      description: { maxLength: 4096 },
      upstream_url: { format: "uri", type: ["string", "null"] },
    });
    expect(CredentialCreate?.properties).toMatchObject({ plaintext: { maxLength: 65_536 } });
    expect(JSON.stringify(document)).not.toContain('"x-');
  });

  /** Where a description is missing. */
  function undescribed({ paths, components: { schemas } }: Document): string[] {
    const resolved = (schema: Schema): Schema =>
      schema.$ref ? (schemas[schema.$ref.split("/").at(-1) ?? ""] ?? {}) : schema;
    const isDescribed = (schema: Schema): boolean => Boolean(schema.description ?? resolved(schema).description);
    const gaps: string[] = [];
    const walk = (schema: Schema | boolean | undefined, where: string): void => {
      if (typeof schema !== "object") return;
      for (const [name, field] of Object.entries(schema.properties ?? {})) {
        if (!isDescribed(field)) gaps.push(`${where}.${name}`);
        walk(field, `${where}.${name}`);
      }
      for (const inner of [...(schema.anyOf ?? []), schema.items, schema.additionalProperties]) walk(inner, where);
    };
    for (const [name, schema] of Object.entries(schemas)) walk(schema, name);
    for (const [path, methods] of Object.entries(paths)) {
      for (const [method, { parameters = [], requestBody, responses }] of Object.entries(methods)) {
        const where = `${method} ${path}`;
        for (const { name, description } of parameters) if (!description) gaps.push(`${where} ${name}`);
        for (const [status, { description, headers = {} }] of Object.entries(responses)) {
          if (!description) gaps.push(`${where} ${status}`);
          for (const [name, header] of Object.entries(headers))
            if (!header.description) gaps.push(`${where} ${status} ${name}`);
        }
        const contents = [requestBody?.content, ...Object.values(responses).map(({ content }) => content)];
        for (const { schema } of contents.flatMap((content) => Object.values(content ?? {}))) walk(schema, where);
      }
    }
    return gaps;
  }

  function guardOf(path: string): "bearer" | "clientCertificate" | null {
    if (path === "/settle") return "clientCertificate";
    return path.startsWith("/v1/") ? "bearer" : null;
  }

  function gapsOf(operation: Operation, guard: ReturnType<typeof guardOf>): string[] {
    const gaps: string[] = [];
    const need = (there: unknown, what: string) => void (there || gaps.push(`no ${what}`));
    need(operation.summary, "summary");
    need(operation.tags?.length, "tag");
    need(Object.keys(operation.security?.[0] ?? {})[0] === (guard ?? undefined), "right security");
    for (const { name, in: place, description, example } of operation.parameters ?? []) {
      need(description, `description of ${name}`);
      // The page fills it in, and nobody has what it names.
      need(place !== "path" || example === undefined, `field of ${name} that is empty`);
    }
    const statuses = Object.keys(operation.responses);
    need(
      statuses.some((status) => status.startsWith("2")),
      "success",
    );
    for (const status of guard === "bearer" ? ["401", "500"] : ["500"]) need(statuses.includes(status), status);
    const contents = Object.entries(operation.responses).map(([status, { content }]) => [status, content] as const);
    for (const [where, content] of [["request", operation.requestBody?.content] as const, ...contents]) {
      for (const [type, { schema, example, examples }] of Object.entries(content ?? {})) {
        need(schema, `schema of ${where} ${type}`);
        need(example ?? examples, `example of ${where} ${type}`);
      }
    }
    return gaps;
  }
});
