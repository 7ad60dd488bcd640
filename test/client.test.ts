// A client made from the OpenAPI document that the binary serves: its types compile under the strict rules of this project, and
// it makes a call.
import { afterAll, beforeAll, expect, mock, test } from "bun:test";
import { mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { temporaryRoot } from "./support/gateway/process.ts";

// The generator prints the syntax trees of TypeScript 5, and the native compiler of the project has none.
mock.module("typescript", () => import("typescript-5"));

const ROOT = join(import.meta.dir, "..");

const CLIENT = `import createClient from "openapi-fetch";
import type { components, operations, paths } from "./api.ts";

const [url = "", token = "", upstream = ""] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { authorization: \`Bearer \${token}\` } });

const wanted: operations["createAgent"]["requestBody"]["content"]["application/json"] = { name: "made", upstream_url: upstream };
// @ts-expect-error no such field
const misspelt: components["schemas"]["AgentCreate"] = { name: "made", upstream: "" };
// @ts-expect-error no such status
await client.GET("/v1/agents", { params: { query: { status: misspelt.name } } });

const made = await client.POST("/v1/agents", { body: wanted });
if (made.data === undefined) throw new Error(JSON.stringify(made.error));
const agent: components["schemas"]["Agent"] = made.data;
const path = { id: agent.id };
const accepted = await client.POST("/v1/proxy/{id}", {
  params: { path, header: { Prefer: "wait=30" } },
  body: { question: "how much?" },
});
if (accepted.data === undefined) throw new Error(JSON.stringify(accepted.error));
const inv_id: string = accepted.data.invocation_id;
const polled = await client.GET("/v1/proxy/{id}/invocations/{inv_id}", {
  params: { path: { ...path, inv_id }, header: { Prefer: "wait=30" } },
});
const status: "pending" | "running" | "succeeded" | "failed" | undefined = polled.data?.status;
const listed = await client.GET("/v1/agents", { params: { query: { limit: 1, status: "active" } } });
const total: number | undefined = listed.data?.total;
const body = atob(polled.data?.response_body_b64 ?? "");
console.log(JSON.stringify({ created_by: agent.created_by, status, total, body }));
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
    allowImportingTsExtensions: true,
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

async function run(...args: string[]) {
  const child = Bun.spawn([process.execPath, ...args], {
    cwd: folder,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { code, stdout, stderr };
}

test("a client that is generated from the document compiles under strict rules, and makes and polls a call", async () => {
  const { astToString, default: generate } = await import("openapi-typescript");
  const types = astToString(await generate(new URL("/swagger/json", gateway.url)));
  symlinkSync(join(ROOT, "node_modules"), join(folder, "node_modules"));
  writeFileSync(join(folder, "api.ts"), types);
  writeFileSync(join(folder, "client.ts"), CLIENT);
  writeFileSync(join(folder, "tsconfig.json"), JSON.stringify(CONFIG));
  expect(await run(join(ROOT, "node_modules/typescript/bin/tsc"), "-p", ".")).toEqual({
    code: 0,
    stdout: "",
    stderr: "",
  });

  using upstream = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    fetch: async (request) => new Response(await request.text()),
  });
  const token = await gateway.token({ tenant: "generated", user: "alice" });
  const { code, stdout, stderr } = await run("client.ts", gateway.url, token, `${upstream.url}`);
  expect([code, stderr]).toEqual([0, ""]);
  const body = '{"question":"how much?"}';
  expect(JSON.parse(stdout)).toEqual({ created_by: "alice", status: "succeeded", total: 1, body });
});
