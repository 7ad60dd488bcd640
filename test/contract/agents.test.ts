// The contract of /v1/agents: every field, every rule, every error, on both databases.
import { describe, expect, test } from "bun:test";
import {
  AGENT,
  contract,
  expectError,
  expectNoBody,
  expectRequestId,
  expectShape,
  type Json,
  MCP,
  PRICING,
  PUBLIC_URL,
  UNKNOWN_AGENT,
  UNKNOWN_CREDENTIAL,
  unique,
} from "./contract.ts";

const TOOLS = { ...PRICING, tools: { search: "5" } };

/** Fields of a create and of an update that no value of these makes valid. */
const WRONG: ReadonlyArray<readonly [field: string, values: readonly unknown[]]> = [
  ["name", ["", "   ", "x".repeat(129), "a\nb", "a\u0000b", "a\u007fb", 5, {}, [], true]],
  ["description", ["x".repeat(4097), 5, [], {}, true]],
  ["tags", ["a", {}, 5, [""], [5], [null], ["x".repeat(65)], Array.from({ length: 33 }, (_, i) => `t${i}`)]],
  ["metadata", ["a", 5, [], true, { a: "x".repeat(16 * 1024) }]],
  [
    "upstream_url",
    [5, {}, [], true, "", "upstream.example.com", "ftp://example.com/", "https://", "/run", "file:///etc/passwd"],
  ],
  ["credential_ref", [5, {}, "", "cred_x", UNKNOWN_CREDENTIAL]],
  ["emit_receipts", ["true", 1, {}]],
  ["capture_body", ["true", 1, {}]],
  ["protocol", ["grpc", "HTTP", "", 1]],
  ["mcp_transport", ["stdio", "sse", "", 1, true]],
  ["mcp_protocol_version", [1, {}, true]],
  ["pricing", ["free", 1, [], true]],
];

const WRONG_PRICING: ReadonlyArray<readonly [name: string, fields: Json]> = [
  ["no amount", { amount: undefined }],
  ["a negative amount", { amount: "-1" }],
  ["a fraction", { amount: "1.5" }],
  ["an exponent", { amount: "1e3" }],
  ["an empty amount", { amount: "" }],
  ["an amount with a line break", { amount: "1\n" }],
  ["a number for amount", { amount: 1000 }],
  ["another asset", { asset: "DAI" }],
  ["no asset", { asset: undefined }],
  ["another network", { network: "base-sepolia" }],
  ["no network", { network: undefined }],
  ["no pay_to", { pay_to: undefined }],
  ["a short pay_to", { pay_to: "0x12" }],
  ["a pay_to without prefix", { pay_to: "ab".repeat(20) }],
  ["a pay_to that is no hex", { pay_to: `0x${"zz".repeat(20)}` }],
  ["an unknown key", { currency: "USD" }],
];

const REFUSED_HOSTS = [
  "http://127.0.0.2/",
  "http://127.2/",
  "http://2130706434/",
  "http://0x7f.0.0.2/",
  "http://0177.0.0.2/",
  "http://0.0.0.0/",
  "http://10.0.0.1/",
  "http://172.16.0.1/",
  "http://192.168.1.1/",
  "http://169.254.169.254/latest/meta-data",
  "http://224.0.0.1/",
  "http://[::1]/",
  "http://[::]/",
  "http://[fe80::1]/",
  "http://[fc00::1]/",
  "http://[ff02::1]/",
  "http://[::ffff:10.0.0.1]/",
  "http://[::10.0.0.1]/",
  "http://[::ffff:0:10.0.0.1]/",
  "http://[64:ff9b::10.0.0.1]/",
  "http://[2002:a00:1::]/",
  "http://%31%30.0.0.1/",
  "http://１０.0.0.1/",
  "http://10。0。0。1/",
  "https://user:pass@example.com/",
  "https://user@example.com/",
];

contract((at) => {
  describe("POST /v1/agents", () => {
    test("an agent of a name alone is pending and has every default", async () => {
      const tenant = at.tenant();
      const answer = await tenant.send("POST", "/v1/agents", { json: { name: "  only a name " } });
      expect(answer.status).toBe(201);
      expect(answer.headers.get("content-type")).toBe("application/json");
      expectRequestId(answer);
      expectShape(answer.body, AGENT);
      expect(answer.body).toEqual({
        id: answer.body.id,
        name: "only a name",
        description: "",
        tags: null,
        metadata: {},
        status: "pending",
        suspended: false,
        created_by: "alice",
        created_at: answer.body.created_at,
        updated_at: answer.body.created_at,
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
      expect(Math.abs(Date.parse(answer.body.created_at) - Date.now())).toBeLessThan(10_000);
    });

    test("an agent comes back with every field as it was given, and GET and the list show the same", async () => {
      const tenant = at.tenant();
      const { id: credential_ref } = await tenant.credential();
      const given = {
        name: "every field ünï 🦆",
        description: "two\nlines",
        tags: ["a", "b"],
        metadata: { nested: { list: [1, 2.5, null, true, "x"] }, "": 0 },
        upstream_url: "https://upstream.example.com/run?x=1",
        credential_ref,
        emit_receipts: true,
        capture_body: false,
        ...MCP,
        mcp_protocol_version: "2025-06-18",
        pricing: TOOLS,
      };
      const { status, body } = await tenant.send("POST", "/v1/agents", { json: given, user: "bob" });
      expect(status).toBe(201);
      expectShape(body, AGENT);
      expect(body).toMatchObject({ ...given, status: "active", created_by: "bob" });
      const read = await tenant.send("GET", `/v1/agents/${body.id}`);
      expect([read.status, read.body]).toEqual([200, body]);
      const list = await tenant.send("GET", "/v1/agents");
      expect(list.body).toEqual({ data: [body], total: 1, limit: 20, offset: 0 });
    });

    test("null is as good as absent for every nullable field", async () => {
      const agent = await at.tenant().agent({
        upstream_url: null,
        credential_ref: null,
        mcp_transport: null,
        mcp_protocol_version: null,
      });
      expect(agent).toMatchObject({ status: "pending", upstream_url: null, credential_ref: null });
    });

    test.each(WRONG)("refuses a wrong %s", async (field, values) => {
      const tenant = at.tenant();
      const others = field === "mcp_transport" ? { protocol: "mcp" } : {};
      for (const value of values) {
        const json = { name: "agent", ...others, [field]: value };
        expectError(await tenant.send("POST", "/v1/agents", { json }), 400, field);
      }
      if (field !== "name") await tenant.agent({ name: "agent" });
    });

    test("takes text at its limits", async () => {
      const tenant = at.tenant();
      const fields = {
        name: "🦆".repeat(128),
        description: "🦆".repeat(4096),
        tags: Array.from({ length: 32 }, (_, i) => `${i}`.padEnd(64, "x")),
        metadata: { a: "x".repeat(16 * 1024 - '{"a":""}'.length) },
      };
      expect(await tenant.agent(fields)).toMatchObject(fields);
      for (const key of ["name", "description"] as const) {
        const json = { name: "other", ...{ [key]: `${fields[key]}x` } };
        expectError(await tenant.send("POST", "/v1/agents", { json }), 400, key);
      }
      const metadata = { a: `${fields.metadata.a}x` };
      const json = { name: "other", metadata };
      expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "metadata");
    });

    test.each(["id", "status", "created_by", "created_at", "updated_at", "suspended", "surprise"])(
      "refuses the key %s",
      async (key) => {
        const json = { name: "agent", [key]: null };
        expectError(await at.tenant().send("POST", "/v1/agents", { json }), 400, key);
      },
    );

    test.each(["invocation_rate_limit", "invocation_burst"])("the field %s comes by PATCH only", async (key) => {
      const json = { name: "agent", [key]: 5 };
      expectError(await at.tenant().send("POST", "/v1/agents", { json }), 400, key);
    });

    test("refuses a body without name, and bodies that are no object", async () => {
      const tenant = at.tenant();
      expectError(await tenant.send("POST", "/v1/agents", { json: {} }), 400, "name");
      expectError(await tenant.send("POST", "/v1/agents", { json: { name: null } }), 400, "name");
      for (const json of [null, [], "x", 1, true]) {
        expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "body");
      }
    });

    test.each(WRONG_PRICING)("refuses pricing with %s", async (_, fields) => {
      const json = { name: "agent", pricing: { ...PRICING, ...fields } };
      expectError(await at.tenant().send("POST", "/v1/agents", { json }), 400, "pricing");
    });

    test("tool prices need protocol mcp, and be decimal strings", async () => {
      const tenant = at.tenant();
      expectError(await tenant.send("POST", "/v1/agents", { json: { name: "agent", pricing: TOOLS } }), 400, "pricing");
      for (const tools of [{ a: 5 }, { a: "-1" }, { a: "" }, { a: null }, ["5"], "5"]) {
        const json = { name: "agent", ...MCP, pricing: { ...PRICING, tools } };
        expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "pricing");
      }
    });

    test("mcp_transport is required with mcp and refused with http", async () => {
      const tenant = at.tenant();
      const send = (fields: object) => tenant.send("POST", "/v1/agents", { json: { name: "agent", ...fields } });
      expectError(await send({ protocol: "mcp" }), 400, "mcp_transport");
      expectError(await send({ protocol: "mcp", mcp_transport: null }), 400, "mcp_transport");
      expectError(await send({ mcp_transport: "streamable_http" }), 400, "mcp_transport");
      expectError(await send({ protocol: "http", mcp_transport: "streamable_http" }), 400, "mcp_transport");
    });

    test.each(["localhost", "LOCALHOST.", "api.localhost"])(
      "takes %s where its address is exempt, and calls it",
      async (name) => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url.replace("127.0.0.1", name) });
        expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded" });
        expect(route.seen.length).toBe(1);
      },
    );

    test.each(REFUSED_HOSTS)("refuses upstream_url %s", async (upstream_url) => {
      const tenant = at.tenant();
      const json = { name: "agent", upstream_url };
      expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "upstream_url");
    });

    test("a name is taken while its agent is pending or active, and free after its deletion", async () => {
      const tenant = at.tenant();
      const create = (name: string, upstream_url: string | null = null) =>
        tenant.send("POST", "/v1/agents", { json: { name, upstream_url } });
      const first = await create("taken");
      expectError(await create("taken"), 409);
      expectError(await create(" taken "), 409);
      await tenant.patch(first.body.id, { upstream_url: PUBLIC_URL });
      expectError(await create("taken"), 409);
      expect((await create("Taken")).status).toBe(201);
      await tenant.send("DELETE", `/v1/agents/${first.body.id}`);
      expect((await create("taken")).status).toBe(201);
      expect((await at.tenant().send("POST", "/v1/agents", { json: { name: "taken" } })).status).toBe(201);
    });

    test("of concurrent creates under one name exactly one succeeds", async () => {
      const tenant = at.tenant();
      const json = { name: "contended" };
      const answers = await Promise.all(Array.from({ length: 12 }, () => tenant.send("POST", "/v1/agents", { json })));
      expect(answers.map(({ status }) => status).sort()).toEqual([201, ...Array(11).fill(409)]);
    });
  });

  describe("PATCH /v1/agents/{id}", () => {
    test("a key that is absent leaves its field, null clears it, and a value sets it", async () => {
      const tenant = at.tenant();
      const { id: credential_ref } = await tenant.credential();
      const all = {
        name: "patched",
        description: "d",
        tags: ["t"],
        metadata: { m: 1 },
        upstream_url: PUBLIC_URL,
        credential_ref,
        suspended: true,
        invocation_rate_limit: 0.5,
        invocation_burst: 3,
        emit_receipts: true,
        capture_body: false,
        ...MCP,
        mcp_protocol_version: "2025-06-18",
        pricing: TOOLS,
      };
      const made = await tenant.agent({ upstream_url: null });
      const set = await tenant.patch(made.id, all);
      expectShape(set, AGENT);
      expect(set).toEqual({ ...made, ...all, status: "active", updated_at: set.updated_at });
      expect(Date.parse(set.updated_at)).toBeGreaterThanOrEqual(Date.parse(made.updated_at));
      const untouched = await tenant.patch(made.id, {});
      expect({ ...untouched, updated_at: 0 }).toEqual({ ...set, updated_at: 0 });
      const nulls = {
        upstream_url: null,
        credential_ref: null,
        invocation_rate_limit: null,
        invocation_burst: null,
        mcp_protocol_version: null,
        pricing: null,
        mcp_transport: null,
        protocol: "http",
      };
      const cleared = await tenant.patch(made.id, nulls);
      expect(cleared).toEqual({ ...set, ...nulls, status: "pending", updated_at: cleared.updated_at });
      expect((await tenant.send("GET", `/v1/agents/${made.id}`)).body).toEqual(cleared);
    });

    test.each(WRONG)("refuses a wrong %s and changes nothing", async (field, values) => {
      const tenant = at.tenant();
      const agent = await tenant.agent(field === "mcp_transport" ? MCP : {});
      for (const value of values) {
        const json = { description: "must not be stored", [field]: value };
        expectError(await tenant.send("PATCH", `/v1/agents/${agent.id}`, { json }), 400, field);
      }
      expect((await tenant.send("GET", `/v1/agents/${agent.id}`)).body).toEqual(agent);
    });

    test.each([
      ["suspended", [null, "true", 1]],
      ["invocation_rate_limit", [0, -1, "5", true, {}]],
      ["invocation_burst", [0, -1, 1.5, "5", true]],
      ["name", [null]],
      ["description", [null]],
      ["metadata", [null]],
      ["emit_receipts", [null]],
      ["capture_body", [null]],
      ["protocol", [null]],
    ] as const)("refuses a wrong %s", async (field, values) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      for (const value of values) {
        const json = { [field]: value };
        expectError(await tenant.send("PATCH", `/v1/agents/${id}`, { json }), 400, field);
      }
    });

    test.each(["id", "status", "created_by", "created_at", "updated_at", "surprise"])(
      "refuses the key %s",
      async (key) => {
        const tenant = at.tenant();
        const agent = await tenant.agent();
        const json = { [key]: agent[key] ?? "x" };
        expectError(await tenant.send("PATCH", `/v1/agents/${agent.id}`, { json }), 400, key);
      },
    );

    test("refuses combinations that the result would not allow", async () => {
      const tenant = at.tenant();
      const http = await tenant.agent();
      const mcp = await tenant.agent(MCP);
      const priced = await tenant.agent({ ...MCP, pricing: TOOLS });
      const patch = (id: string, json: object) => tenant.send("PATCH", `/v1/agents/${id}`, { json });
      expectError(await patch(http.id, { protocol: "mcp" }), 400, "mcp_transport");
      expectError(await patch(http.id, { mcp_transport: "streamable_http" }), 400, "mcp_transport");
      expectError(await patch(http.id, { pricing: TOOLS }), 400, "pricing");
      expectError(await patch(mcp.id, { protocol: "http" }), 400, "mcp_transport");
      expectError(await patch(mcp.id, { mcp_transport: null }), 400, "mcp_transport");
      expectError(await patch(priced.id, { protocol: "http", mcp_transport: null }), 400, "pricing");
      expect((await patch(priced.id, { protocol: "http", mcp_transport: null, pricing: PRICING })).status).toBe(200);
    });

    test("the status follows upstream_url", async () => {
      const tenant = at.tenant();
      const agent = await tenant.agent({ upstream_url: null });
      expect(agent.status).toBe("pending");
      expect((await tenant.patch(agent.id, { upstream_url: PUBLIC_URL })).status).toBe("active");
      expect((await tenant.patch(agent.id, { suspended: true })).status).toBe("active");
      expect((await tenant.patch(agent.id, { upstream_url: null })).status).toBe("pending");
    });

    test.each(REFUSED_HOSTS.slice(0, 8))("refuses upstream_url %s", async (upstream_url) => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      expectError(await tenant.send("PATCH", `/v1/agents/${id}`, { json: { upstream_url } }), 400, "upstream_url");
    });

    test("of concurrent renames to one name exactly one succeeds", async () => {
      const tenant = at.tenant();
      const agents = await Promise.all(Array.from({ length: 8 }, () => tenant.agent()));
      const answers = await Promise.all(
        agents.map(({ id }) => tenant.send("PATCH", `/v1/agents/${id}`, { json: { name: "contended" } })),
      );
      expect(answers.map(({ status }) => status).sort()).toEqual([200, ...Array(7).fill(409)]);
    });

    test("concurrent patches of different fields all hold", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      const fields = {
        description: "d",
        tags: ["t"],
        metadata: { m: 1 },
        invocation_burst: 4,
        emit_receipts: true,
      };
      await Promise.all(Object.entries(fields).map(([key, value]) => tenant.patch(id, { [key]: value })));
      expect((await tenant.send("GET", `/v1/agents/${id}`)).body).toMatchObject(fields);
    });

    test("a new name must be free; the agent's own is", async () => {
      const tenant = at.tenant();
      const [one, two] = [await tenant.agent({ name: "one" }), await tenant.agent({ name: "two" })];
      expectError(await tenant.send("PATCH", `/v1/agents/${two.id}`, { json: { name: "one" } }), 409);
      expect((await tenant.patch(one.id, { name: "one" })).name).toBe("one");
      await tenant.send("DELETE", `/v1/agents/${one.id}`);
      expect((await tenant.patch(two.id, { name: "one" })).name).toBe("one");
    });
  });

  describe("DELETE /v1/agents/{id}", () => {
    test("a deletion is 204 without a body, again and again; the record stays, inactive, and takes no PATCH", async () => {
      const tenant = at.tenant();
      const agent = await tenant.agent();
      for (let time = 0; time < 2; time++) {
        expectNoBody(await tenant.send("DELETE", `/v1/agents/${agent.id}`), 204);
      }
      const read = await tenant.send("GET", `/v1/agents/${agent.id}`);
      expect(read.status).toBe(200);
      expectShape(read.body, AGENT);
      expect({ ...read.body, updated_at: 0 }).toEqual({ ...agent, status: "inactive", updated_at: 0 });
      expectError(await tenant.send("PATCH", `/v1/agents/${agent.id}`, { json: { upstream_url: PUBLIC_URL } }), 404);
    });
  });

  describe("GET /v1/agents", () => {
    test("the list is newest first, filtered, paged, and with inactive agents only when asked for", async () => {
      const tenant = at.tenant();
      const stem = unique("List");
      const a = await tenant.agent({ name: `${stem} a`, tags: ["red", "x"], description: "Needle" });
      const b = await tenant.agent({ name: `${stem} b`, upstream_url: null, tags: ["red"] });
      const c = await tenant.agent({ name: `${stem} c%_`, ...MCP });
      const gone = await tenant.agent({ name: `${stem} gone`, tags: ["red"] });
      await tenant.send("DELETE", `/v1/agents/${gone.id}`);
      const list = async (query: string) => {
        const { status, body } = await tenant.send("GET", `/v1/agents?${query}`);
        expect(status).toBe(200);
        expect(Object.keys(body).sort()).toEqual(["data", "limit", "offset", "total"]);
        return [body.total, body.data.map((agent: Json) => agent.id)];
      };
      expect(await list("")).toEqual([3, [c.id, b.id, a.id]]);
      expect(await list("limit=1&offset=1")).toEqual([3, [b.id]]);
      expect(await list("status=inactive")).toEqual([1, [gone.id]]);
      expect(await list("status=pending")).toEqual([1, [b.id]]);
      expect(await list("status=active")).toEqual([2, [c.id, a.id]]);
      expect(await list("protocol=mcp")).toEqual([1, [c.id]]);
      expect(await list("tag=red")).toEqual([2, [b.id, a.id]]);
      expect(await list("tag=re")).toEqual([0, []]);
      expect(await list("tag=red&status=active")).toEqual([1, [a.id]]);
      expect(await list(`q=${encodeURIComponent(stem.toUpperCase())}`)).toEqual([3, [c.id, b.id, a.id]]);
      expect(await list("q=%25_")).toEqual([1, [c.id]]);
      expect(await list("q=nothing-like-it")).toEqual([0, []]);
    });

    test("limit and offset are clamped, and must be integers", async () => {
      const tenant = at.tenant();
      for (const [query, limit, offset] of [
        ["limit=0", 1, 0],
        ["limit=-5&offset=-5", 1, 0],
        ["limit=101&offset=7", 100, 7],
        ["limit=99999999999999999999", 100, 0],
      ] as const) {
        expect((await tenant.send("GET", `/v1/agents?${query}`)).body).toEqual({
          data: [],
          total: 0,
          limit,
          offset,
        });
      }
      for (const name of ["limit", "offset"]) {
        for (const value of ["x", "", "1.5", "1e1", "0x10"]) {
          expectError(await tenant.send("GET", `/v1/agents?${name}=${value}`), 400, name);
        }
      }
      expectError(await tenant.send("GET", "/v1/agents?status=gone"), 400, "status");
      expectError(await tenant.send("GET", "/v1/agents?protocol=grpc"), 400, "protocol");
    });
  });

  test.each([UNKNOWN_AGENT, "agt_x", "x", "agt_", "%00", `agt_${"9".repeat(300)}`])(
    "%s is an unknown agent",
    async (id) => {
      const tenant = at.tenant();
      expectError(await tenant.send("GET", `/v1/agents/${id}`), 404);
      expectError(await tenant.send("PATCH", `/v1/agents/${id}`, { json: {} }), 404);
      expectError(await tenant.send("DELETE", `/v1/agents/${id}`), 404);
    },
  );
});
