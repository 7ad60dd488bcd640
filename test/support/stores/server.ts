// Database servers and their poolers as processes of their own, for tests. A watchdog holds each: when the test process
// goes, in whatever way, the server and its directory go too. None of them runs as root: then it runs as nobody.
import { chownSync, mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { temporaryPlace } from "../temporary.ts";

const START_MS_MAX = 20_000;
const NOBODY = 65_534;

/** Runs the server and waits for the end of its own input, which is the end of the test process. */
const WATCHDOG = `
trap '' INT TERM HUP
dir=$1 signal=$2; shift 2
"$@" </dev/null &
server=$!
exec >/dev/null 2>&1
cat >/dev/null
kill -$signal $server
wait $server
rm -rf "$dir"
`;

const isRoot = process.getuid?.() === 0;
/** Where everybody may make files on a Linux machine, should the temporary directory be root's own. */
const PUBLIC_TEMPORARY = ["/tmp", "/var/tmp"];

/** What ends a server at once: each has another one, and the shell has its children ignore those that they do not handle. */
type EndSignal = "QUIT" | "TERM";

/** As nobody, and it dies with whatever started it. */
export function unprivileged(command: string[], signal: EndSignal = "QUIT"): string[] {
  if (!isRoot) return command;
  const drop = ["--reuid", `${NOBODY}`, "--regid", `${NOBODY}`, "--clear-groups", "--pdeathsig", signal];
  return ["setpriv", ...drop, "--", ...command];
}

/** Lets the server's user have a file or directory, with all that is in it. */
export function handOver(path: string): void {
  if (isRoot) run(["chown", "-R", `${NOBODY}:${NOBODY}`, path]);
}

/** A new directory, whose name the server's user can reach. */
export function openDirectory(): string {
  const place = temporaryPlace();
  for (const root of isRoot ? [place, ...PUBLIC_TEMPORARY] : [place]) {
    const dir = mkdtempSync(join(root, "tollgate-postgres-"));
    if (isRoot) chownSync(dir, NOBODY, NOBODY);
    if (succeeds(unprivileged(["test", "-w", dir]))) return dir;
    rmSync(dir, { recursive: true });
  }
  throw new Error("the server has no temporary directory that its user can reach");
}

export function succeeds(command: string[]): boolean {
  return Bun.spawnSync(command, { cwd: "/", stdout: "ignore", stderr: "ignore" }).success;
}

export function run(command: string[], cwd = "/"): void {
  const { success, stderr } = Bun.spawnSync(command, { cwd, stdout: "ignore", stderr: "pipe" });
  if (!success) throw new Error(`${command[0]} failed: ${stderr.toString()}`);
}

/** True when the server says one of these, false when it ended before. */
async function says(output: ReadableStream<Uint8Array>, readyWhen: string): Promise<boolean> {
  const reader = output.getReader();
  const decoder = new TextDecoder();
  let seen = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    seen += decoder.decode(value, { stream: true });
    if (seen.includes(readyWhen)) break;
    if (seen.includes("is shut down") || seen.includes("FATAL")) return false;
  }
  // Read on, so that the server never waits for its log to be read.
  void (async () => {
    while (!(await reader.read()).done);
  })();
  return true;
}

export interface Served {
  /** Ends it at once; its directory goes too. */
  end(): Promise<void>;
}

/** Null when the server did not start, for example because its port has been taken since. */
export async function serve(
  dir: string,
  command: string[],
  { readyWhen, signal }: { readonly readyWhen: string; readonly signal: EndSignal },
): Promise<Served | null> {
  const watchdog = Bun.spawn(["sh", "-c", WATCHDOG, "server", dir, signal, ...unprivileged(command, signal)], {
    cwd: dir,
    stdin: "pipe",
    stdout: "ignore",
    stderr: "pipe",
  });
  watchdog.unref();
  const end = async () => {
    watchdog.stdin.end();
    await watchdog.exited;
  };
  const timer = setTimeout(() => watchdog.stdin.end(), START_MS_MAX);
  const started = await says(watchdog.stderr, readyWhen).finally(() => clearTimeout(timer));
  if (started) return { end };
  await end();
  return null;
}
