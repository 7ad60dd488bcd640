// A load generator of its own process: keep-alive connections that each send the same request again as soon as
// the answer is in. Raw sockets, because a fetch per request would cost more than what it measures. Loopback
// only, and it ends by itself.
//
// Arguments: port, connections, milliseconds, base64 of the whole request. Prints one line of JSON.

export interface LoadResult {
  readonly answers: number;
  readonly seconds: number;
  readonly by_status: Readonly<Record<string, number>>;
  readonly p50_ms: number;
  readonly p99_ms: number;
}

interface Connection {
  sentAt: number;
  /** What of an answer has come so far. */
  head: string;
}

const LENGTH = /content-length: (\d+)/i;

function main([port, connections, milliseconds, encoded]: readonly string[]): Promise<LoadResult> {
  const request = Buffer.from(encoded ?? "", "base64");
  const statuses: Record<string, number> = {};
  const latencies: number[] = [];
  const startedAt = performance.now();
  const endAt = startedAt + Number(milliseconds);
  let open = Number(connections);
  const { promise, resolve } = Promise.withResolvers<LoadResult>();

  function answered(connection: Connection, socket: Bun.Socket<Connection>, status: string): void {
    const now = performance.now();
    statuses[status] = (statuses[status] ?? 0) + 1;
    latencies.push(now - connection.sentAt);
    if (now >= endAt) return void socket.end();
    connection.sentAt = now;
    socket.write(request);
  }

  function finish(): void {
    latencies.sort((a, b) => a - b);
    const at = (share: number) => Math.round((latencies[Math.floor(latencies.length * share)] ?? 0) * 100) / 100;
    const seconds = (performance.now() - startedAt) / 1000;
    resolve({ answers: latencies.length, seconds, by_status: statuses, p50_ms: at(0.5), p99_ms: at(0.99) });
  }

  function gone(): void {
    open--;
    if (open === 0) finish();
  }

  const handler: Bun.SocketHandler<Connection> = {
    open(socket) {
      socket.data = { sentAt: performance.now(), head: "" };
      socket.write(request);
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
  for (let i = 0; i < Number(connections); i++) {
    // A refusal is told to connectError as well.
    Bun.connect({ hostname: "127.0.0.1", port: Number(port), socket: handler }).catch(() => {});
  }
  return promise;
}

if (import.meta.main) process.stdout.write(`${JSON.stringify(await main(Bun.argv.slice(2)))}\n`);
