import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { connect } from "node:net";
import fc from "fast-check";
import { Fault } from "../core/fault.ts";
import type { Log, LogFields } from "../core/log.ts";
import { routes } from "./elysia.ts";
import { json } from "./responses.ts";
import { createEdge, type Scope, scopeOf } from "./server.ts";

async function answer(request: Request, { caller, requestId, method, note }: Scope, id: string): Promise<Response> {
  note("thing", id);
  if (id === "broken") throw new Error("secret inside");
  const body = await request.text();
  if (id === "taken") throw new Fault("conflict", "it is taken", { retryAfterSeconds: 3 });
  return json("accepted", { id, body, user: caller.user, requestId, method }, { location: `/v1/things/${id}` });
}

const app = routes()
  .post("/v1/things/:id", ({ request, params }) => answer(request, scopeOf(request), params.id), { parse: "none" })
  .get("/v1/things/:id/parts", ({ params }) => json("ok", { of: params.id }))
  .get("/v1/things", () => json("ok", []));

/** A server whose edge has the fast path or not, what its log says, and how often the fast path was taken. */
function serve(hasFastPath: boolean) {
  const lines: unknown[] = [];
  let taken = 0;
  const record = (event: string, { ms, error, ...fields }: LogFields = {}) => {
    // It comes a second after the first stranger, which is no time of the request that is under way then.
    if (event === "unauthenticated_requests") return;
    lines.push([event, fields, typeof ms, error instanceof Fault && error.kind]);
  };
  const log: Log = { debug: record, info: record, warn: record, error: record };
  const edge = createEdge({
    app,
    log,
    async authenticate(header) {
      if (header !== "Bearer good") throw new Fault("unauthenticated", "no");
      return { tenant: "t", user: "u", scopes: new Set() };
    },
    permit(_caller, _method, path) {
      if (path.includes("private")) throw new Fault("forbidden", "not for you");
    },
    ...(hasFastPath && {
      fastPath: {
        method: "POST",
        prefix: "/v1/things/",
        answer(request, scope, id) {
          taken++;
          return answer(request, scope, id);
        },
      },
    }),
  });
  const server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: (request) => edge.fetch(request) });
  const ask = async (bytes: Buffer): Promise<{ answered: string; logged: unknown[] }> => {
    lines.length = 0;
    const answered = await exchange(server.port ?? 0, bytes);
    return { answered: answered.replace(/^date: .*\r\n/im, ""), logged: [...lines] };
  };
  return { ask, edge, stop: () => server.stop(true), taken: () => taken };
}

const exchange = (port: number, bytes: Buffer) =>
  new Promise<string>((resolve, reject) => {
    const parts: Buffer[] = [];
    const socket = connect(port, "127.0.0.1", () => socket.write(bytes));
    socket.on("data", (data) => parts.push(Buffer.from(data)));
    socket.on("close", () => resolve(Buffer.concat(parts).toString("latin1")));
    socket.on("error", reject);
  });

interface Sent {
  readonly method: string;
  readonly target: string;
  readonly host: string;
  readonly token: string;
}

function bytesOf({ method, target, host, token }: Sent): Buffer {
  const own = [`Host: ${host}`, `Authorization: Bearer ${token}`, "X-Request-ID: r1"];
  const head = [`${method} ${target} HTTP/1.1`, ...own, "Content-Length: 4", "Connection: close", "", ""];
  return Buffer.from(`${head.join("\r\n")}body`, "latin1");
}

let fast: ReturnType<typeof serve>;
let usual: ReturnType<typeof serve>;
beforeAll(() => {
  [fast, usual] = [serve(true), serve(false)];
});
afterAll(async () => {
  await Promise.all([fast, usual].map((server) => server.stop()));
});

/** What both answer and log, which must be the same, and whether the fast path was taken. */
async function asked(sent: Partial<Sent>) {
  const bytes = bytesOf({ method: "POST", target: "/v1/things/x", host: "localhost", token: "good", ...sent });
  const before = fast.taken();
  const [one, other] = [await fast.ask(bytes), await usual.ask(bytes)];
  // Strangers have so many lines a second, and the second of each server began at another time.
  if (sent.token === "bad") expect(one.answered).toBe(other.answered);
  else expect(one).toEqual(other);
  return { ...one, wasFast: fast.taken() > before };
}

describe("the fast path", () => {
  test.each([
    ["/v1/things/x", "202"],
    ["/v1/things/agt_0190163d-8694-739b-aea5-966c26f8ad91?a=/../b", "202"],
    ["http://elsewhere.test/v1/things/x", "202"],
    ["/v1/things/taken", "409"],
    ["/v1/things/broken", "500"],
  ])("answers %s as the router does: %s", async (target, status) => {
    for (const host of ["localhost", "a"]) {
      const { answered, wasFast } = await asked({ target, host });
      expect([answered.slice(9, 12), wasFast]).toEqual([status, true]);
    }
  });

  test.each([
    ["POST", "/v1/things/%78", "202"],
    ["POST", "/v1/things/x%2fy", "202"],
    ["POST", "/v1/things//x", "404"],
    ["POST", "/v1/things/x/", "404"],
    ["POST", "/v1/things/", "404"],
    ["POST", "/v1/things/%zz", "404"],
    ["POST", "/V1/things/x", "404"],
    ["POST", "/v1/things/x/parts", "405"],
    ["PUT", "/v1/things/x", "405"],
    ["HEAD", "/v1/things/x", "405"],
    ["GET", "/v1/things/x/parts", "200"],
  ])("is not for %s %s, which the router answers: %s", async (method, target, status) => {
    const { answered, wasFast } = await asked({ method, target });
    expect([answered.slice(9, 12), wasFast]).toEqual([status, false]);
  });

  test("is behind every check of the edge", async () => {
    const refused = [await asked({ token: "bad" }), await asked({ target: "/v1/things/private" })];
    expect(refused.map(({ answered }) => answered.slice(9, 12))).toEqual(["401", "403"]);
    expect(refused.map(({ wasFast }) => wasFast)).toEqual([false, false]);
  });

  test("gives the answer and the log line of the router, however the request is written", async () => {
    const piece = fc.constantFrom(
      ...["/v1/things/", "/v1/", "things", "/", "//", "x", "a-b_c", "%78", "%2f", "%2e%2e", "..", ".", "\\", ";", "+"],
      ...["?", "?q=/v1/things/x", "#f", "%", "%ff", "%00", "\u00e9", "parts", "taken", "broken", "private", ":id", "*"],
    );
    const path = fc.array(piece, { maxLength: 5 }).map((pieces) => pieces.join(""));
    const plain = fc.constantFrom("/v1/things/x", "/v1/things/x?");
    const start = fc.constantFrom("/v1/things/", "/", "http://other/v1/things/", "/x/../v1/things/", "*");
    const odd = fc.tuple(start, path).map((parts) => parts.join(""));
    const sent = fc.record({
      method: fc.constantFrom("POST", "POST", "POST", "GET", "HEAD", "PUT", "OPTIONS", "DELETE", "PATCH"),
      target: fc.oneof(plain, odd),
      host: fc.constantFrom("localhost", "localhost", "a", "", ":1", "[::1]", "x/y", "a?b", "host:99999"),
      token: fc.constantFrom("good", "good", "good", "bad"),
    });
    const before = fast.taken();
    await fc.assert(
      fc.asyncProperty(sent, async (request) => void (await asked(request))),
      { numRuns: 500 },
    );
    expect(fast.taken() - before).toBeGreaterThan(10);
  });

  test("ends with the others when the service shuts down", async () => {
    for (const { edge } of [fast, usual]) edge.drain();
    const { answered, wasFast } = await asked({});
    expect([answered.slice(9, 12), wasFast]).toEqual(["503", false]);
  });
});
