// What is judged of an MCP message is what its server reads, whatever the server's decoder makes of odd keys and names:
// where one that folds case, ends texts at U+0000 or takes off blanks would read another tool, the message is refused.
import { describe, expect, test } from "bun:test";
import { contract, expectError, MCP, PRICING, type Seen } from "./contract.ts";

const message = (members: string) => `{"jsonrpc":"2.0","id":1,${members}}`;
const call = (params: string) => message(`"method":"tools/call","params":{${params}}`);

/** Each would run the tool `dear` on some server, and says what is wrong with it. */
const TRICKS: ReadonlyArray<readonly [trick: string, body: string, field: string]> = [
  ["a key in other letters", call('"name":"cheap","Name":"dear"'), "params.name"],
  ["a key that folds to it", message('"method":"ping","method\\u0000":"tools/call","params":{}'), "method"],
  ["a key that ends early", call('"name":"cheap","name\\u0000":"dear"'), "params.name"],
  ["a key that is escaped, and ends early", call('"name":"cheap","\\u006eame\\u0000x":"dear"'), "params.name"],
  ["a key given twice", call('"name":"cheap","name":"dear"'), "params.name"],
  ["other params", message('"method":"tools/call","params":{"name":"cheap"},"PARAMS":{"name":"dear"}'), "params"],
  [
    "params that end early",
    message('"method":"tools/call","params":{"name":"cheap"},"params\\u0000":{"name":"dear"}'),
    "params",
  ],
  ["other arguments", call('"name":"cheap","arguments":{},"Arguments":{"tool":"dear"}'), "params.arguments"],
  ["arguments twice", call('"name":"cheap","arguments":{},"arguments":{"tool":"dear"}'), "params.arguments"],
  ["a method in other letters", message('"method":"Tools/Call","params":{"name":"dear"}'), "method"],
  ["a method with a blank", message('"method":"tools/call ","params":{"name":"dear"}'), "method"],
  ["a method that ends early", message('"method":"tools/call\\u0000/list","params":{"name":"dear"}'), "method"],
  ["a name with a blank behind it", call('"name":"dear "'), "params.name"],
  ["a name with a tab before it", call('"name":"\\tdear"'), "params.name"],
  ["a name with a no-break space", call('"name":"\\u00a0dear"'), "params.name"],
  ["a name that ends early", call('"name":"dear\\u0000x"'), "params.name"],
  ["a name with half a character", call('"name":"dear\\ud800"'), "params.name"],
  ["a version in other letters", call('"name":"cheap","_Meta":{}'), "params._meta"],
  [
    "two versions",
    call(
      '"name":"cheap","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/ProtocolVersion":"2025-11-25"}',
    ),
    "params._meta",
  ],
];

const answer = ({ body }: Seen) =>
  Response.json({ jsonrpc: "2.0", id: JSON.parse(new TextDecoder().decode(body)).id ?? null, result: {} });

contract((at) => {
  async function guarded() {
    const route = at.upstream(answer);
    const tenant = at.tenant();
    const rules = [{ action: "deny", match: { tools: ["dear"] } }];
    await tenant.send("PUT", "/v1/policy", { json: { default: "allow", on_error: "deny", rules } });
    const pricing = { ...PRICING, amount: "0", tools: { dear: "1000" } };
    const { id } = await tenant.agent({ ...MCP, upstream_url: route.url, pricing });
    return { route, tenant, path: `/v1/proxy/${id}` };
  }

  describe.each([
    ["polled", ""],
    ["streamed", "/stream"],
  ])("a %s call", (_name, suffix) => {
    test.each(TRICKS)("is refused with %s, and leaves nothing", async (_trick, body, field) => {
      const { route, tenant, path } = await guarded();
      const headers = { "content-type": "application/json", "mcp-protocol-version": "2026-07-28" };
      expectError(await tenant.send("POST", `${path}${suffix}`, { body, headers }), 400, field);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
      expect((await tenant.send("GET", "/v1/policy/decisions")).body.data).toEqual([]);
      expect(route.seen).toEqual([]);
    });

    test("is judged by the name that its JSON means, and sent byte for byte", async () => {
      const { route, tenant, path } = await guarded();
      const headers = { "content-type": "application/json", "mcp-protocol-version": "2026-07-28" };
      const denied = call('"\\u006eame":"\\u0064ear"');
      expect((await tenant.send("POST", `${path}${suffix}`, { body: denied, headers })).status).toBe(403);
      const passing = call('"n\\u0061me" : "\\u0063heap","names":"dear","arguments":{"name":"dear","Name":1}');
      const passed = await tenant.send("POST", `${path}${suffix}`, { body: passing, headers });
      expect(passed.status).toBe(suffix === "" ? 202 : 200);
      expect(new TextDecoder().decode((await route.arrival()).body)).toBe(passing);
      expect((await tenant.send("GET", "/v1/policy/decisions")).body.data).toMatchObject([
        { mcp_tool: "cheap", action: "allow" },
        { mcp_tool: "dear", action: "deny" },
      ]);
    });
  });
});
