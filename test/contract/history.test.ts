// The contract of GET /v1/invocations: order, filters alone and together, paging, clamping, what is refused.
import { describe, expect, test } from "bun:test";
import { contract, expectError, expectShape, is, type Json, LIST_ITEM, MCP, UNKNOWN_AGENT } from "./contract.ts";

contract((at) => {
  /** Calls of every kind, oldest first. */
  async function populated() {
    const tenant = at.tenant();
    const gate = Promise.withResolvers<void>();
    const good = at.upstream();
    const missing = at.upstream(() => new Response("none", { status: 404 }));
    const rpc = at.upstream(() => Response.json({ jsonrpc: "2.0", id: 1, result: {} }));
    const slow = at.upstream(async () => {
      await gate.promise;
      return new Response();
    });
    const a = await tenant.agent({ upstream_url: good.url });
    const b = await tenant.agent({ upstream_url: missing.url });
    const m = await tenant.agent({ upstream_url: rpc.url, ...MCP });
    const s = await tenant.agent({ upstream_url: slow.url });
    const model = { "x-service-model": "m-1" };
    const call = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "search", arguments: {} } };
    const ids = [
      (await tenant.invoke(a.id)).invocation_id,
      (await tenant.invoke(a.id, { json: {}, headers: model })).invocation_id,
      (await tenant.invoke(b.id, { json: {}, headers: model })).invocation_id,
      (await tenant.invoke(m.id, { json: call })).invocation_id,
      await tenant.call(s.id),
    ];
    await slow.arrival();
    return {
      tenant,
      ids,
      agents: { a, b, m, s },
      finish() {
        gate.resolve();
        return tenant.ended(s.id, ids[4]!);
      },
    };
  }

  test("every item of the history has its shape, newest first, without bodies", async () => {
    const { tenant, ids, agents, finish } = await populated();
    const { status, body } = await tenant.send("GET", "/v1/invocations", { scope: "invocations:read_body" });
    expect(status).toBe(200);
    expectShape(body, {
      data: is.arrayOf(is.object),
      total: is.integer,
      limit: is.integer,
      offset: is.integer,
    });
    for (const item of body.data) expectShape(item, LIST_ITEM);
    expect(body.data.map((item: Json) => item.id)).toEqual(ids.toReversed());
    expect(body).toMatchObject({ total: 5, limit: 20, offset: 0 });
    expect(body.data[1]).toMatchObject({
      mcp_method: "tools/call",
      mcp_tool: "search",
      agent_id: agents.m.id,
    });
    for (const item of body.data) {
      const { body_captured: _, ...detail } = (await tenant.send("GET", `/v1/invocations/${item.id}`)).body;
      expect(detail).toEqual(item);
    }
    await finish();
  });

  test("every filter of the history works alone and with others", async () => {
    const { tenant, ids, agents, finish } = await populated();
    const list = async (query: string) => {
      const { status, body } = await tenant.send("GET", `/v1/invocations?${query}`);
      expect([query, status]).toEqual([query, 200]);
      expect([query, body.total]).toEqual([query, body.data.length]);
      return body.data.map((item: Json) => ids.indexOf(item.id));
    };
    expect(await list(`agent_id=${agents.a.id}`)).toEqual([1, 0]);
    expect(await list(`agent_id=${UNKNOWN_AGENT}`)).toEqual([]);
    expect(await list("agent_id=x")).toEqual([]);
    expect(await list("status=succeeded")).toEqual([3, 1, 0]);
    expect(await list("status=failed")).toEqual([2]);
    expect(await list("status=running")).toEqual([4]);
    expect(await list("status=pending")).toEqual([]);
    expect(await list("mode=transactional")).toEqual([4, 3, 2, 1, 0]);
    expect(await list("mode=streaming")).toEqual([]);
    expect(await list("error_class=upstream_4xx")).toEqual([2]);
    expect(await list("error_class=not_a_class")).toEqual([]);
    expect(await list("error_class=%27%20or%201%3D1")).toEqual([]);
    for (const name of ["error_class", "agent_id", "model"]) {
      expect(await list(`${name}=%00`)).toEqual([]);
      expect(await list(`${name}=m-1%00&status=failed`)).toEqual([]);
    }
    expect(await list("model=m-1")).toEqual([2, 1]);
    expect(await list("model=m")).toEqual([]);
    expect(await list("model=M-1")).toEqual([]);
    for (const settlement of ["pending", "settled", "settlement_failed", "settled_upstream_failed"])
      expect(await list(`settlement=${settlement}`)).toEqual([]);
    expect(await list(`model=m-1&status=succeeded`)).toEqual([1]);
    expect(await list(`model=m-1&agent_id=${agents.b.id}&error_class=upstream_4xx&status=failed`)).toEqual([2]);
    expect(await list(`model=m-1&agent_id=${agents.s.id}`)).toEqual([]);

    await finish();
    expect(await list("status=running")).toEqual([]);
    expect(await list("status=succeeded")).toEqual([4, 3, 1, 0]);
  });

  test("since and until include their bounds, to the millisecond, in every zone", async () => {
    const { tenant, ids, finish } = await populated();
    await finish();
    const times: string[] = (await tenant.send("GET", "/v1/invocations")).body.data
      .map((item: Json) => item.created_at)
      .reverse();
    const list = async (query: string) =>
      (await tenant.send("GET", `/v1/invocations?${query}`)).body.data.map((item: Json) => ids.indexOf(item.id));
    const near = (index: number, ms: number) => new Date(Date.parse(times[index]!) + ms).toISOString();
    const from = (time: string) => times.flatMap((t, i) => (t >= time ? [i] : [])).reverse();
    const to = (time: string) => times.flatMap((t, i) => (t <= time ? [i] : [])).reverse();
    for (const index of [0, 2, 4]) {
      for (const ms of [-1, 0, 1]) {
        const time = near(index, ms);
        expect(await list(`since=${time}`)).toEqual(from(time));
        expect(await list(`until=${time}`)).toEqual(to(time));
        expect(await list(`status=succeeded&since=${time}`)).toEqual(from(time).filter((i: number) => i !== 2));
      }
    }
    const exact = times[2]!;
    expect(await list(`since=${exact}&until=${exact}`)).toContain(2);
    const shifted = `${new Date(Date.parse(exact) + 5_400_000).toISOString().slice(0, -1)}%2B01:30`;
    expect(await list(`since=${shifted}`)).toEqual(from(exact));
    expect(await list("since=2999-01-01T00:00:00Z")).toEqual([]);
    expect(await list("until=1970-01-01T00:00:00Z")).toEqual([]);
    expect(await list(`since=${near(4, 1)}&until=${near(0, -1)}`)).toEqual([]);
  });

  test("the pages of the history fit together, whatever limit and offset are", async () => {
    const { tenant, ids, finish } = await populated();
    await finish();
    const page = async (query: string) => {
      const { status, body } = await tenant.send("GET", `/v1/invocations?${query}`);
      expect(status).toBe(200);
      return { ...body, data: body.data.map((item: Json) => ids.indexOf(item.id)) };
    };
    expect(await page("limit=2")).toEqual({ data: [4, 3], total: 5, limit: 2, offset: 0 });
    expect(await page("limit=2&offset=2")).toEqual({ data: [2, 1], total: 5, limit: 2, offset: 2 });
    expect(await page("limit=2&offset=4")).toEqual({ data: [0], total: 5, limit: 2, offset: 4 });
    expect(await page("offset=5")).toEqual({ data: [], total: 5, limit: 20, offset: 5 });
    expect(await page("status=succeeded&limit=1&offset=3")).toMatchObject({ data: [0], total: 4 });
    expect(await page("limit=0")).toMatchObject({ data: [4], limit: 1 });
    expect(await page("limit=-3&offset=-3")).toMatchObject({ data: [4], limit: 1, offset: 0 });
    expect(await page("limit=1000")).toMatchObject({ total: 5, limit: 100 });
    const huge = await page("offset=99999999999999999999");
    expect(huge).toMatchObject({ data: [], total: 5 });
    expect(huge.offset).toBe(Number.MAX_SAFE_INTEGER);
  });

  describe("the history refuses", () => {
    test.each([
      ...["status=done", "status=", "status=SUCCEEDED", "mode=batch", "mode=", "settlement=paid", "settlement="],
      ...["since=yesterday", "since=", "since=2026-01-01", "since=2026-01-01T00:00:00", "since=1767225600"],
      ...["until=2026-13-01T00:00:00Z", "until=2026-02-30T00:00:00Z", "until=x", "since=2026-01-01%2000:00:00"],
      ...["limit=x", "limit=", "limit=1.5", "limit=1e2", "limit=0x10", "offset=x", "offset=", "offset=NaN"],
    ])("%s", async (query) => {
      const answer = await at.tenant().send("GET", `/v1/invocations?${query}`);
      expectError(answer, 400, query.split("=")[0]);
    });
  });
});
