// Whatever a tenant sends, the event loop goes on: the product's own watch tells of every pause, and none of them was
// spent on a caller's body.
import { expect, test } from "bun:test";
import { startGateway } from "./support/gateway/gateway.ts";
import { computedPauses } from "./support/gateway/pauses.ts";
import { startUpstream } from "./support/http/upstream.ts";

const MIB = 1024 * 1024;
/** A body of 32 MiB in one piece took twice this. */
const WRITTEN_MS_MAX = 50;
/** Several times what a step takes, and a fraction of what a body would take in one piece. */
const COMPUTED_MS_MAX = 100;

function filled(start: string, item: (at: number) => string, end: string, size: number): string {
  const parts: string[] = [];
  for (let [at, length] = [0, start.length + end.length]; ; at++) {
    const next = item(at);
    length += next.length + 1;
    if (length > size) return `${start}${parts.join()}${end}`;
    parts.push(next);
  }
}

const MANAGEMENT = [
  filled("{", (at) => `"${at}":1`, "}", MIB),
  filled('{"name":"x","metadata":{', () => '"a":{"b":[]}', "}}", MIB),
  filled('{"name":"x","metadata":{"a":[', () => "[[[]]]", "]}}", MIB),
  filled('{"name":"x","tags":[', () => "1", "]}", MIB),
  filled('{"name":"x","tags":[', () => "{}", "]}", MIB),
  `{"a":${" ".repeat(MIB - 100)}1}`,
  `{"a":${"-".repeat(MIB - 100)}}`,
  `{"name":"${"\\u0061".repeat(170_000)}"}`,
];

const CALL = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","arguments":';
const MESSAGES = [
  filled(`${CALL}{`, (at) => `"n${at % 1000}":1`, "}}}", 32 * MIB),
  filled(`${CALL}[`, () => "[[[[]]]]", "]}}", 32 * MIB),
  `${CALL}"${"\\n".repeat(15 * MIB)}"}}`,
  `${CALL}${" ".repeat(31 * MIB)}1}}`,
  filled("[", () => filled(`${CALL}[`, () => "1", "]}}", MIB), "]", 32 * MIB),
];

test("no body of a caller holds the event loop", async () => {
  const answer = new Uint8Array(MIB).fill(0x78);
  const upstream = startUpstream(async (request) => {
    await request.bytes();
    return new URL(request.url).pathname === "/large" ? new Response(answer) : Response.json({});
  });
  try {
    await using gateway = await startGateway({ env: { TOLLGATE_BLOCKED_MS: "20" } });
    const headers = {
      authorization: `Bearer ${await gateway.token({ tenant: "t", user: "u" })}`,
      "content-type": "application/json",
    };
    const post = (path: string, body: string, more: Record<string, string> = {}) =>
      fetch(`${gateway.url}${path}`, { method: "POST", headers: { ...headers, ...more }, body });
    const register = async (agent: object) => {
      const response = await post("/v1/agents", JSON.stringify(agent));
      return ((await response.json()) as { id: string }).id;
    };

    for (const body of MANAGEMENT) {
      const answers = await Promise.all(Array.from({ length: 20 }, () => post("/v1/agents", body)));
      for (const { status } of answers) expect([201, 400, 409]).toContain(status);
    }

    const mcp = { protocol: "mcp", mcp_transport: "streamable_http", upstream_url: upstream.url };
    const tools = await register({ name: "tools", ...mcp, emit_receipts: true });
    for (const body of MESSAGES) {
      const streamed = await post(`/v1/proxy/${tools}/stream`, body, {
        "idempotency-key": crypto.randomUUID(),
      });
      expect(streamed.status).toBe(200);
      await streamed.bytes();
    }

    // A worker that makes the call reads the body once more.
    for (const body of MESSAGES.slice(0, 2)) {
      const made = await post(`/v1/proxy/${tools}`, body, { prefer: "wait=60" });
      const response = await fetch(`${gateway.url}${made.headers.get("location")}`, { headers });
      expect(((await response.json()) as { status: string }).status).toBe("succeeded");
    }

    // By then every pause so far is told.
    await Bun.sleep(1_100);
    const told = gateway.log().length;
    const plain = await register({ name: "plain", upstream_url: upstream.url });
    const body = "x".repeat(32 * MIB);
    const accepted = await Promise.all(Array.from({ length: 3 }, () => post(`/v1/proxy/${plain}`, body)));
    expect(accepted.map(({ status }) => status)).toEqual([202, 202, 202]);
    await Bun.sleep(1_100);
    const writes = computedPauses(gateway.log().slice(told), WRITTEN_MS_MAX);
    expect(writes.filter(({ thread }) => thread === "main")).toEqual([]);

    const large = await register({ name: "large", upstream_url: `${upstream.url}large` });
    const called = await post(`/v1/proxy/${large}`, "{}", { prefer: "wait=30" });
    const poll = async () => {
      const response = await fetch(`${gateway.url}${called.headers.get("location")}`, { headers });
      const { response_body_b64: body } = (await response.json()) as { response_body_b64: string };
      return body.length;
    };
    const polled = await Promise.all(Array.from({ length: 40 }, poll));
    expect(new Set(polled)).toEqual(new Set([Math.ceil(MIB / 3) * 4]));

    // What is left to tell is told at the end.
    await gateway.stop();
    expect(computedPauses(gateway.log(), COMPUTED_MS_MAX)).toEqual([]);
  } finally {
    await upstream.stop();
  }
}, 120_000);
