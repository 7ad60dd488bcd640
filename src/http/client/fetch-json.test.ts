import { afterEach, describe, expect, test } from "bun:test";
import { hostRules } from "../../core/host.ts";
import { OutboundError } from "./exchange.ts";
import { createOutbound, fetchDocument, fetchJson } from "./outbound.ts";

const outbound = createOutbound({ rules: hostRules({ allow: ["127.0.0.1"] }), extraCa: null });

const servers: Bun.Server<undefined>[] = [];
afterEach(async () => {
  for (const server of servers.splice(0)) await server.stop(true);
});

function answering(answer: () => Response | Promise<Response>): Bun.Server<undefined> {
  const server = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: answer });
  servers.push(server);
  return server;
}

async function kindOf(work: Promise<unknown>): Promise<string> {
  const error = await work.then(
    () => null,
    (failed: unknown) => failed,
  );
  return error instanceof OutboundError ? error.kind : `${error}`;
}

describe("a JSON document that is fetched", () => {
  const json = (text: string, status = 200) => answering(() => new Response(text, { status }));

  test("comes with status and value, or with nothing where there is no JSON", async () => {
    const cases: Array<[string, number, unknown]> = [
      ['{"a":[1]}', 200, { a: [1] }],
      ['{"errors":[]}', 404, { errors: [] }],
      ["<html>", 503, undefined],
    ];
    for (const [text, status, body] of cases) {
      const { port } = json(text, status);
      expect(await fetchJson(outbound, `http://127.0.0.1:${port}/`, { "x-a": "b" })).toEqual({
        status,
        body,
      });
    }
  });

  test("is a 200 with JSON", async () => {
    const get = (text: string, status = 200) => fetchDocument(outbound, `http://127.0.0.1:${json(text, status).port}/`);
    expect(await get('{"keys":[]}')).toEqual({ keys: [] });
    expect(await kindOf(get("{}", 201))).toBe("lost");
    expect(await kindOf(get("{}", 302))).toBe("lost");
    expect(await kindOf(get("{"))).toBe("lost");
  });

  test("is bounded in size and time", async () => {
    const { port } = json(`"${"a".repeat(100)}"`);
    const url = `http://127.0.0.1:${port}/`;
    expect(await kindOf(fetchJson(outbound, url, {}, { timeoutMs: 5000, bytesMax: 50 }))).toBe("lost");
    const silent = answering(() => new Promise<Response>(() => {}));
    const slow = `http://127.0.0.1:${silent.port}/`;
    expect(await kindOf(fetchJson(outbound, slow, {}, { timeoutMs: 30, bytesMax: 50 }))).toBe("lost");
  });
});
