import { describe, expect, test } from "bun:test";
import { fresh, MCP, outcome, PRICING, UNKNOWN_AGENT, useCatalog } from "../../../test/support/stores/catalog.ts";

const { send, create, made } = useCatalog();

describe("creating an agent", () => {
  test("an agent of a name only is pending and has the defaults", async () => {
    const { status, body } = await create({ name: "  plain\t" });
    expect(status).toBe(201);
    expect(body).toEqual({
      id: expect.stringMatching(/^agt_[0-9a-f]{8}-[0-9a-f]{4}-7/),
      name: "plain",
      description: "",
      tags: null,
      metadata: {},
      status: "pending",
      suspended: false,
      created_by: "alice",
      created_at: expect.stringMatching(/^2026-\d\d-\d\dT.*Z$/),
      updated_at: body.created_at,
      upstream_url: null,
      credential_ref: null,
      invocation_rate_limit: null,
      invocation_burst: null,
      emit_receipts: false,
      capture_body: true,
      protocol: "http",
      mcp_transport: null,
      mcp_protocol_version: null,
      pricing: null,
    });
    expect((await send("GET", `/v1/agents/${body.id}`)).body).toEqual(body);
  });

  test("an agent comes back with every field as it was sent", async () => {
    const fields = {
      description: "two\nlines and \u{1f99c}",
      tags: ["a", "b, c", '"', "a"],
      metadata: { n: [1.5, null, { "": "\u0000\ud800", __proto__x: 1 }] },
      upstream_url: "https://bücher.example:8443/a?b=c",
      emit_receipts: true,
      capture_body: false,
      ...MCP,
      mcp_protocol_version: "2025-06-18",
      pricing: { ...PRICING, tools: { search: "5", constructor: "0" } },
    };
    const body = await made(fields);
    expect(body).toMatchObject({ ...fields, status: "active" });
    expect((await send("GET", `/v1/agents/${body.id}`)).body).toEqual(body);
  });

  test("a metadata key named __proto__ is a key like any other", async () => {
    const { text } = await send("POST", "/v1/agents", `{"name":"proto","metadata":{"__proto__":{"a":1}}}`);
    expect(text).toContain('"metadata":{"__proto__":{"a":1}}');
  });

  test("null is as good as absent for what may be null", async () => {
    const nulls = {
      tags: null,
      upstream_url: null,
      credential_ref: null,
      mcp_transport: null,
      mcp_protocol_version: null,
      pricing: null,
    };
    expect(await made(nulls)).toMatchObject({ ...nulls, status: "pending" });
  });

  test("fields of text are counted in code points, up to their bounds", async () => {
    const fields = {
      name: "\u{1f99c}".repeat(128),
      description: "\u{1f99c}".repeat(4096),
      tags: Array.from({ length: 32 }, () => "\u{1f99c}".repeat(64)),
      metadata: { a: "x".repeat(16 * 1024 - '{"a":""}'.length) },
    };
    expect((await create(fields)).status).toBe(201);
  });

  const refused: [string, object | string, string][] = [
    ["no name", {}, "name: required"],
    ["a blank name", { name: " \n " }, "name: must not be empty"],
    ["a name too long", { name: "\u{1f99c}".repeat(129) }, "name: must be at most 128 characters"],
    ["a control character", { name: "a\tb" }, "name: must not contain control characters"],
    ["a C1 control character", { name: "a\u0085" }, "name: must not contain control characters"],
    ["U+0000 in the name", { name: "a\0b" }, "name: must not contain U+0000"],
    ["a lone surrogate", { name: "a\ud800" }, "name: must not contain lone surrogates"],
    ["a null name", { name: null }, "name: expected string"],
    ["a null description", fresh({ description: null }), "description: expected string"],
    ["U+0000 in the description", fresh({ description: "\0" }), "description: must not contain U+0000"],
    [
      "a description too long",
      fresh({ description: "x".repeat(4097) }),
      "description: must be at most 4096 characters",
    ],
    ["too many tags", fresh({ tags: Array(33).fill("x") }), "tags: must be at most 32"],
    ["an empty tag", fresh({ tags: ["x", ""] }), "tags.1: must not be empty"],
    ["a long tag", fresh({ tags: ["x".repeat(65)] }), "tags.0: must be at most 64 characters"],
    ["a tag that is no text", fresh({ tags: ["x", 1] }), "tags.1: expected string"],
    ["U+0000 in a tag", fresh({ tags: ["\0"] }), "tags.0: must not contain U+0000"],
    ["metadata that is no object", fresh({ metadata: [] }), "metadata: must be a JSON object"],
    ["null metadata", fresh({ metadata: null }), "metadata: must be a JSON object"],
    [
      "metadata too large",
      fresh({ metadata: { a: "ä".repeat(8192) } }),
      "metadata: must be at most 16384 bytes as JSON",
    ],
    ["a URL that is none", fresh({ upstream_url: "nope" }), "upstream_url: must be an http or https URL with a host"],
    ["an empty URL", fresh({ upstream_url: "" }), "upstream_url: must be an http or https URL with a host"],
    [
      "a local URL",
      fresh({ upstream_url: "http://127.1:8000" }),
      "upstream_url: must not name localhost or a loopback, private, link-local or other local address",
    ],
    [
      "a control character in the URL",
      fresh({ upstream_url: "http://a.example/\u0085" }),
      "upstream_url: must not contain control characters",
    ],
    [
      "an unknown credential",
      fresh({ credential_ref: UNKNOWN_AGENT }),
      "credential_ref: names no credential of this tenant",
    ],
    ["a credential of no form", fresh({ credential_ref: "\0" }), "credential_ref: names no credential of this tenant"],
    ["a protocol of its own", fresh({ protocol: "ftp" }), "protocol: must be http or mcp"],
    ["a null protocol", fresh({ protocol: null }), "protocol: must be http or mcp"],
    ["mcp without a transport", fresh({ protocol: "mcp" }), "mcp_transport: required when protocol is mcp"],
    [
      "mcp with a null transport",
      fresh({ protocol: "mcp", mcp_transport: null }),
      "mcp_transport: required when protocol is mcp",
    ],
    ["another transport", fresh({ ...MCP, mcp_transport: "sse" }), "mcp_transport: must be streamable_http or null"],
    [
      "a transport with http",
      fresh({ mcp_transport: "streamable_http" }),
      "mcp_transport: must be absent or null when protocol is http",
    ],
    [
      "a version that can't be a header",
      fresh({ ...MCP, mcp_protocol_version: "a\r\nb" }),
      "mcp_protocol_version: must be 1 to 64 visible ASCII characters",
    ],
    ["a flag that is text", fresh({ capture_body: "yes" }), "capture_body: expected boolean"],
    ["a field of PATCH", fresh({ suspended: true }), "suspended: unknown field"],
    ["another field of PATCH", fresh({ invocation_burst: 1 }), "invocation_burst: unknown field"],
    ["an immutable field", fresh({ id: UNKNOWN_AGENT }), "id: unknown field"],
    ["a key twice", '{"name":"a","name":"b"}', "name: given twice"],
    ["an array", "[]", "body: must be a JSON object"],
    ["pricing of no form", fresh({ pricing: "1" }), "pricing: must be a pricing object or null"],
    ["pricing without a payee", fresh({ pricing: { ...PRICING, pay_to: undefined } }), "pricing.pay_to: required"],
    ["an unknown key in pricing", fresh({ pricing: { ...PRICING, fee: "1" } }), "pricing.fee: unknown field"],
    ["another asset", fresh({ pricing: { ...PRICING, asset: "usdc" } }), "pricing.asset: must be USDC"],
    ["another network", fresh({ pricing: { ...PRICING, network: "base-sepolia" } }), "pricing.network: must be base"],
    [
      "an address with a line break",
      fresh({ pricing: { ...PRICING, pay_to: `${PRICING.pay_to}\n` } }),
      "pricing.pay_to: must be an address of 0x and 40 hexadecimal digits",
    ],
    ...["", "-1", "1.0", "1e3", "0x1", " 1", "1\n", "٣", "9".repeat(79)].map((amount): [string, object, string] => [
      `the amount ${JSON.stringify(amount)}`,
      fresh({ pricing: { ...PRICING, amount } }),
      "pricing.amount: must be a decimal string of at most 78 digits",
    ]),
    [
      "a numeric amount",
      fresh({ pricing: { ...PRICING, amount: 5 } }),
      "pricing.amount: must be a decimal string of at most 78 digits",
    ],
    [
      "an amount of more than 256 bits",
      fresh({ pricing: { ...PRICING, amount: String(2n ** 256n) } }),
      "pricing.amount: must fit into 256 bits",
    ],
    [
      "tool prices with http",
      fresh({ pricing: { ...PRICING, tools: {} } }),
      "pricing.tools: only possible when protocol is mcp",
    ],
    [
      "a tool price of no form",
      fresh({ ...MCP, pricing: { ...PRICING, tools: { "a\nb": 5 } } }),
      "pricing.tools.a\nb: must be a decimal string of at most 78 digits",
    ],
    [
      "a tool name with a control character",
      fresh({ ...MCP, pricing: { ...PRICING, tools: { "a\nb": "5" } } }),
      "pricing.tools: must not contain control characters",
    ],
    [
      "a tool price beyond 256 bits",
      fresh({ ...MCP, pricing: { ...PRICING, tools: { t: String(2n ** 256n) } } }),
      "pricing.tools.t: must fit into 256 bits",
    ],
    [
      "null tools",
      fresh({ ...MCP, pricing: { ...PRICING, tools: null } }),
      "pricing.tools: must be an object of tool names and prices",
    ],
  ];
  test.each(refused)("refuses %s", async (_what, body, error) => {
    expect(outcome(await send("POST", "/v1/agents", body))).toEqual([400, error]);
  });

  test("a host that the operator exempted is taken", async () => {
    expect((await made({ upstream_url: "http://10.1.2.3/x" })).upstream_url).toBe("http://10.1.2.3/x");
  });

  test("of concurrent creates of one name exactly one succeeds", async () => {
    const answers = await Promise.all(Array.from({ length: 20 }, () => create({ name: "contested" })));
    expect(answers.filter(({ status }) => status === 201)).toHaveLength(1);
    expect(answers.filter(({ status }) => status === 409)).toHaveLength(19);
    expect(answers.find(({ status }) => status === 409)?.body).toEqual({
      error: "name: already used by another agent",
    });
  });

  test("a name is taken per tenant, after trimming, and minds case", async () => {
    await made({ name: "taken" });
    expect((await create({ name: " taken " })).status).toBe(409);
    expect((await create({ name: "Taken" })).status).toBe(201);
    expect((await create({ name: "taken" }, "other")).status).toBe(201);
  });
});
