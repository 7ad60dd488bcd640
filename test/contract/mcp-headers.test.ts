// The headers that say again what an MCP message says: they reach the server as the body has it, or not at all.
import { describe, expect, test } from "bun:test";
import { type Contract, contract, expectError, type Json, MCP, type Seen } from "./contract.ts";

const MODERN = "2026-07-28";
const CALL = {
  jsonrpc: "2.0",
  id: 1,
  method: "tools/call",
  params: { name: "cheap", arguments: { region: "eu", note: "us" } },
};
const TRUE = { "mcp-method": "tools/call", "mcp-name": "cheap", "mcp-param-region": "eu" };
const WRONG: ReadonlyArray<readonly [header: string, value: string]> = [
  ["Mcp-Method", "tools/list"],
  ["Mcp-Name", "dear"],
  ["Mcp-Name", `=?base64?${btoa("dear")}?=`],
  ["Mcp-Param-region", "us"],
  ["Mcp-Param-other", "none"],
];

const answer = ({ body }: Seen) => {
  const { id = null } = body.length === 0 ? {} : JSON.parse(new TextDecoder().decode(body));
  return Response.json({ jsonrpc: "2.0", id, result: {} });
};
const mirrored = ({ headers }: Seen) =>
  Object.fromEntries([...headers].filter(([name]) => /^mcp-(method|name|param-)/.test(name)));

contract((at: Contract) => {
  const agentOf = async (fields: object = MCP, handler: (seen: Seen) => Response = answer) => {
    const route = at.upstream(handler);
    const tenant = at.tenant();
    const { id } = await tenant.agent({ upstream_url: route.url, ...fields });
    return { route, tenant, path: `/v1/proxy/${id}`, id: String(id) };
  };

  describe.each([
    ["a polled call", ""],
    ["a streamed call", "/stream"],
  ])("%s", (_name, suffix) => {
    test.each(WRONG)(
      "is refused when a header says something else in %s (%s), and leaves nothing",
      async (header, value) => {
        const { route, tenant, path } = await agentOf();
        const headers = { ...TRUE, "mcp-protocol-version": MODERN, [header.toLowerCase()]: value };
        expectError(await tenant.send("POST", `${path}${suffix}`, { json: CALL, headers }), 400, header);
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
        expect(route.seen.length).toBe(0);
      },
    );

    test("passes with its headers when they say the same", async () => {
      const { route, tenant, path } = await agentOf();
      const headers = { ...TRUE, "mcp-protocol-version": MODERN };
      await tenant.send("POST", `${path}${suffix}`, { json: CALL, headers });
      const seen = await route.arrival();
      expect(mirrored(seen)).toEqual(TRUE);
      expect(seen.headers.get("mcp-protocol-version")).toBe(MODERN);
    });

    test.each(["2025-11-25", null])(
      "leaves the headers behind in a version that does not know them (%p)",
      async (version) => {
        const { route, tenant, path } = await agentOf();
        const headers = {
          ...TRUE,
          "mcp-name": "dear",
          ...(version !== null && { "mcp-protocol-version": version }),
        };
        await tenant.send("POST", `${path}${suffix}`, { json: CALL, headers });
        // The handshake of a polled call comes first.
        for (let number = 1; ; number++) {
          const seen = await route.arrival(number);
          expect(mirrored(seen)).toEqual({});
          if (new TextDecoder().decode(seen.body).includes("tools/call")) break;
        }
      },
    );

    test("leaves the headers behind for an http agent, whose body nobody reads", async () => {
      const { route, tenant, path } = await agentOf({});
      const headers = { ...TRUE, "mcp-name": "dear", "mcp-protocol-version": MODERN, "mcp-other": "1" };
      await tenant.send("POST", `${path}${suffix}`, { json: CALL, headers });
      const seen = await route.arrival();
      expect(mirrored(seen)).toEqual({});
      expect([seen.headers.get("mcp-protocol-version"), seen.headers.get("mcp-other")]).toEqual([MODERN, "1"]);
    });

    test("passes no header twice, and none under a name that a server may read as another", async () => {
      const { route, tenant, path } = await agentOf();
      const twice = new Headers({ ...TRUE, "mcp-protocol-version": MODERN });
      twice.append("mcp-name", "dear");
      const send = async (headers: Headers) =>
        fetch(`${at.gateway.url}${path}${suffix}`, {
          method: "POST",
          headers: {
            ...Object.fromEntries(headers),
            authorization: `Bearer ${await tenant.token()}`,
            "content-type": "application/json",
          },
          body: JSON.stringify(CALL),
        });
      expect((await send(twice)).status).toBe(400);
      const underscored = new Headers({ ...TRUE, "mcp-protocol-version": MODERN, "mcp-param_region": "us" });
      expect((await send(underscored)).status).toBe(400);
      underscored.set("mcp-param_region", "eu");
      for (const name of ["mcp_name", "mcp-session_id", "mcp-protocol_version"]) underscored.set(name, "dear");
      expect((await send(underscored)).ok).toBe(true);
      const { headers } = await route.arrival();
      const named = [...headers.keys()].filter((name) => name.includes("_"));
      expect(named).toEqual(["mcp-param_region"]);
    });

    test("names its tool in Base64 where no header could carry it", async () => {
      const { route, tenant, path } = await agentOf();
      const json = { ...CALL, params: { ...CALL.params, name: "größer" } };
      const wrapped = (text: string) => `=?base64?${Buffer.from(text).toString("base64")}?=`;
      const headers = { ...TRUE, "mcp-protocol-version": MODERN, "mcp-name": wrapped("größer") };
      const answer = await tenant.send("POST", `${path}${suffix}`, { json, headers });
      expect(answer.status).toBe(suffix === "" ? 202 : 200);
      expect((await route.arrival()).headers.get("mcp-name")).toBe(wrapped("größer"));
      const other = { ...headers, "mcp-name": wrapped("Größer") };
      expectError(await tenant.send("POST", `${path}${suffix}`, { json, headers: other }), 400, "Mcp-Name");
    });
  });

  test("a message that is free and judged by nobody can't name a tool in its headers", async () => {
    const { route, tenant, path } = await agentOf();
    const headers = { "mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": "dear" };
    const json = { jsonrpc: "2.0", id: 1, method: "ping" };
    expectError(await tenant.send("POST", `${path}/stream`, { json, headers }), 400, "Mcp-Method");
    const { "mcp-method": _, ...named } = headers;
    expectError(await tenant.send("POST", `${path}/stream`, { json, headers: named }), 400, "Mcp-Name");
    expectError(await tenant.send("POST", `${path}/stream`, { json: [json], headers: named }), 400, "Mcp-Name");
    expect(route.seen.length).toBe(0);
  });

  test("a GET and a DELETE have no message, so they pass no header about one", async () => {
    const { route, tenant, path } = await agentOf();
    const headers = { ...TRUE, "mcp-protocol-version": MODERN };
    await tenant.send("GET", `${path}/stream`, { headers });
    await tenant.send("DELETE", `${path}/stream`, { headers });
    expect([await route.arrival(1), await route.arrival(2)].map(mirrored)).toEqual([{}, {}]);
  });

  test.each(["", "/stream"])("a call may name its version in the body alone (%p)", async (suffix) => {
    const { route, tenant, path: base } = await agentOf();
    const path = `${base}${suffix}`;
    const _meta = { "io.modelcontextprotocol/protocolVersion": MODERN };
    const json = { ...CALL, params: { ...CALL.params, _meta } };
    expectError(await tenant.send("POST", path, { json, headers: { ...TRUE, "mcp-name": "dear" } }), 400, "Mcp-Name");
    await tenant.send("POST", path, { json, headers: TRUE });
    expect(mirrored(await route.arrival())).toEqual(TRUE);
  });

  test("an agent of the new version whose server agrees on an old one is not sent the headers either", async () => {
    const old = (seen: Seen): Response => {
      const message: Json = JSON.parse(new TextDecoder().decode(seen.body));
      if (message.method === "tools/call" && seen.headers.get("mcp-session-id") === null) {
        return new Response(null, { status: 400 });
      }
      const result = { protocolVersion: "2025-11-25", capabilities: {}, serverInfo: { name: "old" } };
      const headers = { "mcp-session-id": "s" };
      return Response.json({ jsonrpc: "2.0", id: message.id ?? null, result }, { headers });
    };
    const { route, tenant, id } = await agentOf({ ...MCP, mcp_protocol_version: MODERN }, old);
    expect(await tenant.invoke(id, { json: CALL, headers: TRUE })).toMatchObject({ status: "succeeded" });
    const sent = route.seen.filter(({ body }) => new TextDecoder().decode(body).includes("tools/call"));
    const versions = sent.map((seen) => [seen.headers.get("mcp-protocol-version"), mirrored(seen)]);
    expect(versions).toEqual([
      [MODERN, TRUE],
      ["2025-11-25", {}],
    ]);
  });
});
