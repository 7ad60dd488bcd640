// A tenant that writes the policy and owns the upstream can make its `tools/list` as dear as it likes: long, with many
// tools, and with rules that say the same of each of them. It keeps nobody else waiting.
import { expect, test } from "bun:test";
import { startGateway } from "../support/gateway/gateway.ts";
import { longestWait } from "../support/gateway/longest-wait.ts";
import { startUpstream } from "../support/http/upstream.ts";

const MIB = 1024 * 1024;
/** Of the time that an answer takes. What is filtered in one go holds up all others for most of it. */
const WAIT_SHARE_MAX = 1 / 3;
/** On a busy machine anybody waits so long. */
const WAIT_MS_LEAST = 100;

const rule = (action: string, max_body_bytes: number) => ({ action, match: { max_body_bytes } });
/** To tell that no size of call gets through, or that one does, each rule is compared with all before it. */
const POLICY = {
  default: "allow",
  on_error: "deny",
  rules: [...Array(249).fill(rule("deny", 1e12)), rule("deny", 1e6), ...Array(250).fill(rule("warn", 1e6))],
};

const list = (tools: string) => `{"jsonrpc":"2.0","id":1,"result":{"tools":[${tools}]}}`;
const manyTools = list(Array.from({ length: 10_000 }, (_, at) => `{"name":"tool_${at}"}`).join(","));
const largeTool = list(
  `{"name":"t","a":[${Array(5 * MIB)
    .fill("[]")
    .join(",")}]}`,
);
const manyLines = `data: ${list('{"name":"t","a":[').slice(0, -3)}\n${"data: 1,\n".repeat(MIB)}data: 1]}]}}\n\n`;

test("nobody waits while lists of tools are filtered", async () => {
  let answer: readonly [string, string] = ["", ""];
  const upstream = startUpstream(() => new Response(answer[0], { headers: { "content-type": answer[1] } }));
  try {
    await using gateway = await startGateway();
    const token = await gateway.token({ tenant: "hostile", user: "mallory" });
    const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
    const send = async (method: string, path: string, body: object) => {
      const response = await fetch(`${gateway.url}${path}`, { method, headers, body: JSON.stringify(body) });
      return { status: response.status, text: await response.text() };
    };
    const mcp = { protocol: "mcp", mcp_transport: "streamable_http", upstream_url: upstream.url };
    const { id } = JSON.parse((await send("POST", "/v1/agents", { name: "tools", ...mcp })).text);
    expect((await send("PUT", "/v1/policy", POLICY)).status).toBe(200);

    for (const [text, type, times] of [
      // In one go, with each rule compared for each tool, it took half a minute.
      [manyTools, "application/json", 16],
      [largeTool, "application/json", 1],
      [manyLines, "text/event-stream", 1],
    ] as const) {
      answer = [text, type];
      const startedAt = performance.now();
      const call = { jsonrpc: "2.0", id: 1, method: "tools/list" };
      const lists = Promise.all(Array.from({ length: times }, () => send("POST", `/v1/proxy/${id}/stream`, call)));
      const longest = await longestWait(gateway, lists);
      // Before an event stream that begins with silence a comment comes.
      for (const { text: got } of await lists) expect(got.endsWith(text)).toBe(true);
      const took = performance.now() - startedAt;
      expect(longest).toBeLessThan(Math.max(WAIT_MS_LEAST, WAIT_SHARE_MAX * took));
    }
  } finally {
    await upstream.stop();
  }
}, 120_000);
