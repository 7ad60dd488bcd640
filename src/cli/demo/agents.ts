// The two services behind the demo's gateway: a plain HTTP one that stamps a text, and an MCP server with two tools,
// as small as streamable HTTP allows: JSON answers, no sessions, no streams. What they answer is computed, not canned.
import { createHash } from "node:crypto";
import { systemClock } from "../../core/clock.ts";
import { json, STATUS, SUCCESS } from "../../http/answers.ts";
import { at } from "./http.ts";

/** The demo sends only small bodies, and nobody else knows these servers. */
const BODY_BYTES_MAX = 64 * 1024;

/** Answers with the hash of what it is sent, and when. */
export function startNotary() {
  return serve("/stamp", async (request) => {
    const body = await request.bytes();
    const sha256 = createHash("sha256").update(body).digest("hex");
    return json("ok", {
      sha256,
      bytes: body.length,
      stamped_at: new Date(systemClock.now()).toISOString(),
    });
  });
}

export function startCalculator() {
  return serve("/mcp", async (request) => {
    const message: unknown = await request.json().catch(() => null);
    const id = at(message, "id");
    // A notification is taken, and never answered (streamable HTTP, "Sending Messages to the Server").
    if (id === undefined) return new Response(null, { status: SUCCESS.accepted });
    return json("ok", { jsonrpc: "2.0", id, ...answer(at(message, "method"), at(message, "params")) });
  });
}

function serve(path: string, post: (request: Request) => Promise<Response>) {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false,
    reusePort: false,
    maxRequestBodySize: BODY_BYTES_MAX,
    routes: { [path]: { POST: post } },
    fetch: () => new Response(null, { status: STATUS.method_not_allowed }),
  });
  return { url: `http://127.0.0.1:${server.port}${path}`, stop: () => server.stop(true) };
}

const PROTOCOL_VERSION = "2025-11-25";
/** Codes of JSON-RPC 2.0, section 5.1. */
const METHOD_NOT_FOUND = -32_601;
const INVALID_PARAMS = -32_602;
/** The largest whose factors are found at once. */
const NUMBER_MAX = 1_000_000_000_000;

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

function answer(method: unknown, params: unknown): object {
  switch (method) {
    case "initialize":
      return {
        result: {
          protocolVersion: PROTOCOL_VERSION,
          capabilities: { tools: {} },
          serverInfo: { name: "calculator", version: "1" },
        },
      };
    case "ping":
      return { result: {} };
    case "tools/list":
      return { result: { tools: TOOLS } };
    case "tools/call":
      return callTool(at(params, "name"), at(params, "arguments"));
    default:
      return refusal(METHOD_NOT_FOUND, "no such method");
  }
}

function callTool(name: unknown, args: unknown): object {
  if (name === "add") {
    const [a, b] = [whole(at(args, "a")), whole(at(args, "b"))];
    return a === null || b === null ? refusal(INVALID_PARAMS, WHOLE) : said(`${a} + ${b} = ${a + b}`);
  }
  if (name !== "factorize") return refusal(INVALID_PARAMS, "no such tool");
  const found = whole(at(args, "number"));
  if (found === null || found < 2) return refusal(INVALID_PARAMS, WHOLE);
  return said(`${found} = ${primeFactors(found).join(" × ")}`);
}

const WHOLE = `whole numbers up to ${NUMBER_MAX} only`;

function said(text: string): object {
  return { result: { content: [{ type: "text", text }] } };
}

function refusal(code: number, message: string): object {
  return { error: { code, message } };
}

function whole(value: unknown): number | null {
  return typeof value === "number" && Number.isInteger(value) && Math.abs(value) <= NUMBER_MAX ? value : null;
}

function primeFactors(number: number): number[] {
  const factors: number[] = [];
  let rest = number;
  for (let divisor = 2; divisor * divisor <= rest; divisor++) {
    for (; rest % divisor === 0; rest /= divisor) factors.push(divisor);
  }
  return rest > 1 ? [...factors, rest] : factors;
}
