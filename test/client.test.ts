// The typed client of the manual's page on clients: its types are generated from the OpenAPI document that the binary serves, it
// compiles under the strict rules of this project, and it makes a call.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { manifest, pages, ROOT } from "./support/documentation.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { temporaryRoot } from "./support/gateway/process.ts";

const page = pages.get("clients");
const blockOf = (info: string) => page?.blocks.find((block) => block.info === info);

/** Behind the page's lines: what the compiler must refuse, and the other shapes of the document. */
const MORE = `
import type { components, operations } from "./api.js";
const wanted: operations["createAgent"]["requestBody"]["content"]["application/json"] = { name: "made" };
// @ts-expect-error no such field
const misspelt: components["schemas"]["AgentCreate"] = { name: "made", upstream: "" };
// @ts-expect-error no such status
await client.GET("/v1/agents", { params: { query: { status: misspelt.name } } });
const made = await client.POST("/v1/agents", { body: wanted });
if (made.data === undefined) throw new Error(JSON.stringify(made.error));
const agent: components["schemas"]["Agent"] = made.data;
const status: "pending" | "running" | "succeeded" | "failed" = poll.data.status;
const listed = await client.GET("/v1/agents", { params: { query: { limit: 1, status: "pending" } } });
const total: number | undefined = listed.data?.total;
console.log(JSON.stringify({ created_by: agent.created_by, status, total }));
`;

const CONFIG = {
  compilerOptions: {
    strict: true,
    noUncheckedIndexedAccess: true,
    exactOptionalPropertyTypes: true,
    noEmit: true,
    skipLibCheck: true,
    module: "preserve",
    target: "esnext",
    types: ["bun"],
  },
  include: ["*.ts"],
};

let gateway: Gateway;
let folder: string;
beforeAll(async () => {
  gateway = await startGateway();
  folder = mkdtempSync(join(temporaryRoot(), "client-"));
});
afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true, force: true });
});

async function run(command: readonly string[], env: Record<string, string> = {}) {
  const child = Bun.spawn([...command], {
    cwd: folder,
    env: { ...(process.env as Record<string, string>), ...env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { code, stdout, stderr };
}

/** The packages that the page installs, as they are here. The generator prints the syntax trees of TypeScript 5, so it has that compiler beside it. */
function install(): void {
  const [from, to] = [join(ROOT, "node_modules"), join(folder, "node_modules")];
  mkdirSync(to);
  for (const name of readdirSync(from)) {
    if (name === "openapi-typescript") cpSync(join(from, name), join(to, name), { recursive: true });
    else symlinkSync(join(from, name === "typescript" ? "typescript-5" : name), join(to, name));
  }
}

test("the page's client is generated from the document, compiles under strict rules, and makes and polls a call", async () => {
  install();
  const [installing = "", generating = ""] = blockOf("sh types")?.text.split("\n") ?? [];
  const { "typescript-5": typescript = "", ...versions } = manifest.devDependencies;
  const named = ["openapi-fetch", "openapi-typescript"].map((name) => `${name}@${versions[name]}`).join(" ");
  expect(installing).toBe(`npm install ${named} ${typescript.replace("npm:", "")}`);
  const generator = generating.replace("npx openapi-typescript", "node_modules/openapi-typescript/bin/cli.js");
  const program = Bun.which("node") ?? process.execPath;
  const generated = await run(["sh", "-ec", `"${program}" ${generator}`], { GATEWAY: gateway.url });
  expect([generated.code, generated.stderr]).toEqual([0, ""]);

  const client = blockOf("ts client.ts");
  writeFileSync(join(folder, "client.ts"), `${client?.text}`);
  writeFileSync(join(folder, "more.ts"), `${client?.text}${MORE}`);
  writeFileSync(join(folder, "tsconfig.json"), JSON.stringify(CONFIG));
  expect(await run([process.execPath, join(ROOT, "node_modules/typescript/bin/tsc"), "-p", "."])).toEqual({
    code: 0,
    stdout: "",
    stderr: "",
  });

  using upstream = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    fetch: async (request) => new Response(await request.text()),
  });
  const TOKEN = await gateway.token({ tenant: "generated", user: "alice" });
  const created = await fetch(new URL("/v1/agents", gateway.url), {
    method: "POST",
    headers: { authorization: `Bearer ${TOKEN}`, "content-type": "application/json" },
    body: JSON.stringify({ name: "echo", upstream_url: `${upstream.url}` }),
  });
  const { id: AGENT } = (await created.json()) as { id: string };
  const { code, stdout, stderr } = await run([process.execPath, "more.ts"], { GATEWAY: gateway.url, TOKEN, AGENT });
  expect([code, stderr]).toEqual([0, ""]);
  const [shown = "", more = ""] = stdout.split("\n");
  expect(shown).toBe(page?.blocks[page.blocks.indexOf(client as never) + 1]?.text.trim() ?? "");
  expect(JSON.parse(more)).toEqual({ created_by: "alice", status: "succeeded", total: 1 });
});
