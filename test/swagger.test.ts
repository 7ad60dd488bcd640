// Swagger UI as a developer uses it: a real browser opens the page that the compiled binary serves, authorizes,
// and executes an operation. Nothing it does may reach for another machine.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Validator } from "@seriousme/openapi-schema-validator";
import { type Browser, chromium, type Page } from "playwright-core";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { until } from "./support/until.ts";

/** Another name that leads to the gateway: pages behave differently where the host is not local. */
const OTHER_HOST = "tollgate.test";
const UI_MS_MAX = 15_000;
const executablePath = Bun.which("chromium");

let gateway: Gateway;
beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway?.[Symbol.asyncDispose]());

interface Visit extends AsyncDisposable {
  readonly page: Page;
  /** Requests to anything but the gateway. */
  readonly strays: string[];
  readonly complaints: string[];
}

const DESK = { width: 1280, height: 1600 };

async function visit(browser: Browser, origin: string, path = "/swagger", viewport = DESK): Promise<Visit> {
  const context = await browser.newContext({ viewport });
  context.setDefaultTimeout(UI_MS_MAX);
  const [strays, complaints]: [string[], string[]] = [[], []];
  context.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(`${origin}/`) && !url.startsWith("data:")) strays.push(url);
  });
  context.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  const page = await context.newPage();
  page.on("pageerror", (error) => complaints.push(String(error)));
  await page.goto(`${origin}${path}`);
  if (path === "/swagger") await page.locator(".opblock").first().waitFor();
  return { page, strays, complaints, [Symbol.asyncDispose]: () => context.close() };
}

async function authorize(page: Page, token: string): Promise<void> {
  await page.getByRole("button", { name: "Authorize" }).first().click();
  const dialog = page.locator(".dialog-ux");
  await dialog.getByRole("textbox").fill(token);
  await dialog.getByRole("button", { name: "Apply credentials" }).click();
  await dialog.getByRole("button", { name: "Close" }).last().click();
}

/** Executes an operation just as the page offers it, with the example for its body. */
async function execute(page: Page, method: string, path: string): Promise<{ status: string; body: string }> {
  const block = page.locator(`.opblock-${method.toLowerCase()}:has([data-path="${path}"])`);
  await block.locator(".opblock-summary-control").click();
  await block.getByRole("button", { name: "Execute" }).click();
  const live = block.locator(".live-responses-table .response");
  const status = (await live.locator(".response-col_status").textContent()) ?? "";
  const shown = await live.locator(".response-col_description .highlight-code code").allTextContents();
  return { status, body: shown[0] ?? "" };
}

const browserSuite = executablePath === null ? describe.skip : describe;
const reason = executablePath === null ? " (skipped: no chromium on the PATH; apt-get install chromium)" : "";

browserSuite(`the page in a browser${reason}`, () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await chromium.launch({
      executablePath: executablePath ?? "",
      args: [
        ...["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"],
        ...["--disable-component-update", "--disable-sync", "--no-first-run", "--no-proxy-server"],
        `--host-resolver-rules=MAP ${OTHER_HOST} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1`,
      ],
    });
  });
  afterAll(() => browser?.close());

  for (const host of ["127.0.0.1", OTHER_HOST]) {
    test(`at ${host} the page loads from the gateway alone, authorizes and creates an agent`, async () => {
      const origin = gateway.url.replace("127.0.0.1", host);
      await using visited = await visit(browser, origin);
      const { page, strays, complaints } = visited;
      expect(await page.locator(".info .title").textContent()).toContain("tollgate");

      const refused = await execute(page, "GET", "/v1/agents");
      expect(refused.status).toStartWith("401");
      // The browser itself reports a failed request, and that one was meant to fail.
      expect(complaints.splice(0)).toEqual([expect.stringContaining("401")]);

      await authorize(page, await gateway.token({ tenant: host, user: "alice" }));
      const made = await execute(page, "POST", "/v1/agents");
      expect(made.status).toStartWith("201");
      expect(JSON.parse(made.body)).toMatchObject({
        id: expect.stringMatching(/^agt_/),
        created_by: "alice",
      });

      expect(strays).toEqual([]);
      expect(complaints).toEqual([]);
    });
  }

  test("an operation asks for the ID that it needs, and receipts are shown line by line", async () => {
    const token = await gateway.token({ tenant: "receipts", user: "alice" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json", prefer: "wait=10" };
    const ask = async (path: string, body?: object) => {
      const init = body && { method: "POST", body: JSON.stringify(body) };
      return (await fetch(`${gateway.url}${path}`, { headers, ...init })).text();
    };
    using upstream = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response("done") });
    const fields = { name: "receipted", upstream_url: `${upstream.url}`, emit_receipts: true };
    const { id } = JSON.parse(await ask("/v1/agents", fields));
    for (const _ of [1, 2]) {
      const { invocation_id } = JSON.parse(await ask(`/v1/proxy/${id}`, {}));
      await ask(`/v1/proxy/${id}/invocations/${invocation_id}`);
    }
    let lines = "";
    await until(async () => {
      lines = await ask("/v1/receipts");
      return lines.split("\n").length === 3;
    });

    await using visited = await visit(browser, gateway.url);
    const { page, strays, complaints } = visited;
    await authorize(page, token);
    const { status, body } = await execute(page, "GET", "/v1/receipts");
    expect([status.slice(0, 3), body.trim()]).toEqual(["200", lines.trim()]);

    const sent: string[] = [];
    page.on("request", (request) => sent.push(...(request.url().match(/\/v1\/.*/) ?? [])));
    const block = page.locator('.opblock-get:has([data-path="/v1/agents/{id}"])');
    await block.locator(".opblock-summary-control").click();
    await block.getByRole("button", { name: "Execute" }).click();
    await block.locator("input.invalid").waitFor();
    expect([sent, strays, complaints]).toEqual([[], [], []]);
  });

  test("the page shows the facilitator's endpoints, and lets only this gateway's own be tried", async () => {
    await using visited = await visit(browser, gateway.url);
    const { page } = visited;
    const facilitator = page.locator('.opblock-tag-section:has(> [id="operations-tag-Facilitator"])');
    const paths = await facilitator
      .locator("[data-path]")
      .evaluateAll((found) => found.map((element) => element.getAttribute("data-path")));
    expect(paths).toEqual(["/settle", "/supported", "/healthz"]);
    const buttons: Record<string, number> = {};
    for (const path of ["/settle", "/supported", "/healthz"]) {
      const block = facilitator.locator(`.opblock:has([data-path="${path}"])`);
      await block.locator(".opblock-summary-control").click();
      await block.locator(".responses-wrapper").waitFor();
      buttons[path] = await block.getByRole("button", { name: /^(Execute|Try it out)/ }).count();
    }
    expect(buttons).toEqual({ "/settle": 0, "/supported": 0, "/healthz": 1 });
    expect(await facilitator.textContent()).toContain("facilitator.example.com:8443");
    expect([visited.strays, visited.complaints]).toEqual([[], []]);
  });
});

describe("the document of the binary", () => {
  interface Operation {
    operationId: string;
    summary?: string;
    tags?: string[];
    security?: Record<string, string[]>[];
    parameters?: { name: string; in: string; description?: string; example?: unknown }[];
    requestBody?: { content: Record<string, Content> };
    responses: Record<string, { description?: string; content?: Record<string, Content> }>;
  }
  interface Content {
    schema?: unknown;
    example?: unknown;
    examples?: unknown;
  }
  interface Document {
    paths: Record<string, Record<string, Operation>>;
    components: { securitySchemes: Record<string, { scheme: string }> };
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
    expect(names.filter((name) => !/^[a-z][A-Za-z0-9]+$/.test(name))).toEqual([]);
    expect(document.components.securitySchemes["bearer"]?.scheme).toBe("bearer");
  });

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
