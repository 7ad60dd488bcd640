import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { Type } from "@sinclair/typebox";
import { Fault } from "../core/fault.ts";
import { type Log, type LogFields, silentLog } from "../core/log.ts";
import { type ActingRequest, actingRequest } from "../kernel/wait.ts";
import { routes } from "./elysia.ts";
import { bodyReader } from "./input.ts";
import { json } from "./responses.ts";
import { createAccessLog, createEdge, scopeOf, shownPath } from "./server.ts";

const lines: LogFields[] = [];
const record = (_event: string, fields: LogFields = {}) => void lines.push(fields);
const log: Log = { debug: record, info: record, warn: record, error: record };

const readThing = bodyReader(Type.Object({ name: Type.String() }, { additionalProperties: false }));

const waiting: (ActingRequest | null)[] = [];

/** Uses up the request's time for the database. */
function wait(): void {
  const request = actingRequest();
  waiting.push(request);
  request?.beginWait(0);
  request?.endWait(60_000);
}

const app = routes()
  .get("/v1/waits", ({ request }) => {
    wait();
    if (request.headers.has("x-fail")) throw new Fault("unavailable", "later", { retryAfterSeconds: 7 });
    return json("ok", { isOverdue: actingRequest()?.isOverdue() });
  })
  .get("/open", () => json("ok", { open: true }))
  .get("/v1/things/:id", ({ params, request }) => json("ok", { id: params.id, user: scopeOf(request).caller.user }))
  .post("/v1/things", async ({ request }) => json("created", await readThing(request)), { parse: "none" })
  .delete("/v1/things/:id", () => {
    throw new Fault("unavailable", "later", { retryAfterSeconds: 7 });
  })
  .get("/v1/broken", () => {
    throw new Error("secret inside");
  });

const edge = createEdge({
  app,
  log,
  authenticate(header) {
    if (header !== "Bearer good") throw new Fault("unauthenticated", "no", { cause: new Error("expired") });
    return { tenant: "t", user: "u", scopes: new Set() };
  },
});

let server: Bun.Server<undefined>;
beforeAll(() => {
  server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: (request) => edge.fetch(request) });
});
afterAll(() => server.stop(true));

const call = (path: string, init: RequestInit = {}) =>
  fetch(`http://127.0.0.1:${server.port}${path}`, {
    ...init,
    headers: { authorization: "Bearer good", ...(init.headers as Record<string, string>) },
  });

test("a route answers, and the response carries the caller's request ID", async () => {
  const response = await call("/v1/things/a%20b?x=1", { headers: { "x-request-id": "abc.1" } });
  expect([response.status, response.headers.get("x-request-id")]).toEqual([200, "abc.1"]);
  expect(response.headers.get("content-type")).toBe("application/json");
  expect(await response.json()).toEqual({ id: "a b", user: "u" });
  expect(lines.at(-1)).toMatchObject({
    path: "/v1/things/a%20b",
    status: 200,
    request_id: "abc.1",
    tenant: "t",
  });
});

test("a path that is no percent-encoded UTF-8 names nothing", async () => {
  for (const segment of ["%", "%zz", "%ff", "%c3%28"]) {
    const response = await call(`/v1/things/${segment}`);
    expect([segment, response.status, await response.json()]).toEqual([segment, 404, { error: "no such route" }]);
  }
});

test("a misspelt path is answered with the one that it is near to, and a long one with none", async () => {
  const errorOf = async (path: string) => ((await (await call(path)).json()) as { error: string }).error;
  expect(await errorOf("/v1/thing")).toBe("no such route; did you mean /v1/things?");
  expect(await errorOf("/v1/things/")).toBe("no such route; did you mean /v1/things?");
  expect(await errorOf("/v1/other")).toBe("no such route");
  expect(await errorOf(`/v1/${"things".repeat(20)}`)).toBe("no such route");
  expect(await errorOf(`/v1${"/x".repeat(300)}/thing`)).toBe("no such route");
});

test("a path without the prefix of the API, or with another, an extension or a plural, is answered with the route meant", async () => {
  const errorOf = async (path: string) => ((await (await call(path)).json()) as { error: string }).error;
  const prefixed = (route: string) => `no such route; did you mean ${route}? The API's routes begin with /v1`;
  expect(await errorOf("/things")).toBe(prefixed("/v1/things"));
  expect(await errorOf("/thing")).toBe(prefixed("/v1/things"));
  expect(await errorOf("/things/17")).toBe(prefixed("/v1/things/{id}"));
  expect(await errorOf("/api/things/")).toBe(prefixed("/v1/things"));
  expect(await errorOf("/docs/opens.md")).toBe("no such route; did you mean /open?");
  expect(await errorOf("/v1/others/thing")).toBe("no such route; did you mean /v1/things?");
  const startedAt = performance.now();
  for (const long of [`${"x".repeat(15_000)}!`, "/x".repeat(7_000), ".x".repeat(7_000), ".".repeat(15_000)])
    expect(await errorOf(`/${long}!`)).toBe("no such route");
  expect(performance.now() - startedAt).toBeLessThan(200);
});

test("a request ID of another form is replaced by a new one", async () => {
  const response = await call("/open", { headers: { "x-request-id": "a b" } });
  expect(response.headers.get("x-request-id")).toMatch(/^[0-9a-f-]{36}$/);
});

test("without a valid token every path under /v1 is 401 without a body, unknown ones too", async () => {
  for (const path of ["/v1", "/v1/", "/v1/nothing", "/v1/things/1"]) {
    const response = await call(path, { headers: { authorization: "Bearer bad" } });
    expect([response.status, response.headers.get("www-authenticate"), await response.text()]).toEqual([
      401,
      "Bearer",
      "",
    ]);
    expect(response.headers.get("x-request-id")).not.toBeNull();
  }
});

test("the log says why a token was refused", async () => {
  await call("/v1/things/1", { headers: { authorization: "Bearer bad" } });
  expect(lines.at(-1)).toMatchObject({ status: 401, why: "expired" });
});

test("JSON is served as nothing else", async () => {
  for (const path of ["/open", "/v1/things/1", "/nowhere"]) {
    expect((await call(path)).headers.get("x-content-type-options")).toBe("nosniff");
  }
});

test("an unknown route is 404, a wrong method 405 with Allow", async () => {
  expect((await call("/v1/nothing")).status).toBe(404);
  expect(await (await call("/nothing")).json()).toEqual({ error: "no such route" });
  const response = await call("/v1/things/1", { method: "PUT" });
  expect([response.status, response.headers.get("allow")]).toEqual([405, "GET, DELETE, HEAD"]);
});

test("a fault keeps its status and its wait; an unexpected error is 500 without a body", async () => {
  const fault = await call("/v1/things/1", { method: "DELETE" });
  expect([fault.status, fault.headers.get("retry-after"), await fault.json()]).toEqual([503, "7", { error: "later" }]);
  const broken = await call("/v1/broken", { headers: { "x-request-id": "b1" } });
  expect([broken.status, await broken.text()]).toEqual([500, ""]);
  const about = { method: "GET", path: "/v1/broken", request_id: "b1", tenant: "t" };
  expect(lines.at(-2)).toEqual({ ...about, error: expect.any(Fault) });
  expect(lines.at(-1)).toEqual({ ...about, status: 500, ms: expect.any(Number) });
});

test("a body must be JSON of the right form, and the error names the field", async () => {
  const post = async (body: string, type = "application/json"): Promise<unknown[]> => {
    const response = await call("/v1/things", { method: "POST", body, headers: { "content-type": type } });
    return [response.status, ((await response.json()) as { error: string }).error];
  };
  expect(await post('{"name":"x"}')).toEqual([201, undefined]);
  expect(await post("{}")).toEqual([400, "name: required"]);
  expect(await post("[]")).toEqual([400, "body: must be a JSON object"]);
  expect(await post('{"name":"x","a/b":1}')).toEqual([400, "a/b: unknown field; known here: name"]);
  // A misspelt field is told as such, although the right one is missing as well.
  expect(await post('{"nmae":"x"}')).toEqual([400, "nmae: unknown field; did you mean name?"]);
  expect(await post('{"x":1}')).toEqual([400, "name: required"]);
  expect(await post('{"name":1}')).toEqual([400, "name: must be a string"]);
  expect(await post('{"name":"x"}', "text/plain")).toEqual([400, "content-type: must be application/json"]);
  expect(await post("")).toEqual([400, "body: not valid JSON, since it is empty"]);
  expect(await post(`{"name":"${"x".repeat(1024 * 1024)}"}`)).toEqual([413, "body: larger than 1048576 bytes"]);
});

test("a chunked body over the limit is refused without being taken in whole", async () => {
  const body = new ReadableStream<Uint8Array<ArrayBuffer>>({
    start(controller) {
      for (let i = 0; i < 40; i++) controller.enqueue(new Uint8Array(65_536).fill(32));
      controller.close();
    },
  });
  const response = await call("/v1/things", {
    method: "POST",
    body,
    headers: { "content-type": "application/json" },
  });
  expect(response.status).toBe(413);
});

test.each([
  ["GET", "/open", 200],
  ["HEAD", "/open", 200],
  ["POST", "/open", 405],
  ["POST", "/nowhere", 404],
  ["POST", "/v1/things", 401],
  ["GET", "/v1/things/1", 200],
  ["DELETE", "/v1/things/1", 503],
])("the answer to %s %s ends its connection when a body in chunks goes on behind it", async (method, path, status) => {
  const socket = connect(Number(server.port), "127.0.0.1");
  const token = status === 401 ? "" : "Authorization: Bearer good\r\n";
  socket.write(`${method} ${path} HTTP/1.1\r\nHost: x\r\n${token}Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n`);
  let received = "";
  socket.on("data", (bytes) => {
    received += bytes;
  });
  await new Promise((resolve) => socket.once("close", resolve));
  expect(received).toStartWith(`HTTP/1.1 ${status} `);
});

test("HEAD answers like GET, without the body", async () => {
  const response = await call("/open", { method: "HEAD" });
  expect([response.status, await response.text()]).toEqual([200, ""]);
  expect(response.headers.get("content-length")).toBe(String('{"open":true}'.length));
  expect(lines.at(-1)).toMatchObject({ method: "HEAD", path: "/open", status: 200 });
});

const raw = (text: string) =>
  new Promise<string>((resolve, reject) => {
    let answer = "";
    const socket = connect(server.port ?? 0, "127.0.0.1", () => socket.write(text));
    socket.on("data", (data) => {
      answer += data;
    });
    socket.on("close", () => resolve(answer));
    socket.on("error", reject);
  });

describe.each(["", "a", ":1", "localhost"])("a path that a URL would write otherwise, to the host %p,", (host) => {
  const paths = ["/x/../v1/things", "/x/..\\v1/things", "/.%2e/v1/things", "/v1\\things", "/%2e%2e\\v1/things"];

  test.each(paths)("is judged as it is routed: %s", async (path) => {
    for (const method of ["GET", "HEAD", "POST"]) {
      const head = `${method} ${path} HTTP/1.1\r\nHost: ${host}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n`;
      expect(await raw(head)).toStartWith("HTTP/1.1 401");
    }
  });
});

test("a short host name does not move the path", async () => {
  const request = (path: string, extra = "") => `POST ${path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n${extra}`;
  expect(await raw(request("/v1/things", "Content-Length: 0\r\n\r\n"))).toStartWith("HTTP/1.1 401");
  expect(await raw(request("/x/v1/things", "Content-Length: 0\r\n\r\n"))).toStartWith("HTTP/1.1 404");
  const body = '{"name":"x"}';
  const headers = `Authorization: Bearer good\r\nContent-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`;
  expect(await raw(request("/v1/things", headers))).toStartWith("HTTP/1.1 201");
});

/** Sends bytes on a connection of its own, and resolves with all that came back when it is closed. */
function exchange(bytes: string): Promise<string> {
  const { promise, resolve } = Promise.withResolvers<string>();
  let answer = "";
  const socket = connect(server.port ?? 0, "127.0.0.1", () => void socket.write(bytes));
  socket.on("data", (data) => {
    answer += data;
  });
  socket.on("close", () => resolve(answer));
  return promise;
}

test.each([
  [
    "a length that is sent twice",
    "content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "content-length: must be one number of bytes",
  ],
  [
    "a trailer",
    "transfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n2\r\nab\r\n0\r\nx-t: 1\r\n\r\n",
    "trailer: trailers are not supported, so send the request without them",
  ],
  ["a host that is sent twice", "host: other\r\nconnection: close\r\n\r\n", "host: must be sent once"],
])("%s is 400 on every route, and the answer names the header", async (_, rest, error) => {
  for (const line of ["GET /open", "POST /v1/things", "GET /nowhere", "DELETE /v1/things/1"]) {
    const answer = await exchange(`${line} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer good\r\n${rest}`);
    expect(answer).toStartWith("HTTP/1.1 400");
    expect(answer).toContain(error);
  }
});

test.each(["/open", "/nowhere", "/v1/things/1"])(
  "strangers' requests to %s that come together are not all answered in one turn",
  async (path) => {
    const asked = 20_000;
    let answered = 0;
    const requests = Array.from({ length: asked }, async () => {
      await edge.fetch(new Request(`http://localhost${path}`));
      answered++;
    });
    for (let step = 0; step < 100; step++) await null;
    expect(answered).toBeLessThan(asked);
    await Promise.all(requests);
  },
);

describe.each(["/open", "/nowhere", "/v1/things/1"])("when strangers' requests wait, one to %s", (path) => {
  async function isAnsweredAtOnce(headers: Record<string, string>): Promise<[boolean, string | null]> {
    // The turn of the event loop is used up by the first.
    const first = edge.fetch(new Request("http://localhost/open"));
    for (const until = performance.now() + 20; performance.now() < until; );
    const asking = edge.fetch(new Request(`http://localhost${path}`, { method: "POST", headers }));
    let isAnswered = false;
    void asking.then(() => {
      isAnswered = true;
    });
    for (let step = 0; step < 100; step++) await null;
    const atOnce = isAnswered;
    await first;
    return [atOnce, (await asking).headers.get("connection")];
  }

  test("with much of a body does not, so that no body of one who asks is kept", async () => {
    for (const length of ["16385", "1000000", "3, 3"]) {
      const [isAtOnce, connection] = await isAnsweredAtOnce({ "content-length": length });
      // One connection full of these would keep the event loop, since none of them waits.
      expect([length, isAtOnce, connection]).toEqual([length, true, "close"]);
    }
    for (const length of ["0", "16384"])
      expect(await isAnsweredAtOnce({ "content-length": length })).toEqual([false, null]);
  });

  test("with a body in chunks does not either, and is the last on its connection", async () => {
    expect(await isAnsweredAtOnce({ "transfer-encoding": "chunked" })).toEqual([true, "close"]);
  });
});

test("when requests of a caller wait, few of those with bodies in chunks do, and others end their connections", async () => {
  const first = edge.fetch(new Request("http://localhost/open"));
  for (const until = performance.now() + 20; performance.now() < until; );
  const ask = (headers: Record<string, string>) =>
    edge.fetch(new Request("http://localhost/v1/things/1", { headers: { authorization: "Bearer good", ...headers } }));
  const plain = Array.from({ length: 40 }, () => ask({}));
  const chunked = Array.from({ length: 150 }, () => ask({ "transfer-encoding": "chunked" }));
  expect((await Promise.all(plain)).map(({ status }) => status)).toEqual(plain.map(() => 200));
  const answers = await Promise.all(chunked);
  expect(answers.filter(({ status }) => status === 200)).toHaveLength(112);
  const refused = answers.filter(({ status }) => status === 503);
  expect(refused).toHaveLength(38);
  for (const { headers } of refused)
    expect([headers.get("connection"), headers.get("retry-after")]).toEqual(["close", "5"]);
  await first;
});

test("requests of strangers get so many lines of the access log in a second, and one that sums up the others; those of callers all get one", async () => {
  const lines: [event: string, fields: LogFields][] = [];
  let heard = () => {};
  const info = (event: string, fields: LogFields = {}) => {
    lines.push([event, fields]);
    if (event !== "request") heard();
  };
  const access = createAccessLog({ ...silentLog, info });
  for (let round = 0; round < 2; round++) {
    const summedUp = new Promise<void>((resolve) => {
      heard = resolve;
    });
    for (let at = 0; at < 500; at++) {
      access.stranger({ at });
      access.known({ tenant: "t" });
      access.open({});
    }
    await summedUp;
    expect(lines.filter(([, { tenant }]) => tenant === "t")).toHaveLength(500);
    expect(lines.filter(([, { at }]) => at !== undefined)).toHaveLength(20);
    expect(lines.at(-1)).toEqual(["unauthenticated_requests", { count: 480 }]);
    lines.length = 0;
  }
});

test("a path is logged as far as any of our routes goes", () => {
  const longest = `/v1/${"x".repeat(252)}`;
  expect(shownPath(longest)).toBe(longest);
  expect(shownPath(`${longest}y`)).toBe(`${longest}…`);
});

test("what a request waits for the database is bounded until it is answered, whatever the answer is", async () => {
  expect(await (await call("/v1/waits")).json()).toEqual({ isOverdue: true });
  await call("/v1/waits", { headers: { "x-fail": "1" } });
  expect(waiting.map((request) => [request?.tenant, request?.isOverdue()])).toEqual([
    ["t", false],
    ["t", false],
  ]);
});
