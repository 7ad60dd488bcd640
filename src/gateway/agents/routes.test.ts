import { describe, expect, test } from "bun:test";
import {
  MCP,
  outcome,
  PRICING,
  UNKNOWN_AGENT,
  UPSTREAM_URL,
  useCatalog,
} from "../../../test/support/stores/catalog.ts";
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

  test("a PATCH without fields changes nothing", async () => {
    const agent = await made();
    expect((await patch(agent.id, {})).body).toEqual(agent);
  });

  test("a change is judged by the combination that results", async () => {
    const agent = await made();
    const steps: [object, number, string?][] = [
      [{ protocol: "mcp" }, 400, "mcp_transport: required when protocol is mcp"],
      [{ mcp_transport: "streamable_http" }, 400, "mcp_transport: must be absent or null when protocol is http"],
      [{ pricing: { ...PRICING, tools: { t: "1" } } }, 400, "pricing.tools: only possible when protocol is mcp"],
      [{ ...MCP, pricing: { ...PRICING, tools: { t: "1" } } }, 200],
      [{ mcp_transport: null }, 400, "mcp_transport: required when protocol is mcp"],
      [{ protocol: "http" }, 400, "mcp_transport: must be absent or null when protocol is http"],
      [{ protocol: "http", mcp_transport: null }, 400, "pricing.tools: only possible when protocol is mcp"],
      [{ protocol: "http", mcp_transport: null, pricing: PRICING }, 200],
    ];
    for (const [body, status, error] of steps) {
      expect(outcome(await patch(agent.id, body))).toEqual([status, error]);
    }
  });

  test.each([
    ["id", UNKNOWN_AGENT],
    ["status", "active"],
    ["created_by", "bob"],
    ["created_at", "2026-01-01T00:00:00Z"],
    ["updated_at", "2026-01-01T00:00:00Z"],
    ["rate_revision", 1],
    ["tenant", "x"],
  ])("a PATCH of the key %s is refused", async (key, value) => {
    const agent = await made();
    expect(outcome(await patch(agent.id, { [key]: value }))).toEqual([400, `${key}: unknown field`]);
  });

  test.each([
    [{ name: "" }, "name: must not be empty"],
    [{ name: null }, "name: expected string"],
    [{ tags: null }, "tags: must be an array of strings"],
    [{ suspended: null }, "suspended: expected boolean"],
    [{ invocation_rate_limit: 0 }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_rate_limit: -1 }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_rate_limit: "1" }, "invocation_rate_limit: must be a number above 0 or null"],
    [{ invocation_burst: 0 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ invocation_burst: 1.5 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ invocation_burst: 1e20 }, "invocation_burst: must be an integer of at least 1 or null"],
    [{ credential_ref: UNKNOWN_AGENT }, "credential_ref: names no credential of this tenant"],
    [
      { upstream_url: "http://localhost/" },
      "upstream_url: must not name localhost or a loopback, private, link-local or other local address",
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
  test("is answered byte for byte like an unknown or malformed ID, and stays as it is", async () => {
    const agent = await made({}, "other");
    const answers = async (id: string) => [
      await send("GET", `/v1/agents/${id}`),
      await send("PATCH", `/v1/agents/${id}`, { description: "x" }),
      await send("DELETE", `/v1/agents/${id}`),
    ];
    const unknown = await answers(UNKNOWN_AGENT);
    expect(unknown.map(outcome)).toEqual(Array(3).fill([404, "no such agent"]));
    for (const id of [agent.id, "x", "agt_", "%00", "agt_%00", agent.id.toUpperCase(), `${agent.id}%20`]) {
      expect(await answers(id)).toEqual(unknown);
    }
    expect((await send("GET", `/v1/agents/${agent.id}`, undefined, "other")).body).toEqual(agent);
    expect(await findAgent(catalog().store, "acme", agent.id)).toBeNull();
  });
});
