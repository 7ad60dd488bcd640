// A load generator of its own process: keep-alive connections that each send a request as soon as the answer to the
// last is in. Raw sockets, because a fetch per request would cost more than what it measures. Loopback only, and it
// ends by itself. Reads one `Load` as JSON from its input, and prints one `LoadResult`.
import { latency } from "./table.ts";

export interface Load {
  readonly port: number;
  readonly connections: number;
  readonly milliseconds: number;
  /** It ends before its time when so many have been answered. */
  readonly answersMax?: number;
  /** Whole requests, sent in turn. */
  readonly requests: readonly string[];
}

export interface LoadResult {
  readonly answers: number;
  readonly seconds: number;
  readonly by_status: Readonly<Record<string, number>>;
  readonly p50_ms: number;
  readonly p99_ms: number;
}

/** Runs it in a process of its own. */
export async function runLoad(load: Load): Promise<LoadResult> {
  const command = ["setpriv", "--pdeathsig", "KILL", "--", process.execPath, import.meta.path];
  const child = Bun.spawn(command, { stdin: Buffer.from(JSON.stringify(load)), stdout: "pipe", stderr: "inherit" });
  return JSON.parse(await child.stdout.text()) as LoadResult;
}

interface Connection {
  sentAt: number;
  /** What of an answer has come so far. */
  head: string;
}

const LENGTH = /content-length: (\d+)/i;

function generate({ port, connections, milliseconds, answersMax = Infinity, requests }: Load): Promise<LoadResult> {
  const texts = requests.map((each) => Buffer.from(each));
  const statuses: Record<string, number> = {};
  const latencies: number[] = [];
  const startedAt = performance.now();
  const endAt = startedAt + milliseconds;
  let open = connections;
  let sent = 0;
  const { promise, resolve } = Promise.withResolvers<LoadResult>();

  function send(socket: Bun.Socket<Connection>): void {
    const text = texts[sent++ % texts.length];
    if (text !== undefined) socket.write(text);
  }

  function answered(connection: Connection, socket: Bun.Socket<Connection>, status: string): void {
    const now = performance.now();
    statuses[status] = (statuses[status] ?? 0) + 1;
    latencies.push(now - connection.sentAt);
    if (now >= endAt || sent >= answersMax) return void socket.end();
    connection.sentAt = now;
    send(socket);
  }

  function finish(): void {
    const seconds = (performance.now() - startedAt) / 1000;
    const { p50_ms = 0, p99_ms = 0 } = latency(latencies);
    resolve({ answers: latencies.length, seconds, by_status: statuses, p50_ms, p99_ms });
  }

  function gone(): void {
    open--;
    if (open === 0) finish();
  }

  const handler: Bun.SocketHandler<Connection> = {
    open(socket) {
      socket.data = { sentAt: performance.now(), head: "" };
      send(socket);
    },
    data(socket, chunk) {
      const connection = socket.data;
      connection.head += chunk.toString("latin1");
      const bodyStart = connection.head.indexOf("\r\n\r\n") + 4;
      if (bodyStart === 3) return;
      const length = Number(LENGTH.exec(connection.head)?.[1] ?? 0);
      if (connection.head.length < bodyStart + length) return;
      const status = connection.head.slice(9, 12);
      connection.head = "";
      answered(connection, socket, status);
    },
    close: gone,
    connectError: gone,
    error() {},
  };
  for (let i = 0; i < connections; i++) {
    // A refusal is told to connectError as well.
    Bun.connect({ hostname: "127.0.0.1", port, socket: handler }).catch(() => {});
  }
  return promise;
}

if (import.meta.main) {
  const load = (await Bun.stdin.json()) as Load;
  process.stdout.write(JSON.stringify(await generate(load)));
}
