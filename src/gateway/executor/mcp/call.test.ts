import { afterEach, describe, expect, test } from "bun:test";
import { startUpstream } from "../../../../test/support/http/upstream.ts";
import { answer, client, keep, LIST, stopKept, text } from "../../../../test/support/mcp/mcp-calls.ts";

afterEach(stopKept);

describe("a call of an mcp agent", () => {
  function recorder(respond: (request: Request, body: string) => Response) {
    const bodies: string[] = [];
    const seen: Headers[] = [];
    const upstream = keep(
      startUpstream(async (request) => {
        const body = await request.text();
        bodies.push(body);
        seen.push(request.headers);
        return respond(request, body);
      }),
    );
    return { upstream, bodies, seen };
  }
  const ok = () => Response.json({ jsonrpc: "2.0", id: 1, result: {} });

  test("leaves the caller's session, Accept and Content-Type behind, and passes its version and other headers", async () => {
    const { upstream, seen } = recorder(ok);
    await client().send(upstream.url, LIST, {
      call: {
        headers: [
          ["mcp-session-id", "stolen"],
          ["accept", "text/html"],
          ["content-type", "text/plain"],
          ["mcp-protocol-version", "2025-03-26"],
          ["mcp-vendor", "x"],
          ["traceparent", "00-1-2-3"],
        ],
      },
    });
    expect(Object.fromEntries(seen[0]!)).toMatchObject({
      accept: "application/json, text/event-stream",
      "content-type": "application/json",
      "mcp-protocol-version": "2025-03-26",
      "mcp-vendor": "x",
      traceparent: "00-1-2-3",
    });
    expect(seen[0]!.has("mcp-session-id")).toBe(false);
  });

  test("passes headers that say again what the body says only in a version that knows them", async () => {
    const { upstream, seen } = recorder(ok);
    const { send } = client();
    for (const version of ["2025-11-25", "2026-07-28"]) {
      const headers: [string, string][] = [
        ["mcp-protocol-version", version],
        ["mcp-method", "tools/list"],
      ];
      await send(upstream.url, LIST, { call: { headers } });
    }
    expect(seen.map((headers) => headers.get("mcp-method"))).toEqual([null, "tools/list"]);
  });

  test("is sent with the agent's version, else with the newest that has sessions", async () => {
    const { upstream, seen } = recorder(ok);
    const { send } = client();
    await send(upstream.url, LIST, { call: { mcp_protocol_version: "2025-06-18" } });
    await send(upstream.url, LIST);
    expect(seen.map((headers) => headers.get("mcp-protocol-version"))).toEqual(["2025-06-18", "2025-11-25"]);
  });

  test("passes unharmed in the form of 2026-07-28, whatever the answer", async () => {
    const { upstream, seen, bodies } = recorder(() => Response.json({ error: "no" }, { status: 400 }));
    const { send } = client();
    const byHeader = await send(upstream.url, LIST, {
      call: {
        headers: [
          ["mcp-protocol-version", "2026-07-28"],
          ["mcp-method", "tools/list"],
        ],
      },
    });
    const _meta = { "io.modelcontextprotocol/protocolVersion": "2026-07-28" };
    const modern = JSON.stringify({ ...LIST, params: { _meta } });
    await send(upstream.url, modern);
    expect(byHeader).toMatchObject({ status: "failed", error_class: "upstream_4xx", upstream_status: 400 });
    expect(bodies).toEqual([JSON.stringify(LIST), modern]);
    expect(seen.map((headers) => headers.get("mcp-protocol-version"))).toEqual(["2026-07-28", "2026-07-28"]);
  });

  test("keeps its refusal when the server opens no session, and is not sent again", async () => {
    const { upstream, bodies } = recorder((_, body) =>
      body.includes('"initialize"')
        ? Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2025-11-25" } })
        : Response.json({ nope: true }, { status: 400 }),
    );
    const { send } = client();
    for (let i = 0; i < 2; i++) {
      const outcome = await send(upstream.url, LIST);
      expect(outcome).toMatchObject({ error_class: "upstream_4xx", upstream_status: 400, resp_size: 13 });
      expect(answer(outcome)).toEqual({ nope: true });
    }
    expect(bodies.map((body) => (JSON.parse(body) as { method: string }).method)).toEqual([
      "tools/list",
      "initialize",
      "notifications/initialized",
      "tools/list",
    ]);
  });

  test("keeps its refusal when initialize fails", async () => {
    const { upstream, bodies } = recorder(() => new Response("nothing here", { status: 404 }));
    const outcome = await client().send(upstream.url, LIST);
    expect(outcome).toMatchObject({ error_class: "upstream_4xx", upstream_status: 404 });
    expect(text(outcome)).toBe("nothing here");
    expect(bodies).toHaveLength(2);
  });

  test("takes another version that was negotiated, without a session", async () => {
    const { upstream, seen } = recorder((request, body) => {
      if (body.includes('"initialize"')) {
        return Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2024-11-05" } });
      }
      if (body.includes("notifications/")) return new Response(null, { status: 202 });
      const isKnown = request.headers.get("mcp-protocol-version") === "2024-11-05";
      return isKnown ? ok() : new Response("unsupported version", { status: 400 });
    });
    const { send } = client();
    expect((await send(upstream.url, LIST)).status).toBe("succeeded");
    expect((await send(upstream.url, LIST)).status).toBe("succeeded");
    expect(seen).toHaveLength(5);
  });

  test("is answered by 400 with a result, or with an error of the application: the call ran", async () => {
    for (const part of [{ result: {} }, { error: { code: 42, message: "no" } }]) {
      const { upstream, bodies } = recorder(() => Response.json({ jsonrpc: "2.0", id: 1, ...part }, { status: 400 }));
      expect(await client().send(upstream.url, LIST)).toMatchObject({ upstream_status: 400 });
      expect(bodies).toHaveLength(1);
    }
  });

  test("is sent at most twice, however often it is refused", async () => {
    let sessions = 0;
    const { upstream, bodies } = recorder((request, body) => {
      if (request.method === "DELETE") return new Response();
      if (!body.includes('"initialize"')) return new Response("", { status: body.includes("tools") ? 404 : 202 });
      const headers = { "mcp-session-id": `s${++sessions}` };
      return Response.json({ jsonrpc: "2.0", id: 1, result: { protocolVersion: "2025-11-25" } }, { headers });
    });
    const { send } = client();
    for (let i = 0; i < 2; i++) expect(await send(upstream.url, LIST)).toMatchObject({ upstream_status: 404 });
    expect(bodies.filter((body) => body.includes("tools/list"))).toHaveLength(4);
    expect(sessions).toBe(2);
  });

  test("is never sent again after a server error", async () => {
    const { upstream, bodies } = recorder(() => new Response("", { status: 503 }));
    expect(await client().send(upstream.url, LIST)).toMatchObject({ error_class: "upstream_5xx" });
    expect(bodies).toHaveLength(1);
  });

  test("opens no session that stays by an initialize of its caller", async () => {
    const gone = Promise.withResolvers<string | null>();
    const { upstream } = recorder((request) => {
      if (request.method === "DELETE") gone.resolve(request.headers.get("mcp-session-id"));
      return Response.json({ jsonrpc: "2.0", id: 1, result: {} }, { headers: { "mcp-session-id": "orphan" } });
    });
    expect((await client().send(upstream.url, { ...LIST, method: "initialize" })).status).toBe("succeeded");
    expect(await gone.promise).toBe("orphan");
  });
});
