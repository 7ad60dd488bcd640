// The servers of the demo, apart from the chain: the facilitator and the gateway, each configured as an operator would, with
// variables, `tollgate pki` and `tollgate account`, and with a data directory of its own; and the two upstreams behind the
// gateway, whose responses are computed, not canned.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Hex } from "viem";
import { type Config, loadConfig } from "../../config.ts";
import type { Log } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import { ListenProblem } from "../../core/startup.ts";
import { systemClock } from "../../core/time.ts";
import { startFacilitator } from "../../facilitator/start.ts";
import { startGateway } from "../../gateway/start.ts";
import { json, STATUS, SUCCESS } from "../../http/responses.ts";
import { addNewAccount } from "../account.ts";
import { prepareMasterKeys } from "../open.ts";
import { runPki } from "../pki.ts";
import { mintToken } from "../token.ts";
import { DemoProblem } from "./chain.ts";

const HOST = "127.0.0.1";
/** The name of the facilitator's account, and in the certificate of its client. */
const CLIENT = "gateway";

export async function makeCertificates(dir: string) {
  await runPki({ dir, wanted: { kind: "ca" } });
  await runPki({ dir, wanted: { kind: "server", hosts: [HOST, "localhost"] } });
  await runPki({ dir, wanted: { kind: "client", name: CLIENT } });
  return {
    ofFacilitator: {
      TOLLGATE_TLS_CERT_FILE: join(dir, "server.crt"),
      TOLLGATE_TLS_KEY_FILE: join(dir, "server.key"),
      TOLLGATE_CLIENT_CA_FILE: join(dir, "ca.crt"),
    },
    client: readFileSync(join(dir, `${CLIENT}.crt`), "utf8"),
    /** The gateway's client certificate and key, and the facilitator's CA, as PEM. */
    bundle: readFileSync(join(dir, `${CLIENT}.pem`), "utf8"),
  };
}

/** @param signerKey the private key of the wallet that pays for gas */
export async function startDemoFacilitator(
  dir: string,
  { ofFacilitator, client }: Awaited<ReturnType<typeof makeCertificates>>,
  rpcUrl: string,
  signerKey: Hex,
  log: Log,
) {
  const own = { TOLLGATE_DATA_DIR: dir, TOLLGATE_RPC_URLS: rpcUrl, TOLLGATE_SIGNER_KEY: signerKey };
  const config = configure("facilitator", { ...own, ...ofFacilitator });
  if (config.facilitator === null) throw new DemoProblem("the facilitator is not configured");
  await addNewAccount(config, { name: CLIENT, certificate: client, maxPerTransaction: null, dailyCeiling: null }, log);
  try {
    return await startFacilitator(config.facilitator, log, silentMeters);
  } catch (error) {
    if (!(error instanceof ListenProblem)) throw error;
    // Another process has one of the usual ports.
    return startFacilitator({ ...config.facilitator, port: 0, openPort: 0 }, log, silentMeters);
  }
}

export async function startDemoGateway(dir: string, log: Log) {
  // The sample agents and the facilitator are on this machine, which the host rules would refuse.
  const config = configure("gateway", { TOLLGATE_DATA_DIR: dir, TOLLGATE_ALLOW_HOSTS: HOST });
  const { keys } = prepareMasterKeys(config, log);
  const { url, stop } = await startGateway({ ...config, orFreePort: true }, keys, log, silentMeters);
  const request = { tenant: "demo", user: "you", scope: "invocations:read_body", ttlSeconds: 12 * 3600 };
  return { url, stop, mintToken: () => mintToken(config, request, log) };
}

/** Loads a configuration from these variables alone, not from the environment of the demo's process. */
function configure(mode: "gateway" | "facilitator", variables: Readonly<Record<string, string>>): Config {
  // No call of the demo takes longer than a second, and after Ctrl-C nobody waits for it anyway.
  const all = { TOLLGATE_MODE: mode, TOLLGATE_HOST: HOST, TOLLGATE_DRAIN_MS: "1000", ...variables };
  const { config, problems } = loadConfig("serve", new Map(), all, false);
  if (config === null) throw new DemoProblem(problems.join("; "));
  return config;
}

/** An HTTP server that answers with the SHA-256 of the body that it is sent, and the time. */
export function startNotary() {
  return serve("/stamp", async (request) => {
    const body = await request.bytes();
    const sha256 = createHash("sha256").update(body).digest("hex");
    return json("ok", { sha256, bytes: body.length, stamped_at: new Date(systemClock.now()).toISOString() });
  });
}

interface McpMessage {
  readonly id?: unknown;
  readonly method?: string;
  readonly params?: { readonly name?: string; readonly arguments?: Readonly<Record<string, unknown>> };
}

/** An MCP server with two tools, as small as streamable HTTP allows: JSON responses, no sessions, no streams. */
export function startCalculator() {
  return serve("/mcp", async (request) => {
    const message = (await request.json()) as McpMessage;
    // A notification is accepted without a response (MCP, streamable HTTP, "Sending Messages to the Server").
    if (message.id === undefined) return new Response(null, { status: SUCCESS.accepted });
    return json("ok", { jsonrpc: "2.0", id: message.id, ...answerTo(message) });
  });
}

function serve(path: string, post: (request: Request) => Promise<Response>) {
  const server = Bun.serve({
    hostname: HOST,
    port: 0,
    development: false,
    reusePort: false,
    // The demo sends only small bodies, and nobody else calls these servers.
    maxRequestBodySize: 64 * 1024,
    routes: { [path]: { POST: post } },
    fetch: () => new Response(null, { status: STATUS.method_not_allowed }),
  });
  return { url: `http://${HOST}:${server.port}${path}`, stop: () => server.stop(true) };
}

const number = { type: "integer" } as const;

const TOOLS = [
  {
    name: "add",
    description: "The sum of two whole numbers.",
    inputSchema: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] },
  },
  {
    name: "factorize",
    description: "The prime factors of a whole number.",
    inputSchema: { type: "object", properties: { number }, required: ["number"] },
  },
];

function answerTo({ method, params }: McpMessage): object {
  switch (method) {
    case "initialize": {
      const serverInfo = { name: "calculator", version: "1" };
      return { result: { protocolVersion: "2025-11-25", capabilities: { tools: {} }, serverInfo } };
    }
    case "tools/list":
      return { result: { tools: TOOLS } };
    case "tools/call": {
      const text = textOf(params?.name, params?.arguments ?? {});
      // The codes are those of JSON-RPC 2.0, section 5.1.
      if (text === null) return { error: { code: -32_602, message: `unknown tool, or a number above ${NUMBER_MAX}` } };
      return { result: { content: [{ type: "text", text }] } };
    }
    default:
      return { error: { code: -32_601, message: "method not found" } };
  }
}

/** The text that a tool returns; null for an unknown tool or wrong arguments. */
function textOf(tool: string | undefined, args: Readonly<Record<string, unknown>>): string | null {
  const { a, b, number } = args;
  if (tool === "add" && isWhole(a) && isWhole(b)) return `${a} + ${b} = ${a + b}`;
  if (tool === "factorize" && isWhole(number) && number > 1) return `${number} = ${primeFactors(number).join(" × ")}`;
  return null;
}

/** The largest number that is factorized at once, without a noticeable wait. */
const NUMBER_MAX = 1_000_000_000_000;

const isWhole = (value: unknown): value is number =>
  typeof value === "number" && Number.isInteger(value) && Math.abs(value) <= NUMBER_MAX;

function primeFactors(number: number): number[] {
  const factors: number[] = [];
  let rest = number;
  for (let divisor = 2; divisor * divisor <= rest; divisor++) {
    for (; rest % divisor === 0; rest /= divisor) factors.push(divisor);
  }
  return rest > 1 ? [...factors, rest] : factors;
}
