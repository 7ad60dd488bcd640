// The contract of /v1/policy: the document and its versions, what is refused and by which name, the dry run, and
// the list of decisions. What policy makes of calls is tested with the calls.
import { describe, expect, test } from "bun:test";
import {
  contract,
  expectError,
  expectNoBody,
  expectRequestId,
  expectShape,
  is,
  type Json,
  MCP,
  type Tenant,
  UNKNOWN_AGENT,
  visible,
} from "./contract.ts";

const DOCUMENT = {
  default: "warn",
  on_error: "deny",
  rules: [
    { action: "deny", match: { tools: ["delete_*", "drop_table"], agents: [] } },
    { action: "allow", match: { agents: [UNKNOWN_AGENT], max_body_bytes: 10, rate_per_min: 5 } },
    { action: "allow", match: { rate_per_min: 600 } },
  ],
};
const POLICY = {
  version: is.integer,
  default: is.oneOf("allow", "warn", "deny"),
  on_error: is.oneOf("allow", "warn", "deny"),
  rules: is.arrayOf(is.object),
  updated_at: is.dateTime,
};
const EMPTY = { version: 0, rules: [] };
const VERDICT = {
  action: is.oneOf("allow", "warn", "deny"),
  matched_rule: is.orNull(is.integer),
  reason: is.text,
};

const matching = (match: Json) => ({ ...DOCUMENT, rules: [DOCUMENT.rules[0], { action: "deny", match }] });
const withRule = (rule: Json) => ({ ...DOCUMENT, rules: [rule] });

/** Documents that are refused, by the field that the error must name. */
const WRONG: ReadonlyArray<readonly [string, Json, string]> = [
  ["no default", { ...DOCUMENT, default: undefined }, "default: required"],
  ["no on_error", { ...DOCUMENT, on_error: undefined }, "on_error: required"],
  ["no rules", { ...DOCUMENT, rules: undefined }, "rules: required"],
  ["nothing", {}, "default, on_error, rules: required"],
  ["null for default", { ...DOCUMENT, default: null }, "default: "],
  ["an unknown default", { ...DOCUMENT, default: "block" }, "default: must be one of allow, warn, deny"],
  ["an unknown on_error", { ...DOCUMENT, on_error: "Deny" }, "on_error: "],
  ["an object of rules", { ...DOCUMENT, rules: {} }, "rules: "],
  ["a version", { ...DOCUMENT, version: 1 }, "version: is read-only"],
  ["updated_at", { ...DOCUMENT, updated_at: "2026-11-21T10:00:00.000Z" }, "updated_at: is read-only"],
  ["an unknown key", { ...DOCUMENT, mode: "strict" }, "mode: unknown field"],
  ["no action", withRule({ match: {} }), "rules.0.action: required"],
  ["an unknown action", withRule({ action: "log", match: {} }), "rules.0.action: "],
  ["no match", withRule({ action: "deny" }), "rules.0.match: required"],
  ["null for match", withRule({ action: "deny", match: null }), "rules.0.match: "],
  ["an unknown key in a rule", withRule({ action: "deny", match: {}, name: "x" }), "rules.0.name: unknown field"],
  ["a text for a rule", withRule("deny"), "rules.0: "],
  ["an unknown condition", matching({ users: ["alice"] }), "rules.1.match.users: unknown field"],
  ["a text for agents", matching({ agents: UNKNOWN_AGENT }), "rules.1.match.agents: "],
  ["a number among agents", matching({ agents: [UNKNOWN_AGENT, 1] }), "rules.1.match.agents.1: "],
  ["null for tools", matching({ tools: null }), "rules.1.match.tools: "],
  ["an empty agent", matching({ agents: [""] }), "rules.1.match.agents.0: must not be empty"],
  [
    "an agent's name",
    matching({ agents: [UNKNOWN_AGENT, "echo"] }),
    "rules.1.match.agents.1: must be an agent's ID, as",
  ],
  ["a wildcard for an agent", matching({ agents: ["agt_*"] }), "rules.1.match.agents.0: "],
  ["an empty tool", matching({ tools: ["a", ""] }), "rules.1.match.tools.1: must not be empty"],
  ["a wildcard in a tool", matching({ tools: ["a*b"] }), "rules.1.match.tools.0: "],
  ["a wildcard before a tool", matching({ tools: ["*b"] }), "rules.1.match.tools.0: "],
  ["two wildcards", matching({ tools: ["a**"] }), "rules.1.match.tools.0: "],
  ["0 bytes", matching({ max_body_bytes: 0 }), "rules.1.match.max_body_bytes: must be an integer of at least 1"],
  ["negative bytes", matching({ max_body_bytes: -5 }), "rules.1.match.max_body_bytes: "],
  ["half a byte", matching({ max_body_bytes: 1.5 }), "rules.1.match.max_body_bytes: "],
  ["a text for bytes", matching({ max_body_bytes: "10" }), "rules.1.match.max_body_bytes: "],
  ["too many bytes to count", matching({ max_body_bytes: 1e300 }), "rules.1.match.max_body_bytes: "],
  ["a rate of 0", matching({ rate_per_min: 0 }), "rules.1.match.rate_per_min: "],
  ["null for a rate", matching({ rate_per_min: null }), "rules.1.match.rate_per_min: "],
  [
    "over 500 rules",
    { ...DOCUMENT, rules: Array(501).fill(DOCUMENT.rules[0]) },
    "rules: must be an array of at most 500",
  ],
  ["a long list", matching({ tools: Array(1001).fill("a") }), "rules.1.match.tools: "],
  ["a long tool", matching({ tools: ["a".repeat(1025)] }), "rules.1.match.tools.0: "],
];

/** Bodies that are no documents at all, as text. */
const MALFORMED: ReadonlyArray<readonly [string, string, string]> = [
  ["nothing", "", "body"],
  ["a list", "[]", "body"],
  ["half of one", '{ "default": "allow"', "body"],
  ["a key twice", '{ "default": "deny", "default": "allow", "on_error": "deny", "rules": [] }', "default: given twice"],
  [
    "a condition twice",
    '{ "default": "deny", "on_error": "deny", "rules": [{ "action": "allow", "match": { "tools": ["a"], "tools": [] } }] }',
    "tools: given twice",
  ],
  ["a prototype", '{ "default": "deny", "on_error": "deny", "rules": [], "__proto__": {} }', "__proto__"],
];

contract((at) => {
  const put = (tenant: Tenant, json: Json = DOCUMENT) => tenant.send("PUT", "/v1/policy", { json });
  const get = async (tenant: Tenant) => (await tenant.send("GET", "/v1/policy")).body;
  const evaluate = (tenant: Tenant, json: Json) => tenant.send("POST", "/v1/policy/evaluate", { json });

  describe("the policy of a tenant", () => {
    test("is version 0 and nothing else where there is none", async () => {
      const answer = await at.tenant().send("GET", "/v1/policy");
      expect([answer.status, answer.body]).toEqual([200, EMPTY]);
      expectRequestId(answer);
    });

    test("is answered with version and time when it is put, is read as it was put, and is replaced as a whole", async () => {
      const tenant = at.tenant();
      const first = await put(tenant);
      expect(first.status).toBe(200);
      expectShape(first.body, { version: is.exactly(1), updated_at: is.dateTime });
      const policy = await get(tenant);
      expectShape(policy, POLICY);
      expect(policy).toEqual({ ...DOCUMENT, ...first.body });

      const second = await put(tenant, { default: "allow", on_error: "allow", rules: [] });
      expectShape(second.body, { version: is.exactly(2), updated_at: is.dateTime });
      expect(await get(tenant)).toEqual({ default: "allow", on_error: "allow", rules: [], ...second.body });
      expect((await put(tenant)).body.version).toBe(3);
    });

    test("may have 500 rules, and every kind of condition at its bound", async () => {
      const match = {
        agents: [UNKNOWN_AGENT],
        tools: ["*", "日本*"],
        max_body_bytes: 1,
        rate_per_min: 2 ** 53 - 1,
      };
      const rules = Array(500).fill({ action: "deny", match });
      const tenant = at.tenant();
      expect((await put(tenant, { ...DOCUMENT, rules })).status).toBe(200);
      expect((await get(tenant)).rules).toEqual(rules);
    });

    test("gets a version for each PUT of several at once", async () => {
      const tenant = at.tenant();
      const versions = (await Promise.all(Array.from({ length: 12 }, () => put(tenant)))).map(
        ({ body }) => body.version,
      );
      expect(versions.sort((a, b) => a - b)).toEqual(Array.from({ length: 12 }, (_, n) => n + 1));
    });

    test.each(WRONG)("is refused with %s", async (_, json, field) => {
      const tenant = at.tenant();
      const answer = await put(tenant, json);
      expectError(answer, 400);
      expect(answer.body.error).toStartWith(field);
      expect(await get(tenant)).toEqual(EMPTY);
    });

    test.each(MALFORMED)("is refused when it is %s", async (_, body, field) => {
      const tenant = at.tenant();
      const headers = { "content-type": "application/json" };
      expectError(await tenant.send("PUT", "/v1/policy", { body, headers }), 400, field);
      expect(await get(tenant)).toEqual(EMPTY);
    });

    test("stays as it is when a PUT is refused", async () => {
      const tenant = at.tenant();
      const { body } = await put(tenant);
      expectError(await put(tenant, { ...DOCUMENT, default: "no" }), 400, "default");
      expect(await get(tenant)).toEqual({ ...DOCUMENT, ...body });
    });

    test("is 413 over 1 MiB, 400 in another content type, 405 with another method", async () => {
      const tenant = at.tenant();
      const large = matching({
        agents: Array(1000).fill("x".repeat(1024)),
        tools: Array(50).fill("y".repeat(1000)),
      });
      expectError(await put(tenant, large), 413);
      const headers = { "content-type": "text/plain" };
      expectError(
        await tenant.send("PUT", "/v1/policy", { body: JSON.stringify(DOCUMENT), headers }),
        400,
        "content-type",
      );
      for (const method of ["POST", "PATCH", "DELETE"]) expectError(await tenant.send(method, "/v1/policy"), 405);
      expect(await get(tenant)).toEqual(EMPTY);
    });

    test("belongs to its tenant", async () => {
      const [owner, stranger] = [at.tenant(), at.tenant()];
      await put(owner);
      expect(await get(stranger)).toEqual(EMPTY);
      expect((await put(stranger, { ...DOCUMENT, rules: [] })).body.version).toBe(1);
      expect(await get(owner)).toMatchObject({ version: 1, rules: DOCUMENT.rules });
    });

    test("is told to nobody without a token", async () => {
      for (const [method, path] of [
        ["GET", "/v1/policy"],
        ["PUT", "/v1/policy"],
        ["GET", "/v1/policy/decisions"],
        ["POST", "/v1/policy/evaluate"],
      ] as const) {
        const headers = { authorization: "Bearer x" };
        expectNoBody(await at.tenant().send(method, path, { headers }), 401);
      }
    });
  });

  describe("a dry run of the policy", () => {
    test("says what the policy would, and leaves no decision", async () => {
      const tenant = at.tenant();
      const agent_id = (await tenant.agent(MCP)).id;
      await put(tenant);
      const tried = await evaluate(tenant, { agent_id, mcp_tool: "delete_file" });
      expect(tried.status).toBe(200);
      expectShape(tried.body, VERDICT);
      expect(tried.body).toEqual({ action: "deny", matched_rule: 1, reason: "rule 1: deny" });
      for (const [asked, action, matched_rule] of [
        [{}, "warn", null],
        [{ mcp_tool: "delete" }, "warn", null],
        [{ mcp_tool: null }, "warn", null],
        [{ rate_per_min: 600 }, "warn", null],
        [{ rate_per_min: 601 }, "allow", 3],
        [{ rate_per_min: 601, mcp_tool: "drop_table" }, "deny", 1],
      ] as const) {
        const { body } = await evaluate(tenant, { agent_id, ...asked });
        expect([asked, body.action, body.matched_rule]).toEqual([asked, action, matched_rule]);
      }
      expect((await tenant.send("GET", "/v1/policy/decisions")).body).toEqual({ data: [], limit: 20 });
    });

    test("may be of another document, whatever is in force", async () => {
      const tenant = at.tenant();
      const agent_id = (await tenant.agent()).id;
      const document = {
        ...DOCUMENT,
        rules: [
          { action: "deny", match: { tools: ["*"] } },
          { action: "deny", match: { agents: [agent_id], max_body_bytes: 100 } },
        ],
      };
      const ask = async (json: Json) => (await evaluate(tenant, { agent_id, document, ...json })).body.action;
      // A tool of an http agent is no tool.
      expect(await ask({ mcp_tool: "x" })).toBe("warn");
      expect([await ask({ body_bytes: 99 }), await ask({ body_bytes: 100 })]).toEqual(["warn", "deny"]);
      await put(tenant, { default: "deny", on_error: "deny", rules: [] });
      expect(await ask({})).toBe("warn");
      expect((await evaluate(tenant, { agent_id })).body.action).toBe("deny");
    });

    test("allows every call without a policy", async () => {
      const tenant = at.tenant();
      const { body } = await evaluate(tenant, { agent_id: (await tenant.agent()).id });
      expect(body).toEqual({ action: "allow", matched_rule: null, reason: "no policy" });
    });

    test("takes another tenant's agent for none", async () => {
      const [owner, stranger] = [at.tenant(), at.tenant()];
      await put(stranger);
      const foreign = await evaluate(stranger, { agent_id: (await owner.agent()).id });
      expectError(foreign, 404);
      expect(visible(foreign)).toEqual(visible(await evaluate(stranger, { agent_id: UNKNOWN_AGENT })));
      expectError(await evaluate(stranger, { agent_id: "x" }), 404, "no such agent: use its ID (agt_…), not its name");
    });

    test.each<[string, Json, string]>([
      ["no agent", { agent_id: undefined }, "agent_id: required"],
      ["a number for the agent", { agent_id: 1 }, "agent_id: "],
      ["an empty tool", { mcp_tool: "" }, "mcp_tool: must not be empty"],
      ["a number for the tool", { mcp_tool: 1 }, "mcp_tool: "],
      ["negative bytes", { body_bytes: -1 }, "body_bytes: "],
      ["half a call", { rate_per_min: 0.5 }, "rate_per_min: "],
      ["an unknown key", { user: "alice" }, "user: unknown field"],
      ["half a document", { document: { default: "allow" } }, "document.on_error, document.rules: required"],
      ["a wrong rule", { document: withRule({ action: "x", match: {} }) }, "document.rules.0.action: "],
      ["a wrong tool", { document: matching({ tools: ["a*b"] }) }, "document.rules.1.match.tools.0: "],
      ["null for the document", { document: null }, "document: "],
    ])("is refused with %s", async (_, changes, field) => {
      const tenant = at.tenant();
      const answer = await evaluate(tenant, { agent_id: UNKNOWN_AGENT, ...changes });
      expectError(answer, 400);
      expect(answer.body.error).toStartWith(field);
    });
  });

  describe("the list of decisions", () => {
    test.each([
      ["", 20],
      ["?limit=1", 1],
      ["?limit=100", 100],
      ["?limit=101", 100],
      ["?limit=0", 1],
      ["?limit=-7", 1],
      ["?limit=99999999999999999999", 100],
    ])("has a limit of %p cut to %d", async (query, limit) => {
      const answer = await at.tenant().send("GET", `/v1/policy/decisions${query}`);
      expect([answer.status, answer.body]).toEqual([200, { data: [], limit }]);
    });

    test.each(["?limit=", "?limit=ten", "?limit=1.5", "?limit=1e1"])("refuses %p", async (query) => {
      expectError(await at.tenant().send("GET", `/v1/policy/decisions${query}`), 400, "limit");
    });
  });
});
