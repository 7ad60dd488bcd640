// Streamed calls beside what any relay costs: the time to the first byte of an answer, and bodies of 10 MiB both ways.
// One floor is a server that passes a request on with `fetch` and returns what comes: no record, no checks. The other one
// stores a row durably before that, as every record of a call is: the disk's part of what is above the first. All are asked
// by turns, so that whatever else the machine does meets all.
//
// What is left above the relays, measured where the time goes (two cores, SQLite, microseconds, the fastest tenth): to the
// first byte 200 are the commit, 40 the statements of the accept, 90 the checks before it, 100 the request to the upstream,
// and 80 its answer up to the caller's socket. The commits of a call, of its accept and its end, are two thirds of what
// its main thread does; on a machine that does other work too, that is what the first byte waits for. Of a call with 10
// MiB both ways the main thread spends 34 ms: 4 to 6 on what is captured, which SQLite takes for as much in a program of
// its own, 16 in the kernel for its sockets, 5 on page faults of memory that is new to the process, and the rest on the
// one copy of the answer and on 250 pieces. The relay spends 8, and as much on another thread.
//
// Run by itself with a role, it is one of the servers: `upstream`, or `relay URL [DIRECTORY of its rows]`. Each prints its
// port.
import { Database } from "bun:sqlite";
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { startGateway } from "../support/gateway/gateway.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { perSecond, type Report } from "./report.ts";
import { percentile } from "./table.ts";

const MIB = 1024 * 1024;
const LARGE_BYTES = 10 * MIB;
const AT_ONCE = 16;
const TURNS = 6;
/** Of one turn, one after the other. */
const FIRST_BYTES = 200;
/** Of one turn, before the figures count. */
const WARM_UP = 20;

interface Target {
  readonly name: string;
  readonly url: string;
  readonly headers: Readonly<Record<string, string>>;
}

function serve(answer: (request: Request) => Response | Promise<Response>): void {
  const limits = { idleTimeout: 0, maxRequestBodySize: 2 * LARGE_BYTES };
  const server = Bun.serve({ hostname: "127.0.0.1", port: 0, ...limits, fetch: answer });
  process.stdout.write(`${server.port}\n`);
}

/** Answers a large body by a large one, and any other by an event stream. */
function serveUpstream(): void {
  const event = new TextEncoder().encode('data: {"answer":42}\n\n');
  const large = new Uint8Array(LARGE_BYTES).fill(0x78);
  serve(async (request) => {
    const { byteLength } = await request.arrayBuffer();
    if (byteLength === LARGE_BYTES) return new Response(large);
    const events = new ReadableStream<Uint8Array>({
      async start(controller) {
        controller.enqueue(event);
        // What is closed at once is sent with its length, as no stream.
        await Bun.sleep(1);
        controller.close();
      },
    });
    return new Response(events, { headers: { "content-type": "text/event-stream" } });
  });
}

function serveRelay(upstream: string, directory: string | undefined): void {
  const store = directory === undefined ? null : durableRows(directory);
  serve(({ method, headers, body }) => {
    store?.run(Bun.randomUUIDv7());
    const passed = { "content-type": headers.get("content-type") ?? "" };
    return fetch(upstream, { method, headers: passed, body });
  });
}

function durableRows(directory: string) {
  const db = new Database(join(directory, "rows.db"));
  db.run("pragma journal_mode = wal");
  db.run("pragma synchronous = full");
  db.run("create table calls (id text primary key) without rowid");
  return db.query("insert into calls values (?)");
}

interface Server extends Disposable {
  readonly url: string;
  readonly pid: number;
}

async function start(...role: readonly string[]): Promise<Server> {
  // It ends with this process, however that ends.
  const command = ["setpriv", "--pdeathsig", "KILL", "--", process.execPath, import.meta.path, ...role];
  const child = Bun.spawn(command, { stdout: "pipe", stderr: "inherit" });
  const { value } = await child.stdout.getReader().read();
  const url = `http://127.0.0.1:${Number(new TextDecoder().decode(value))}/`;
  return { url, pid: child.pid, [Symbol.dispose]: () => child.kill() };
}

/** Milliseconds to the first byte of the body of each call, on one connection. */
async function firstBytes({ url, headers }: Target, calls: number): Promise<number[]> {
  const { hostname, port, pathname } = new URL(url);
  const body = '{"question":"what is the answer?"}';
  const fields = { host: `${hostname}:${port}`, "content-type": "application/json", ...headers };
  const lines = Object.entries({ ...fields, "content-length": body.length }).map(
    ([name, value]) => `${name}: ${value}`,
  );
  const request = `POST ${pathname} HTTP/1.1\r\n${lines.join("\r\n")}\r\n\r\n${body}`;
  const taken: number[] = [];
  const { promise, resolve, reject } = Promise.withResolvers<number[]>();
  let [text, sentAt, isFirst] = ["", 0, true];
  const send = (socket: Bun.Socket) => {
    [text, sentAt, isFirst] = ["", performance.now(), true];
    socket.write(request);
  };
  await Bun.connect({
    hostname,
    port: Number(port),
    socket: {
      open: send,
      data(socket, bytes) {
        text += bytes.toString("latin1");
        if (isFirst && text.includes("data:")) {
          taken.push(performance.now() - sentAt);
          isFirst = false;
        }
        if (!isWhole(text)) return;
        if (taken.length < calls) return send(socket);
        resolve(taken);
        socket.end();
      },
      close: () => reject(new Error(`closed: ${text}`)),
    },
  });
  return promise;
}

/** In chunks, or with its length where a server had all of it at once. */
function isWhole(answer: string): boolean {
  const length = /content-length: (\d+)/i.exec(answer)?.[1];
  if (length === undefined) return answer.endsWith("0\r\n\r\n");
  const head = answer.indexOf("\r\n\r\n");
  return head !== -1 && answer.length === head + 4 + Number(length);
}

/** Bytes each way per second, so many at a time. */
async function large({ url, headers }: Target, seconds: number): Promise<number> {
  const body = new Uint8Array(LARGE_BYTES).fill(0x79);
  const startedAt = performance.now();
  let passed = 0;
  const work = async () => {
    while (performance.now() - startedAt < 1000 * seconds) {
      const response = await fetch(url, { method: "POST", headers, body });
      let size = 0;
      for await (const chunk of response.body ?? []) size += chunk.byteLength;
      if (size !== LARGE_BYTES) throw new Error(`${response.status} with ${size} bytes`);
      passed++;
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return perSecond({ count: passed * LARGE_BYTES, seconds: (performance.now() - startedAt) / 1000 });
}

function median(values: readonly number[]): number {
  return percentile(values, 0.5) ?? 0;
}

/** Of a process, since it started, in MB. */
async function peakMb(pid: number): Promise<number> {
  const status = await Bun.file(`/proc/${pid}/status`).text();
  return Math.round(Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024);
}

/** @param seconds of the large bodies of each target, all turns together */
export async function streams(seconds: number, report: Report): Promise<void> {
  using upstream = await start("upstream");
  using relay = await start("relay", upstream.url);
  using storing = await start("relay", upstream.url, mkdtempSync(join(temporaryRoot(), "relay-")));
  await using gateway = await startGateway();
  const authorization = `Bearer ${await gateway.token({ tenant: "bench", user: "bench" })}`;
  const headers = { authorization, "content-type": "application/json" };
  const register = async (agent: object) => {
    const body = JSON.stringify({ upstream_url: upstream.url, ...agent });
    const created = await fetch(`${gateway.url}/v1/agents`, { method: "POST", headers, body });
    const { id } = (await created.json()) as { id: string };
    return `${gateway.url}/v1/proxy/${id}/stream`;
  };
  const targets: readonly Target[] = [
    { name: "floor: no relay at all", url: upstream.url, headers: {} },
    { name: "floor: a relay by fetch", url: relay.url, headers: {} },
    { name: "floor: the same after a durable row", url: storing.url, headers: {} },
    { name: "streamed calls", url: await register({ name: "bench" }), headers: { authorization } },
  ];
  const uncaptured = {
    name: "streamed calls, nothing captured",
    url: await register({ name: "uncaptured", capture_body: false }),
    headers: { authorization },
  };
  const [direct = 0, plain = 0, stored = 0, ours = 0] = await byTurns(targets, async (target) => {
    await firstBytes(target, WARM_UP);
    return median(await firstBytes(target, FIRST_BYTES));
  });
  report.add("first byte, no relay at all", { p50_ms: direct });
  const relayed = report.add("first byte, a relay by fetch", { p50_ms: plain });
  report.add("first byte, a relay by fetch after a durable row", { p50_ms: stored });
  const note = `${(ours - plain).toFixed(2)} ms above the relay, ${(ours - stored).toFixed(2)} above one that stores a row`;
  report.add("first byte, streamed call", { p50_ms: ours }, { floor: [relayed, "p50_ms"], note });

  const alike = [...targets, uncaptured];
  const [none = 0, byFetch = 0, , own = 0, bare = 0] = await byTurns(alike, (target) => large(target, seconds / TURNS));
  const both = `${LARGE_BYTES / MIB} MiB both ways, ${AT_ONCE} at a time`;
  report.add(`${both}, no relay at all`, { mib_s: none / MIB });
  const floor = report.add(`${both}, a relay by fetch`, { mib_s: byFetch / MIB });
  const figures = { mib_s: own / MIB, rss_mb: await peakMb(gateway.pid) };
  report.add(`${both}, streamed calls`, figures, { floor: [floor, "mib_s"], note: "RSS at its peak" });
  // The record's part: of each call the disk takes a mebibyte with the accept, and one with the end.
  report.add(`${both}, ${uncaptured.name}`, { mib_s: bare / MIB }, { floor: [floor, "mib_s"] });
}

/** The median of the turns of each. */
async function byTurns(targets: readonly Target[], measure: (target: Target) => Promise<number>): Promise<number[]> {
  const measured: number[][] = targets.map(() => []);
  for (let turn = 0; turn < TURNS; turn++) {
    for (const [at, target] of targets.entries()) measured[at]?.push(await measure(target));
  }
  return measured.map(median);
}

if (import.meta.main) {
  const [role, url = "", directory] = Bun.argv.slice(2);
  if (role === "relay") serveRelay(url, directory);
  else serveUpstream();
}
