import { afterEach, expect, test } from "bun:test";
import { connect } from "node:net";
import { Fault } from "../core/fault.ts";
import { silentLog } from "../core/log.ts";
import { routes } from "./elysia.ts";
import { Intake, type IntakeLimits } from "./intake.ts";
import { createEdge, scopeOf } from "./server.ts";

const KIB = 1024;
const LIMITS: IntakeLimits = {
  streamBytes: 0,
  bytesMax: 1024 * KIB,
  msMax: 20_000,
  silenceMsMax: 10_000,
};

function readerOf(limits: IntakeLimits): Intake["readBytes"] {
  const intake = new Intake(limits);
  return (...asked) => intake.readBytes(...asked);
}
const BODY_BYTES_MAX = 400 * KIB;

/** A body that comes as the test wants it to. */
function upload(declared?: number) {
  const pipe = new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>();
  const writer = pipe.writable.getWriter();
  const headers = declared === undefined ? {} : { "content-length": String(declared) };
  return {
    request: new Request("http://localhost/", { method: "POST", body: pipe.readable, headers }),
    /** Resolves when the bytes are taken in. */
    async send(bytes: number) {
      await writer.write(new Uint8Array(bytes).fill(65));
      await writer.ready;
      // What has been read is taken in a turn later.
      for (let turn = 0; turn < 3; turn++) await new Promise((resolve) => setImmediate(resolve));
    },
    end: () => writer.close(),
    breakOff: () => writer.abort(new Error("gone")),
  };
}

const whole = (bytes: number) =>
  new Request("http://localhost/", {
    method: "POST",
    body: new ReadableStream({
      start(controller) {
        for (let left = bytes; left > 0; left -= 10 * KIB) controller.enqueue(new Uint8Array(Math.min(left, 10 * KIB)));
        controller.close();
      },
    }),
  });

async function faultOf(work: Promise<unknown>): Promise<Fault> {
  const error = await work.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  if (error instanceof Fault) return error;
  throw new Error("nothing was refused", { cause: error });
}

test("a body comes whole, in however many pieces, with and without a length", async () => {
  const read = readerOf(LIMITS);
  for (const size of [0, 1, 64 * KIB, 64 * KIB + 1, 200 * KIB + 7, BODY_BYTES_MAX]) {
    const sent = crypto.getRandomValues(new Uint8Array(Math.min(size, 64 * KIB)));
    const bytes = Buffer.concat(Array(7).fill(sent)).subarray(0, size);
    for (const declared of [undefined, size]) {
      for (const piece of [1000, 64 * KIB, BODY_BYTES_MAX]) {
        const body = new ReadableStream<Uint8Array>({
          start(controller) {
            for (let at = 0; at < size; at += piece) controller.enqueue(new Uint8Array(bytes.subarray(at, at + piece)));
            controller.close();
          },
        });
        const headers = declared === undefined ? {} : { "content-length": String(declared) };
        const request = new Request("http://localhost/", { method: "POST", body, headers });
        const taken = await read(request, "t", BODY_BYTES_MAX);
        expect(Buffer.compare(taken, bytes)).toBe(0);
        // Nothing is held beside the body.
        expect(taken.buffer.byteLength).toBe(size);
      }
    }
  }
  expect(await read(new Request("http://localhost/"), "t", 1)).toEqual(new Uint8Array());
});

test("a body that has not come takes nobody's place", async () => {
  const read = readerOf(LIMITS);
  const idle = Array.from({ length: 100 }, (_, index) => upload(index % 2 ? BODY_BYTES_MAX : undefined));
  const reading = idle.map(({ request }) => faultOf(read(request, "idle", BODY_BYTES_MAX)));
  await Promise.all(idle.map(({ send }) => send(1)));
  for (const tenant of ["idle", "other"])
    expect((await read(whole(BODY_BYTES_MAX), tenant, BODY_BYTES_MAX)).byteLength).toBe(BODY_BYTES_MAX);
  await Promise.all(idle.map(({ breakOff }) => breakOff()));
  for (const fault of await Promise.all(reading)) expect(fault.message).toBe("body: the request body ended early");
});

test("a tenant that holds its share is refused more, and nobody else is", async () => {
  const read = readerOf(LIMITS);
  const held = upload();
  const reading = read(held.request, "greedy", BODY_BYTES_MAX);
  await held.send(300 * KIB);
  const stored = Promise.withResolvers<void>();
  await read(whole(350 * KIB), "greedy", BODY_BYTES_MAX, { until: stored.promise });
  // Alone it may have seven eighths of everything.
  const fault = await faultOf(read(whole(300 * KIB), "greedy", BODY_BYTES_MAX));
  expect(fault).toMatchObject({ kind: "unavailable", retryAfterSeconds: 5, closesConnection: false });
  // What is tiny is nobody's burden.
  expect((await read(whole(4 * KIB), "greedy", BODY_BYTES_MAX)).byteLength).toBe(4 * KIB);
  expect((await read(whole(200 * KIB), "other", BODY_BYTES_MAX)).byteLength).toBe(200 * KIB);
  stored.resolve();
  await held.end();
  expect((await reading).byteLength).toBe(300 * KIB);
});

test("all tenants together hold no more than the whole", async () => {
  const read = readerOf(LIMITS);
  const held = ["a", "b", "c"].map((tenant) => {
    const body = upload();
    return { body, reading: read(body.request, tenant, BODY_BYTES_MAX) };
  });
  for (const { body } of held) await body.send(180 * KIB);
  expect((await faultOf(read(whole(300 * KIB), "d", BODY_BYTES_MAX))).kind).toBe("unavailable");
  expect((await read(whole(100 * KIB), "d", BODY_BYTES_MAX)).byteLength).toBe(100 * KIB);
  for (const { body } of held) await body.end();
  await Promise.all(held.map(({ reading }) => reading));
  expect((await read(whole(200 * KIB), "d", BODY_BYTES_MAX)).byteLength).toBe(200 * KIB);
});

test("what a body held is given back, however it ends", async () => {
  const read = readerOf({ ...LIMITS, bytesMax: 600 * KIB });
  for (let round = 0; round < 5; round++) {
    expect((await read(whole(BODY_BYTES_MAX), "t", BODY_BYTES_MAX)).byteLength).toBe(BODY_BYTES_MAX);
    expect((await faultOf(read(whole(BODY_BYTES_MAX + 1), "t", BODY_BYTES_MAX))).kind).toBe("payload_too_large");
    const broken = upload();
    const reading = faultOf(read(broken.request, "t", BODY_BYTES_MAX));
    await broken.send(300 * KIB);
    await broken.breakOff();
    expect((await reading).message).toBe("body: the request body ended early");
    const [first, second] = [upload(), upload()];
    const both = [first, second].map(({ request }) => read(request, "t", BODY_BYTES_MAX));
    await first.send(300 * KIB);
    const refused = faultOf(both[1] ?? Promise.reject());
    await second.send(300 * KIB).catch(() => {});
    expect((await refused).kind).toBe("unavailable");
    await first.end();
    await both[0];
  }
});

test("a body that is more than is left is taken in when others hold more than their part: the slowest of theirs is not", async () => {
  const read = readerOf(LIMITS);
  async function begun(tenant: string, bytes: number) {
    const body = upload(BODY_BYTES_MAX);
    const ended = read(body.request, tenant, BODY_BYTES_MAX).then(
      ({ byteLength }) => byteLength,
      (error: unknown) => error,
    );
    await body.send(bytes);
    return { ...body, ended };
  }
  const first = await begun("hoard", 230 * KIB);
  const silent = await begun("hoard", 230 * KIB);
  const third = await begun("hoard", 230 * KIB);
  const other = await begun("hoard too", 40 * KIB);
  await first.send(KIB);
  const began = performance.now();
  const large = upload(240 * KIB);
  const reading = read(large.request, "honest", BODY_BYTES_MAX);
  for (let sent = 0; sent < 240 * KIB; sent += 30 * KIB) await large.send(30 * KIB);
  await large.end();
  expect((await reading).byteLength).toBe(240 * KIB);
  // The silence of the others ends after ten seconds.
  expect(performance.now() - began).toBeWithin(900, 8_000);
  expect(await silent.ended).toMatchObject({
    kind: "unavailable",
    message: "too many large bodies are coming in",
    retryAfterSeconds: 5,
  });
  for (const body of [first, third, other]) await body.end();
  expect(await Promise.all([first, third, other].map(({ ended }) => ended))).toEqual([231 * KIB, 230 * KIB, 40 * KIB]);
});

test("so many bodies in chunks come in at a time, shared out by tenant, and as many as may wait for that", async () => {
  const read = readerOf(LIMITS);
  const begin = (tenant: string) => {
    const { request, ...body } = upload();
    request.headers.set("transfer-encoding", "chunked");
    return { ...body, ended: read(request, tenant, BODY_BYTES_MAX) };
  };
  const bodies = Array.from({ length: 28 + 112 }, () => begin("t"));
  expect((await faultOf(begin("t").ended)).kind).toBe("unavailable");
  const other = begin("u");
  await other.end();
  expect((await other.ended).byteLength).toBe(0);
  for (const { send, end, ended } of bodies) {
    await send(KIB);
    await end();
    expect((await ended).byteLength).toBe(KIB);
  }
});

const servers: Bun.Server<undefined>[] = [];
afterEach(async () => {
  await Promise.all(servers.splice(0).map((server) => server.stop(true)));
});

/** An edge with one route that takes a body in, over a real listener: what is answered, and how it ends. */
function serve(limits: Partial<IntakeLimits>) {
  const read = readerOf({ ...LIMITS, ...limits });
  const app = routes().post(
    "/v1/take",
    async ({ request }) => {
      const bytes = await read(request, scopeOf(request).caller.tenant, BODY_BYTES_MAX);
      return new Response(`body of ${bytes.byteLength} bytes`);
    },
    { parse: "none" },
  );
  const authenticate = (tenant: string | null) => ({
    tenant: `${tenant}`,
    user: "u",
    scopes: new Set<string>(),
  });
  const edge = createEdge({ app, log: silentLog, authenticate });
  const server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: (request) => edge.fetch(request) });
  servers.push(server);
  return () => connection(server.port ?? 0);
}

function connection(port: number) {
  const socket = connect(port, "127.0.0.1");
  let answer = "";
  socket.on("data", (data) => {
    answer += data;
  });
  const closed = new Promise<string>((resolve) => socket.on("close", () => resolve(answer)));
  const until = async (text: string) => {
    while (!answer.includes(text)) await new Promise((resolve) => socket.once("data", resolve));
    return answer;
  };
  return { socket, closed, until };
}

const listen = (limits: Partial<IntakeLimits>) => serve(limits)();

const HEAD = "POST /v1/take HTTP/1.1\r\nHost: x.example\r\nAuthorization: Bearer x\r\n";
const CHUNKED = `${HEAD}Transfer-Encoding: chunked\r\n\r\n`;

test("a body that falls silent is refused, and its connection closed", async () => {
  const long = (bytes: number) => `${HEAD}Content-Length: ${bytes}\r\n\r\n`;
  const [silent, late] = ["no data for 0.05 seconds", "did not arrive within 0.05 seconds"];
  const heads = [
    [CHUNKED, silent],
    [long(10), late],
    [long(5_000), late],
    [long(100_000), silent],
  ] as const;
  for (const [head, problem] of heads) {
    const { socket, closed } = listen({ silenceMsMax: 50 });
    socket.write(`${head}1\r\na\r\n`);
    const answer = await closed;
    expect(answer).toStartWith("HTTP/1.1 400");
    expect(answer).toContain(`body: ${problem}`);
  }
});

test("a slow body is taken in, for as long as it keeps coming and has time", async () => {
  const slow = listen({ silenceMsMax: 400 });
  slow.socket.write(CHUNKED);
  for (let piece = 0; piece < 25; piece++) {
    slow.socket.write("1\r\na\r\n");
    await Bun.sleep(20);
  }
  slow.socket.write("0\r\n\r\n");
  expect(await slow.until("bytes")).toEndWith("25 bytes");
  slow.socket.destroy();

  const endless = listen({ msMax: 100 });
  endless.socket.write(CHUNKED);
  const dripping = setInterval(() => endless.socket.write("1\r\na\r\n"), 10);
  expect(await endless.closed).toContain("body: did not arrive within 0.1 seconds");
  clearInterval(dripping);
});

test("a body that is too large is answered even while it is being sent, and the connection serves on", async () => {
  for (const length of [null, BODY_BYTES_MAX * 20]) {
    const { socket, until } = listen({});
    socket.write(length === null ? CHUNKED : `${HEAD}Content-Length: ${length}\r\n\r\n`);
    const bytes = new Uint8Array(BODY_BYTES_MAX).fill(65);
    for (let piece = 0; piece < 20; piece++) {
      if (length === null) socket.write(`${BODY_BYTES_MAX.toString(16)}\r\n`);
      socket.write(bytes);
      if (length === null) socket.write("\r\n");
    }
    if (length === null) socket.write("0\r\n\r\n");
    expect(await until(`body: larger than ${BODY_BYTES_MAX} bytes`)).toStartWith("HTTP/1.1 413");
    socket.write(`${HEAD}Content-Length: 3\r\n\r\nabc`);
    expect(await until("3 bytes")).toContain("HTTP/1.1 200");
    socket.destroy();
  }
});

test("a body that is here counts until its request is done with, and one that was refused does not", async () => {
  const read = readerOf({ ...LIMITS, bytesMax: 300 * KIB });
  const stored = Promise.withResolvers<void>();
  await read(whole(200 * KIB), "t", BODY_BYTES_MAX, { until: stored.promise });
  for (let i = 0; i < 3; i++) {
    const refused = await faultOf(read(whole(200 * KIB), "t", BODY_BYTES_MAX, { until: stored.promise }));
    expect(refused.kind).toBe("unavailable");
  }
  stored.resolve();
  await stored.promise;
  expect((await read(whole(200 * KIB), "t", BODY_BYTES_MAX)).byteLength).toBe(200 * KIB);
});

test("of bodies that come together, few pieces are taken in one turn of the event loop", async () => {
  const read = readerOf({ ...LIMITS, bytesMax: 64 * 1024 * KIB });
  const [bodies, pieces] = [50, 20];
  let inThisTurn = 0;
  let left = bodies;
  const most: number[] = [];
  const coming = () => {
    let sent = 0;
    const body = new ReadableStream(
      {
        pull(controller) {
          inThisTurn++;
          if (sent++ < pieces) controller.enqueue(new Uint8Array(8 * KIB));
          else controller.close();
        },
      },
      { highWaterMark: 0 },
    );
    return new Request("http://localhost/", { method: "POST", body });
  };
  const all = Array.from({ length: bodies }, async () => {
    await read(coming(), "acme", BODY_BYTES_MAX);
    left--;
  });
  while (left > 0) {
    await new Promise((resolve) => setImmediate(resolve));
    most.push(inThisTurn);
    inThisTurn = 0;
  }
  await Promise.all(all);
  // Of each body the first piece comes at once.
  const [first = 0, ...others] = most;
  expect(first).toBeLessThanOrEqual(bodies + 16);
  expect(Math.max(...others)).toBeLessThanOrEqual(16);
});

test("a body that is evicted is answered 503, whatever it is doing, and its connection serves on", async () => {
  const open = serve({ bytesMax: 400 * KIB });
  const [silent, small, late] = [open(), open(), open()];
  silent.socket.write(`${HEAD}Content-Length: ${300 * KIB}\r\n\r\n`);
  silent.socket.write(new Uint8Array(200 * KIB));
  small.socket.write(`${HEAD}Content-Length: 60000\r\n\r\n`);
  // It has come, when its tenant gets no more.
  for (let isCounted = false; !isCounted; ) {
    const probe = open();
    probe.socket.write(`${HEAD}Content-Length: ${200 * KIB}\r\n\r\n`);
    probe.socket.write(new Uint8Array(200 * KIB));
    isCounted = (await probe.until("bod")).includes("503");
    probe.socket.destroy();
  }
  late.socket.write(`${HEAD.replace("Bearer x", "Bearer y")}Content-Length: ${180 * KIB}\r\n\r\n`);
  late.socket.write(new Uint8Array(180 * KIB));
  await late.until(`body of ${180 * KIB} bytes`);
  const refused = await silent.until("too many large bodies are coming in");
  expect(refused).toStartWith("HTTP/1.1 503");
  expect(refused.toLowerCase()).toContain("retry-after: 5");
  silent.socket.write(new Uint8Array(100 * KIB));
  silent.socket.write(`${HEAD}Content-Length: 2\r\n\r\nab`);
  expect(await silent.until("2 bytes")).toContain("HTTP/1.1 200");
  for (const { socket } of [silent, small, late]) socket.destroy();
});

test("bodies that do not come, however short, are no more than their streams have room for", async () => {
  const read = readerOf({ ...LIMITS, bytesMax: 100 * KIB, streamBytes: 10 * KIB });
  const open = Array.from({ length: 20 }, () => upload());
  const faults: Fault[] = [];
  const all = open.map(({ request }) =>
    read(request, "greedy", BODY_BYTES_MAX).catch((error: Fault) => faults.push(error)),
  );
  for (let turn = 0; turn < 3; turn++) await new Promise((resolve) => setImmediate(resolve));
  expect(faults.length).toBe(12);
  expect(new Set(faults.map(({ kind }) => kind))).toEqual(new Set(["unavailable"]));
  for (const { end } of open.slice(0, 8)) await end();
  await Promise.all(all);
  expect((await read(whole(60 * KIB), "greedy", BODY_BYTES_MAX)).byteLength).toBe(60 * KIB);
});
