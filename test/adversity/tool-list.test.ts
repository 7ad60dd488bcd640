// A tenant that writes the policy and owns the upstream can make its `tools/list` as dear as it likes: long, with many
// tools, and with rules that say the same of each of them. It keeps nobody else waiting.
import { expect, test } from "bun:test";
import { startGateway } from "../support/gateway/gateway.ts";
import { computedPauses } from "../support/gateway/pauses.ts";
import { startUpstream } from "../support/http/upstream.ts";

const MIB = 1024 * 1024;
/** Of the event loop in one piece: several times what a step takes. What is filtered in one go computes for 150 to 300. */
const COMPUTED_MS_MAX = 100;

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
    await using gateway = await startGateway({ env: { TOLLGATE_BLOCKED_MS: "20" } });
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
      // In one go, with each rule compared for each tool, one list took two seconds.
      [manyTools, "application/json", 3],
      [largeTool, "application/json", 1],
      [manyLines, "text/event-stream", 1],
    ] as const) {
      answer = [text, type];
      const call = { jsonrpc: "2.0", id: 1, method: "tools/list" };
      const lists = Promise.all(Array.from({ length: times }, () => send("POST", `/v1/proxy/${id}/stream`, call)));
      // Before an event stream that begins with silence a comment comes.
      for (const { text: got } of await lists) expect(got.endsWith(text)).toBe(true);
    }
    // What is left to tell is told at the end.
    await gateway.stop();
    expect(computedPauses(gateway.log(), COMPUTED_MS_MAX)).toEqual([]);
  } finally {
    await upstream.stop();
  }
}, 120_000);
