// An MCP session belongs to the user it was opened for: the ID that its caller has is good for that user and that agent
// alone, for as long as the upstream keeps the session, and no other is good for anything.
import { describe, expect, test } from "bun:test";
import { type Answer, contract, expectError, MCP, type Seen, type Tenant } from "./contract.ts";

const LIST = { jsonrpc: "2.0", id: 1, method: "tools/list" };
const OPEN = { jsonrpc: "2.0", id: 1, method: "initialize", params: {} };
const METHODS = ["POST", "GET", "DELETE"] as const;
/** Of a server that takes the protocol at its word. */
const ODD = `!"#$%&'()*+,-./:;<=>?@[\\]^_\`{|}~.AZaz09`;

const sessionOf = (answer: Answer) => answer.headers.get("mcp-session-id") ?? "none";

contract((at) => {
  /** An mcp server whose every session has the same ID, and who names it in each answer, as the SDK's does. */
  async function server(id = ODD, fields: object = {}) {
    const route = at.upstream(
      ({ body, method }) =>
        new Response(method === "POST" ? new TextDecoder().decode(body) : "x", {
          headers: { "mcp-session-id": id, "content-type": "application/json" },
        }),
    );
    const tenant = at.tenant();
    const agent = await tenant.agent({ ...MCP, upstream_url: route.url, ...fields });
    return { route, tenant, path: `/v1/proxy/${agent.id}/stream` };
  }

  const open = async (tenant: Tenant, path: string) => sessionOf(await tenant.send("POST", path, { json: OPEN }));

  const use = (
    tenant: Tenant,
    path: string,
    session: string,
    method: string,
    sending: { user?: string; headers?: Record<string, string> } = {},
  ) =>
    tenant.send(method, path, {
      ...sending,
      ...(method === "POST" && { json: LIST }),
      headers: { "mcp-session-id": session, ...sending.headers },
    });

  const lastSession = (seen: readonly Seen[]) => seen.at(-1)?.headers.get("mcp-session-id");

  test.each(METHODS)("%s in a session reaches it for its user, and the upstream sees its own ID", async (method) => {
    const { route, tenant, path } = await server();
    const session = await open(tenant, path);
    expect(session).toStartWith(`${ODD}.`);
    expect(session).toMatch(/^[\x21-\x7e]+$/);
    const answer = await use(tenant, path, session, method);
    expect(answer.status).toBe(200);
    // Answers that name it again name it in the same way.
    expect(sessionOf(answer)).toBe(session);
    expect(lastSession(route.seen)).toBe(ODD);
  });

  test.each(METHODS)("%s in a session finds it gone for everybody else", async (method) => {
    const { route, tenant, path } = await server();
    const session = await open(tenant, path);
    const other = await tenant.agent({ ...MCP, upstream_url: route.url });
    const stranger = await server();
    const count = route.seen.length;
    const tries: Answer[] = [
      await use(tenant, path, session, method, { user: "bob" }),
      await use(tenant, `/v1/proxy/${other.id}/stream`, session, method),
      await use(stranger.tenant, stranger.path, session, method),
      await use(tenant, path, ODD, method),
      await use(tenant, path, `${session.slice(0, -1)}${session.endsWith("A") ? "B" : "A"}`, method),
      await use(tenant, path, session.toLowerCase(), method),
      await use(tenant, path, `${session};`, method),
      await use(tenant, path, `${session}, ${session}`, method),
      await use(tenant, path, "", method),
    ];
    for (const answer of tries) expectError(answer, 404, "session");
    expect(route.seen.length).toBe(count);
    expect(stranger.route.seen).toEqual([]);
    expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
    expect((await use(tenant, path, session, method)).status).toBe(200);
  });

  test("a stream is resumed in a session of one's own, and not otherwise", async () => {
    const { route, tenant, path } = await server();
    const session = await open(tenant, path);
    const resume = { headers: { "last-event-id": "7" } };
    expectError(await tenant.send("GET", path, resume), 404, "session");
    expectError(await use(tenant, path, session, "GET", { user: "bob", ...resume }), 404, "session");
    expect(route.seen.length).toBe(1);
    expect((await use(tenant, path, session, "GET", resume)).status).toBe(200);
    expect(route.seen.at(-1)?.headers.get("last-event-id")).toBe("7");
    // Other methods resume nothing, for any server.
    await use(tenant, path, session, "POST", resume);
    await tenant.send("POST", path, { json: LIST, ...resume });
    await use(tenant, path, session, "DELETE", resume);
    expect(route.seen.slice(2).map(({ headers }) => headers.get("last-event-id"))).toEqual([null, null, null]);
  });

  test("a caller that names no session has none, and a server without sessions is asked as it was", async () => {
    const route = at.upstream(() => Response.json({}));
    const tenant = at.tenant();
    const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
    for (const method of METHODS) {
      const sending = method === "POST" ? { json: LIST } : {};
      const answer = await tenant.send(method, `/v1/proxy/${id}/stream`, sending);
      expect([answer.status, answer.headers.has("mcp-session-id")]).toEqual([200, false]);
    }
    expect(route.seen.map(({ headers }) => headers.has("mcp-session-id"))).toEqual([false, false, false]);
  });

  test("a session ID that the protocol does not know is not passed on", async () => {
    for (const id of ["with a blank", "x".repeat(1025)]) {
      const { tenant, path } = await server(id);
      const answer = await tenant.send("POST", path, { json: OPEN });
      expect([answer.status, answer.headers.has("mcp-session-id")]).toEqual([200, false]);
    }
  });

  test("the session header of a call of an http agent is one like others", async () => {
    const { route, tenant, path } = await server("theirs", { protocol: "http", mcp_transport: null });
    const answer = await use(tenant, path, "mine", "POST");
    expect([answer.status, sessionOf(answer), lastSession(route.seen)]).toEqual([200, "theirs", "mine"]);
  });

  describe("after a restart", () => {
    test("a session is its user's as before, and nobody else's", async () => {
      const { route, tenant, path } = await server();
      const session = await open(tenant, path);
      await at.gateway.kill9();
      await at.gateway.restart();
      for (const method of METHODS) {
        expectError(await use(tenant, path, session, method, { user: "bob" }), 404, "session");
        expect((await use(tenant, path, session, method)).status).toBe(200);
        expect(lastSession(route.seen)).toBe(ODD);
      }
    });
  });
});
