import { beforeAll, describe, expect, test } from "bun:test";
import {
  fresh,
  MCP,
  outcome,
  PRICING,
  UNKNOWN_AGENT,
  UPSTREAM_URL,
  useCatalog,
} from "../../../test/support/stores/catalog.ts";
import { unavailable } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { findAgent } from "./store.ts";

const { catalog, send, create, made } = useCatalog();

describe("changing an agent", () => {
  const patch = (id: string, body: unknown, tenant?: string) => send("PATCH", `/v1/agents/${id}`, body, tenant);

  test("an absent key leaves a field, null clears it, a value sets it", async () => {
    const agent = await made({ upstream_url: UPSTREAM_URL, tags: ["x"], pricing: PRICING, description: "d" });
    const set = await patch(agent.id, {
      name: " renamed ",
      suspended: true,
      invocation_rate_limit: 0.5,
      invocation_burst: 3,
      emit_receipts: true,
      capture_body: false,
      mcp_protocol_version: "v",
    });
    const expected = {
      ...agent,
      name: "renamed",
      suspended: true,
      invocation_rate_limit: 0.5,
      invocation_burst: 3,
      emit_receipts: true,
      capture_body: false,
      mcp_protocol_version: "v",
      updated_at: set.body.updated_at,
    };
    expect(set.body).toEqual(expected);
    expect(set.body.updated_at > agent.updated_at).toBe(true);
    const cleared = await patch(agent.id, {
      upstream_url: null,
      pricing: null,
      invocation_rate_limit: null,
      invocation_burst: null,
      mcp_protocol_version: null,
    });
    expect(cleared.body).toEqual({
      ...expected,
      status: "pending",
      upstream_url: null,
      pricing: null,
      invocation_rate_limit: null,
      invocation_burst: null,
      mcp_protocol_version: null,
      updated_at: cleared.body.updated_at,
    });
    expect((await patch(agent.id, { upstream_url: UPSTREAM_URL })).body.status).toBe("active");
    expect((await patch(agent.id, { tags: [], metadata: {}, description: "" })).body).toMatchObject({
      tags: [],
      metadata: {},
      description: "",
    });
  });

  test.each([
    [Number.MAX_VALUE, Number.MAX_SAFE_INTEGER],
    [5e-324, 1],
    [0.1, 20],
  ])("a rate of %p and a burst of %p come back as they are", async (rate, burst) => {
    const { id } = await made();
    await patch(id, `{"invocation_rate_limit":${rate.toExponential()},"invocation_burst":${burst}}`);
    expect((await send("GET", `/v1/agents/${id}`)).body).toMatchObject({
      invocation_rate_limit: rate,
      invocation_burst: burst,
    });
  });

  test("what is durable is told as done, though nothing can be read from then on (by a stand-in for a store that goes away)", async () => {
    const { store } = catalog();
    const { read, write } = store;
    let isAway = false;
    const orAway = () => {
      if (isAway) throw unavailable(new Error("away"));
      return read;
    };
    const thenAway: Store["write"] = (work, options) =>
      write(work, options).finally(() => {
        isAway = true;
      });
    Object.defineProperties(store, {
      read: { get: orAway, configurable: true },
      write: { value: thenAway, configurable: true },
    });
    try {
      const created = await send("POST", "/v1/agents", fresh());
      expect([created.status, isAway]).toEqual([201, true]);
      const changed = await patch(created.body.id, { description: "d" });
      expect([changed.status, changed.body.description]).toEqual([200, "d"]);
      expect((await send("GET", `/v1/agents/${created.body.id}`)).status).toBe(503);
    } finally {
      Object.defineProperties(store, { read: { value: read }, write: { value: write } });
    }
  });

  test("a PATCH without fields changes nothing", async () => {
    const agent = await made();
    expect((await patch(agent.id, {})).body).toEqual(agent);
  });

  test("a change is judged by the combination that results", async () => {
    const agent = await made();
    const steps: [object, number, string?][] = [
      [{ protocol: "mcp" }, 400, "mcp_transport: must be streamable_http when protocol is mcp"],
      [{ mcp_transport: "streamable_http" }, 400, "mcp_transport: must be absent or null when protocol is http"],
      [{ pricing: { ...PRICING, tools: { t: "1" } } }, 400, "pricing.tools: only possible when protocol is mcp"],
      [{ ...MCP, pricing: { ...PRICING, tools: { t: "1" } } }, 200],
      [{ mcp_transport: null }, 400, "mcp_transport: must be streamable_http when protocol is mcp"],
      [{ protocol: "http" }, 400, "mcp_transport: must be absent or null when protocol is http"],
      [{ protocol: "http", mcp_transport: null }, 400, "pricing.tools: only possible when protocol is mcp"],
      [{ protocol: "http", mcp_transport: null, pricing: PRICING }, 200],
    ];
    for (const [body, status, error] of steps) {
      expect(outcome(await patch(agent.id, body))).toEqual([status, error]);
    }
  });

  const PATCHED_FIELDS =
    "unknown field; known here: name, tags, description, metadata, upstream_url, credential_ref, emit_receipts, capture_body, protocol, mcp_transport, mcp_protocol_version, pricing, suspended, invocation_rate_limit, invocation_burst";
  test.each([
    ["id", UNKNOWN_AGENT, "is read-only"],
    ["status", "active", "is read-only: it follows from upstream_url, and a DELETE makes it inactive"],
    ["created_by", "bob", "is read-only"],
    ["created_at", "2026-01-01T00:00:00Z", "is read-only"],
    ["updated_at", "2026-01-01T00:00:00Z", "is read-only"],
    ["rate_revision", 1, PATCHED_FIELDS],
    ["tenant", "x", PATCHED_FIELDS],
  ])("a PATCH of the key %s is refused", async (key, value, problem) => {
    const agent = await made();
    expect(outcome(await patch(agent.id, { [key]: value }))).toEqual([400, `${key}: ${problem}`]);
  });

  test.each([
    [{ name: "" }, "name: must not be empty"],
    [{ name: null }, "name: must be a string"],
    [{ tags: null }, "tags: must be an array of strings"],
    [{ suspended: null }, "suspended: must be true or false"],
    [{ invocation_rate_limit: 0 }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_rate_limit: -1 }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_rate_limit: "1" }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_burst: 0 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ invocation_burst: 1.5 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ invocation_burst: 1e20 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ credential_ref: UNKNOWN_AGENT }, "credential_ref: names no credential of this tenant"],
    [
      { upstream_url: "http://localhost/" },
      "upstream_url: is a private or local address; the operator can allow it with TOLLGATE_ALLOW_HOSTS",
    ],
  ])("a PATCH of %j is refused and changes nothing", async (body, error) => {
    const agent = await made({ upstream_url: UPSTREAM_URL });
    const sent = JSON.stringify(body).replace("100000000000000000000", "1e20");
    expect(outcome(await patch(agent.id, sent))).toEqual([400, error]);
    expect((await send("GET", `/v1/agents/${agent.id}`)).body).toEqual(agent);
  });

  test("another live agent's name is a conflict, its own is not", async () => {
    const [first, second] = [await made(), await made()];
    expect(outcome(await patch(second.id, { name: first.name }))).toEqual([409, "name: already used by another agent"]);
    expect((await patch(second.id, { name: second.name })).status).toBe(200);
  });

  test("concurrent changes are made one after the other", async () => {
    const agent = await made({ ...MCP });
    const answers = await Promise.all([
      patch(agent.id, { protocol: "http", mcp_transport: null }),
      patch(agent.id, { pricing: { ...PRICING, tools: { t: "1" } } }),
    ]);
    expect(answers.map(({ status }) => status).sort()).toEqual([200, 400]);
  });

  test("each PATCH of the rate fields is a new revision, also with the same values", async () => {
    const agent = await made();
    const revision = async () => (await findAgent(catalog().store, "acme", agent.id))?.rate_revision;
    await patch(agent.id, { description: "x" });
    expect(await revision()).toBe(0);
    await patch(agent.id, { invocation_rate_limit: 5 });
    await patch(agent.id, { invocation_rate_limit: 5 });
    expect(await revision()).toBe(2);
    await patch(agent.id, { invocation_burst: null });
    expect(await revision()).toBe(3);
  });
});

describe("deleting an agent", () => {
  test("a deleted agent is inactive for good, its name is free, and deleting it again is fine", async () => {
    const agent = await made({ upstream_url: UPSTREAM_URL });
    const path = `/v1/agents/${agent.id}`;
    expect(await send("DELETE", path)).toEqual({ status: 204, text: "", body: undefined });
    const kept = await send("GET", path);
    expect(kept.body).toEqual({ ...agent, status: "inactive", updated_at: kept.body.updated_at });
    expect((await send("DELETE", path)).status).toBe(204);
    expect(outcome(await send("PATCH", path, { upstream_url: UPSTREAM_URL }))).toEqual([404, "no such agent"]);
    expect((await create({ name: agent.name })).status).toBe(201);
    expect(await findAgent(catalog().store, "acme", agent.id)).toMatchObject({
      deleted_at: expect.any(Number),
    });
  });
});

describe("another tenant's agent", () => {
  test("is answered byte for byte like an unknown ID, and stays as it is; a malformed one is told where IDs are", async () => {
    const agent = await made({}, "other");
    const answers = async (id: string) => [
      await send("GET", `/v1/agents/${id}`),
      await send("PATCH", `/v1/agents/${id}`, { description: "x" }),
      await send("DELETE", `/v1/agents/${id}`),
    ];
    const unknown = await answers(UNKNOWN_AGENT);
    expect(unknown.map(outcome)).toEqual(Array(3).fill([404, "no such agent"]));
    expect(await answers(agent.id)).toEqual(unknown);
    const malformed = "no such agent: use its ID (agt_…), not its name; GET /v1/agents lists them";
    // Its name among them.
    for (const id of [agent.name, "x", "agt_", "%00", "agt_%00", agent.id.toUpperCase(), `${agent.id}%20`]) {
      expect((await answers(id)).map(outcome)).toEqual(Array(3).fill([404, malformed]));
    }
    expect((await send("GET", `/v1/agents/${agent.id}`, undefined, "other")).body).toEqual(agent);
    expect(await findAgent(catalog().store, "acme", agent.id)).toBeNull();
  });
});

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
    ["a null name", { name: null }, "name: must be a string"],
    ["a null description", fresh({ description: null }), "description: must be a string"],
    ["U+0000 in the description", fresh({ description: "\0" }), "description: must not contain U+0000"],
    [
      "a description too long",
      fresh({ description: "x".repeat(4097) }),
      "description: must be at most 4096 characters",
    ],
    ["too many tags", fresh({ tags: Array(33).fill("x") }), "tags: must be at most 32 tags"],
    ["an empty tag", fresh({ tags: ["x", ""] }), "tags.1: must not be empty"],
    ["a long tag", fresh({ tags: ["x".repeat(65)] }), "tags.0: must be at most 64 characters"],
    ["a tag that is no text", fresh({ tags: ["x", 1] }), "tags.1: must be a string"],
    ["U+0000 in a tag", fresh({ tags: ["\0"] }), "tags.0: must not contain U+0000"],
    ["metadata that is no object", fresh({ metadata: [] }), "metadata: must be a JSON object"],
    ["null metadata", fresh({ metadata: null }), "metadata: must be a JSON object"],
    [
      "metadata too large",
      fresh({ metadata: { a: "ä".repeat(8192) } }),
      "metadata: must be at most 16384 bytes as JSON",
    ],
    ["a URL that is none", fresh({ upstream_url: "nope" }), "upstream_url: must be an http or https URL with a host"],
    [
      "a URL without a scheme",
      fresh({ upstream_url: "127.0.0.1:8080/a" }),
      "upstream_url: must be an http or https URL with a host: did you mean http://127.0.0.1:8080/a?",
    ],
    ["an empty URL", fresh({ upstream_url: "" }), "upstream_url: must be an http or https URL with a host"],
    [
      "a local URL",
      fresh({ upstream_url: "http://127.1:8000" }),
      "upstream_url: is a private or local address; the operator can allow it with TOLLGATE_ALLOW_HOSTS",
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
    [
      "mcp without a transport",
      fresh({ protocol: "mcp" }),
      "mcp_transport: must be streamable_http when protocol is mcp",
    ],
    [
      "mcp with a null transport",
      fresh({ protocol: "mcp", mcp_transport: null }),
      "mcp_transport: must be streamable_http when protocol is mcp",
    ],
    [
      "another transport",
      fresh({ ...MCP, mcp_transport: "sse" }),
      "mcp_transport: must be streamable_http for protocol mcp, or null for http",
    ],
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
    ["a flag that is text", fresh({ capture_body: "yes" }), "capture_body: must be true or false"],
    ["a field of PATCH", fresh({ suspended: true }), "suspended: is set by a PATCH of the agent, once it exists"],
    [
      "another field of PATCH",
      fresh({ invocation_burst: 1 }),
      "invocation_burst: is set by a PATCH of the agent, once it exists",
    ],
    ["an immutable field", fresh({ id: UNKNOWN_AGENT }), "id: is read-only"],
    [
      "a derived field",
      fresh({ status: "active" }),
      "status: is read-only: it follows from upstream_url, and a DELETE makes it inactive",
    ],
    ["a key twice", '{"name":"a","name":"b"}', "name: given twice"],
    ["an array", "[]", "body: must be a JSON object"],
    ["pricing of no form", fresh({ pricing: "1" }), "pricing: must be a pricing object or null"],
    ["pricing without a payee", fresh({ pricing: { ...PRICING, pay_to: undefined } }), "pricing.pay_to: required"],
    [
      "an unknown key in pricing",
      fresh({ pricing: { ...PRICING, fee: "1" } }),
      "pricing.fee: unknown field; known here: amount, asset, network, pay_to, tools",
    ],
    ["another asset", fresh({ pricing: { ...PRICING, asset: "usdc" } }), "pricing.asset: must be USDC"],
    ["another network", fresh({ pricing: { ...PRICING, network: "base-sepolia" } }), "pricing.network: must be base"],
    [
      "an address with a line break",
      fresh({ pricing: { ...PRICING, pay_to: `${PRICING.pay_to}\n` } }),
      "pricing.pay_to: must be an address of 0x and 40 hexadecimal digits",
    ],
    ...["", "-1", "0.01", "1.0", "1e3", "0x1", " 1", "1\n", "٣", "9".repeat(79)].map(
      (amount): [string, object, string] => [
        `the amount ${JSON.stringify(amount)}`,
        fresh({ pricing: { ...PRICING, amount } }),
        "pricing.amount: must be a string of 1 to 78 digits, in the asset's smallest units: 10000 is 0.01 USDC",
      ],
    ),
    [
      "a numeric amount",
      fresh({ pricing: { ...PRICING, amount: 5 } }),
      "pricing.amount: must be a string of 1 to 78 digits, in the asset's smallest units: 10000 is 0.01 USDC",
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
      "pricing.tools.a\nb: must be a string of 1 to 78 digits, in the asset's smallest units: 10000 is 0.01 USDC",
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

describe("the list of agents", () => {
  const names = async (query: string) => {
    const { status, body } = await send("GET", `/v1/agents?${query}`, undefined, "lister");
    expect(status).toBe(200);
    return body.data.map((agent: { name: string }) => agent.name);
  };

  beforeAll(async () => {
    const agents = [
      { name: "first", upstream_url: UPSTREAM_URL, tags: ["red", ","], description: "100% Straße_ΟΔΟΣ" },
      { name: "second", upstream_url: UPSTREAM_URL, tags: ["x,", ",y", "Red"], ...MCP },
      { name: "third", tags: ['a"red"b', "re"], description: "a\\b" },
      { name: "gone", upstream_url: UPSTREAM_URL, tags: ["red"] },
      { name: "Éclair İ", tags: [] },
    ];
    for (const agent of agents) {
      const { body } = await create(agent, "lister");
      if (agent.name === "gone") await send("DELETE", `/v1/agents/${body.id}`, undefined, "lister");
    }
  });

  test("is newest first, without the inactive ones, with the total", async () => {
    const { body } = await send("GET", "/v1/agents", undefined, "lister");
    expect(body).toMatchObject({ total: 4, limit: 20, offset: 0 });
    expect(body.data[0]).toEqual((await send("GET", `/v1/agents/${body.data[0].id}`, undefined, "lister")).body);
    expect(await names("")).toEqual(["Éclair İ", "third", "second", "first"]);
    expect((await send("GET", "/v1/agents", undefined, "nobody")).body).toEqual({
      data: [],
      total: 0,
      limit: 20,
      offset: 0,
    });
  });

  test("is cut into pages", async () => {
    expect(await names("limit=2&offset=1")).toEqual(["third", "second"]);
    expect(await names("offset=99999999999999999999")).toEqual([]);
    const { body } = await send("GET", "/v1/agents?limit=500&offset=-3", undefined, "lister");
    expect(body).toMatchObject({ total: 4, limit: 100, offset: 0 });
  });

  const filters: [string, string[]][] = [
    ["status=active", ["second", "first"]],
    ["status=pending", ["Éclair İ", "third"]],
    ["status=inactive", ["gone"]],
    ["protocol=mcp", ["second"]],
    ["tag=red", ["first"]],
    ["tag=Red", ["second"]],
    ["tag=re", ["third"]],
    ["tag=%2C", ["first"]],
    ["tag=", []],
    ["q=IRS", ["first"]],
    ["q=%25", ["first"]],
    ["q=_", ["first"]],
    ["q=100%25+strasse_οδος", ["first"]],
    ["q=a%5Cb", ["third"]],
    ["q=éCLAIR+i̇", ["Éclair İ"]],
    ["q=first100", []],
    ["q=first%01100", []],
    ["q=", ["Éclair İ", "third", "second", "first"]],
    ["q=r&status=active&protocol=http&tag=red", ["first"]],
  ];
  test.each(filters)("is filtered by %s", async (query, expected) => {
    expect(await names(query)).toEqual(expected);
  });

  test.each([
    ["status=gone", "status: must be one of pending, active, inactive"],
    ["protocol=", "protocol: must be one of http, mcp"],
    ["limit=x", "limit: must be an integer"],
    ["q=%00", "q: must not contain U+0000"],
    ["tag=%00", "tag: must not contain U+0000"],
    [`q=${"x".repeat(257)}`, "q: must be at most 256 characters"],
  ])("refuses %s", async (query, error) => {
    expect(outcome(await send("GET", `/v1/agents?${query}`))).toEqual([400, error]);
  });
});
