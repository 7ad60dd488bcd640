// Real MCP servers from npm, each on a free loopback port in a process of its own that dies with the test.
import { dirname, join } from "node:path";

const ROOT = join(import.meta.dir, "..", "..", "..");
const EXAMPLES = join(ROOT, "node_modules/@modelcontextprotocol/sdk/dist/esm/examples/server");

const SERVERS = {
  /** Stateful, event streams, 400 to an unknown session. */
  everything: [join(ROOT, "node_modules/@modelcontextprotocol/server-everything/dist/index.js"), "streamableHttp"],
  /** Stateful, event streams, 404 to an unknown session. */
  stateful: [join(EXAMPLES, "simpleStreamableHttp.js")],
  /** Stateful, JSON answers. */
  json: [join(EXAMPLES, "jsonResponseStreamableHttp.js")],
  /** No sessions. */
  stateless: [join(EXAMPLES, "simpleStatelessStreamableHttp.js")],
} as const;

export interface McpServer {
  readonly url: string;
  readonly port: number;
  stop(): Promise<void>;
}

/** @param port the port to listen on, to take the place of a server that was stopped; 0 for a free one */
export async function startMcpServer(name: keyof typeof SERVERS, port = 0): Promise<McpServer> {
  const [script, ...args] = SERVERS[name];
  const preload = join(import.meta.dir, "../http/announce-port.mjs");
  const node = Bun.which("node");
  const command = node === null ? [process.execPath, "--preload", preload] : [node, "--import", preload];
  const server = Bun.spawn([...command, script, ...args], {
    cwd: dirname(script),
    env: { PATH: "/usr/bin:/bin", TEST_SERVER_PORT: String(port) },
    stdin: "pipe",
    stdout: "pipe",
    stderr: "ignore",
  });
  const listening = await readPort(server.stdout);
  return {
    url: `http://127.0.0.1:${listening}/mcp`,
    port: listening,
    stop: async () => {
      server.kill("SIGKILL");
      await server.exited;
    },
  };
}

/** Reads on after the port is known, so that the server never waits for a full pipe. */
function readPort(output: ReadableStream<Uint8Array>): Promise<number> {
  const { promise, resolve, reject } = Promise.withResolvers<number>();
  const read = async () => {
    const decoder = new TextDecoder();
    let seen = "";
    let found = false;
    for await (const chunk of output) {
      if (found) continue;
      seen += decoder.decode(chunk, { stream: true });
      const port = /TEST_SERVER_PORT=(\d+)\n/.exec(seen)?.[1];
      if (port === undefined) continue;
      found = true;
      resolve(Number(port));
    }
    reject(new Error(`the MCP server ended before it listened: ${seen.slice(-500)}`));
  };
  read().catch(reject);
  return promise;
}
