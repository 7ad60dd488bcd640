// Restate on the same work as the gateway's `calls`: accepted durably, the upstream called, the answer recorded; asked
// by the same load generator. A single node with its own defaults, of which its log is written with fsync, as ours is:
// a 202 means on the disk on both sides. What differs: Restate replicates its log to one node (itself), makes every call
// through a service of its SDK (whose time of a core is counted with it), and keeps the journal of a call for a day.
// It has no tenants, tokens, agents, policies or exact history, which the gateway does for each call besides. At its
// start it asks its makers whether there is a newer release, and nothing waits for that; its telemetry is turned off.
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "../../support/gateway/process.ts";
import { usageOf } from "../cores.ts";
import { postRequest, type Target } from "../measure.ts";

const SERVER = join(import.meta.dir, "node_modules/@restatedev/restate-server-linux-x64/bin/restate-server");
const SERVICE = join(import.meta.dir, "restate-service.ts");
const START_MS_MAX = 60_000;

export interface RestateTarget extends Target, AsyncDisposable {
  /** How many calls have not ended. */
  left(): Promise<number>;
}

interface Child {
  readonly pid: number;
  /** The first match of the pattern in what it prints. */
  prints(pattern: RegExp): Promise<string>;
  end(): Promise<void>;
}

/** @param visits how many calls the upstream has answered so far */
export async function startRestate(upstreamUrl: string, visits: () => number): Promise<RestateTarget> {
  const home = mkdtempSync(join(temporaryRoot(), "restate-"));
  await using stack = new AsyncDisposableStack();
  stack.defer(() => rmSync(home, { recursive: true, force: true }));
  const service = start([process.execPath, SERVICE, upstreamUrl], home);
  stack.defer(() => service.end());
  const options = ["--no-logo", "--base-dir", join(home, "data"), "--listen-mode", "tcp", "--bind-ip", "127.0.0.1"];
  const server = start([SERVER, ...options, "--use-random-ports", "true"], home);
  stack.defer(() => server.end());

  const portOf = (name: string) => server.prints(new RegExp(`"server.port":(\\d+),"server_name":"[^"]*${name}`));
  const [admin, ingress, servicePort] = await Promise.all([
    portOf("admin"),
    portOf("ingress"),
    service.prints(/port (\d+)\n/),
  ]);
  const ask = async (path: string, body: unknown) => {
    const headers = { "content-type": "application/json", accept: "application/json" };
    const init = { method: "POST", headers, body: JSON.stringify(body) };
    const response = await fetch(`http://127.0.0.1:${admin}${path}`, init);
    if (!response.ok) throw new Error(`Restate answers ${path} with ${response.status}: ${await response.text()}`);
    return response.json();
  };
  await ask("/deployments", { uri: `http://127.0.0.1:${servicePort}` });
  let seen = -1;
  const owned = stack.move();
  return {
    pid: server.pid,
    port: Number(ingress),
    requests: [postRequest(Number(ingress), "/bench/call/send")],
    helpers: [service.pid],
    database: { serverSeconds: () => 0, written: async (pid) => usageOf(pid).written },
    /** Its answer costs it a walk over all calls, so it is asked only when the upstream has come to rest. */
    async left() {
      const [before, now] = [seen, visits()];
      seen = now;
      if (now !== before) return 1;
      const query = "select count(*) as n from sys_invocation where status <> 'completed'";
      const { rows } = (await ask("/query", { query })) as { rows: { n: number }[] };
      return rows[0]?.n ?? 0;
    },
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

/** It ends with this process, however that ends. */
function start(command: readonly string[], cwd: string): Child {
  const child = Bun.spawn(["setpriv", "--pdeathsig", "KILL", "--", ...command], {
    cwd,
    env: { PATH: "/usr/bin:/bin", RESTATE_DISABLE_TELEMETRY: "true", RESTATE_LOG_FORMAT: "json" },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "ignore",
  });
  let printed = "";
  let look = () => {};
  const read = (async () => {
    const decoder = new TextDecoder();
    for await (const chunk of child.stdout) {
      printed += decoder.decode(chunk, { stream: true });
      look();
    }
  })();
  const waits: (() => void)[] = [];
  look = () => {
    for (const wait of waits) wait();
  };
  return {
    pid: child.pid,
    prints: (pattern) =>
      new Promise((resolve, reject) => {
        const timer = setTimeout(() => reject(new Error(`${command[0]} did not start:\n${printed}`)), START_MS_MAX);
        const wait = () => {
          const found = pattern.exec(printed)?.[1];
          if (found === undefined) return;
          clearTimeout(timer);
          resolve(found);
        };
        waits.push(wait);
        wait();
      }),
    async end() {
      child.kill("SIGKILL");
      await Promise.all([child.exited, read]);
    },
  };
}
