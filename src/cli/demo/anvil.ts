// The demo's chain as a process: where anvil is looked for, how it is started, and that it ends when the demo ends,
// even if the demo is killed. A guard process waits for the end of its input, which is the end of the demo's process.
import { join } from "node:path";
import { CHAIN_ID } from "../../x402/kind.ts";
import { DemoProblem } from "./problem.ts";

/** As on Base. */
export const BLOCK_SECONDS = 2;
/** Else anvil would keep the state of every block on the disk: 350 KB each (measured). */
const STATES_KEPT = 64;
const START_CHARACTERS_MAX = 65_536;

/** By platform and architecture as Node names them; of each there is a package `@foundry-rs/anvil-…`. */
const PACKAGES: Readonly<Record<string, string>> = {
  "linux-x64": "linux-amd64",
  "linux-arm64": "linux-arm64",
  "darwin-x64": "darwin-amd64",
  "darwin-arm64": "darwin-arm64",
};

export interface Anvil {
  readonly path: string;
  /** In words, for people. */
  readonly found: string;
}

export type AnvilSearch = { readonly anvil: Anvil } | { readonly missing: readonly string[] };

/**
 * Where the operator says, or else on the PATH or among the packages of the working directory.
 *
 * @param configured a path, or the name of a program
 */
export function findAnvil(configured: string | null, cwd: string): AnvilSearch {
  if (configured !== null) {
    const path = Bun.which(configured, { cwd });
    if (path !== null) return { anvil: { path, found: "of TOLLGATE_ANVIL" } };
    return { missing: ["TOLLGATE_ANVIL names no program that can be run.", ...howToGetIt()] };
  }
  const onPath = Bun.which("anvil");
  if (onPath !== null) {
    return { anvil: { path: onPath, found: onPath.includes("node_modules") ? IN_PACKAGES : "on the PATH" } };
  }
  const name = packageName();
  const inPackages = name === null ? null : Bun.which(join(cwd, "node_modules", name, "bin", "anvil"));
  if (inPackages !== null) return { anvil: { path: inPackages, found: IN_PACKAGES } };
  const places = "It was looked for at TOLLGATE_ANVIL, on the PATH, and in node_modules here.";
  return { missing: [places, ...howToGetIt()] };
}

const IN_PACKAGES = "in node_modules";

function packageName(): string | null {
  const platform = PACKAGES[`${process.platform}-${process.arch}`];
  return platform === undefined ? null : `@foundry-rs/anvil-${platform}`;
}

function howToGetIt(): string[] {
  const name = packageName();
  const fromFoundry = "from https://getfoundry.sh";
  if (name === null) return [`Get it ${fromFoundry}, and start the demo again.`];
  return [`Get it: npm install --no-save ${name}`, `or ${fromFoundry}, and start the demo again.`];
}

export type AnvilProcess = Awaited<ReturnType<typeof startAnvil>>;

/** Its arguments are a process and a directory: when the input ends, both go. */
const GUARD = 'read -r _; kill -KILL "$1"; rm -rf "$2"';

/**
 * Starts the chain on a free loopback port; it makes no blocks by itself yet. Neither process is in the terminal's
 * foreground group: Ctrl-C is for the demo, which stops them last.
 *
 * @param home a directory for the files of anvil
 * @param dir removed with the chain should this process be killed
 * @param ended called when it ends without having been stopped
 * @throws DemoProblem when it does not listen; the signal's reason
 */
export async function startAnvil(
  { path }: Anvil,
  { home, dir, ended }: { readonly home: string; readonly dir: string; readonly ended: () => void },
  signal: AbortSignal,
) {
  const options = ["--port", "0", "--chain-id", `${CHAIN_ID}`, "--prune-history", `${STATES_KEPT}`];
  const env = { HOME: home, PATH: "/usr/bin:/bin" };
  const chain = Bun.spawn([path, ...options, "--no-mining", "--color", "never"], {
    cwd: home,
    env,
    stdin: "ignore",
    stdout: "pipe",
    stderr: "ignore",
    detached: true,
  });
  const guard = Bun.spawn(["/bin/sh", "-c", GUARD, "guard", String(chain.pid), dir], {
    env,
    stdin: "pipe",
    stdout: "ignore",
    stderr: "ignore",
    detached: true,
  });
  let isWanted = true;
  const stop = async () => {
    isWanted = false;
    // The guard first: once the chain has ended, its process ID may pass to another process, which must not be killed.
    guard.kill("SIGKILL");
    chain.kill("SIGKILL");
    await Promise.all([guard.exited, chain.exited]);
  };
  const onAbort = () => void stop();
  signal.addEventListener("abort", onAbort);
  const port = await announcedPort(chain.stdout);
  signal.removeEventListener("abort", onAbort);
  if (port === null || signal.aborted) {
    await stop();
    signal.throwIfAborted();
    throw new DemoProblem(`${path} ended before it listened`);
  }
  void chain.exited.then(() => {
    guard.kill("SIGKILL");
    if (isWanted) ended();
  });
  return { url: `http://127.0.0.1:${port}`, stop };
}

/** The port that it says it listens on, or null when it ended before. Its other output is read and dropped. */
async function announcedPort(output: ReadableStream<Uint8Array>): Promise<string | null> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  let seen = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return null;
    seen = (seen + decoder.decode(value, { stream: true })).slice(-START_CHARACTERS_MAX);
    const port = /Listening on 127\.0\.0\.1:(\d+)\n/.exec(seen)?.[1];
    if (port !== undefined) {
      reader.releaseLock();
      void output.pipeTo(new WritableStream());
      return port;
    }
  }
}
