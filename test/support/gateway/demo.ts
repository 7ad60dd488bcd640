// The demo as its user has it: a process whose output is read while it comes, in a directory of temporary files of
// its own. Its chain is anvil behind a script that tells its process, so that a test can look for it and end it.
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ANVIL = fileURLToPath(import.meta.resolve("@foundry-rs/anvil-linux-amd64/bin/anvil"));
const SOURCE = [process.execPath, join(import.meta.dir, "..", "..", "..", "src", "main.ts")];
const LIFE_MS_MAX = 120_000;
const GONE_MS_MAX = 5000;

export interface DemoOptions {
  /** By default from source. */
  readonly program?: readonly string[];
  /** What runs in place of anvil, which it is given as `$ANVIL`; null for no anvil at all. */
  readonly chain?: string | null;
}

export type RunningDemo = ReturnType<typeof runDemo>;

export function runDemo({ program = SOURCE, chain = 'exec "$ANVIL" "$@"' }: DemoOptions = {}) {
  const home = mkdtempSync(join(tmpdir(), "demo-test-"));
  const temporary = join(home, "tmp");
  const pidFile = join(home, "pid");
  const script = join(home, "anvil");
  mkdirSync(temporary);
  if (chain !== null) {
    writeFileSync(script, `#!/bin/sh\necho $$ >${pidFile}\nANVIL=${ANVIL}\n${chain}\n`);
    chmodSync(script, 0o755);
  }
  const child = Bun.spawn([...program, "demo"], {
    cwd: home,
    env: { PATH: "", TMPDIR: temporary, ...(chain === null ? {} : { TOLLGATE_ANVIL: script }) },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: LIFE_MS_MAX,
    killSignal: "SIGKILL",
  });
  const complaints = child.stderr.text();
  let printed = "";
  const watches = new Set<() => void>();
  const read = (async () => {
    const decoder = new TextDecoder();
    for await (const chunk of child.stdout) {
      printed += decoder.decode(chunk, { stream: true });
      for (const watch of watches) watch();
    }
  })();

  return {
    printed: () => printed,
    kill: (signal: NodeJS.Signals) => child.kill(signal),
    /** The chain's process. */
    chainPid: () => Number(readFileSync(pidFile, "utf8")),
    /** Resolves with what fits once it has been printed; rejects when the demo ends before. */
    async prints(pattern: RegExp): Promise<RegExpExecArray> {
      const { promise, resolve } = Promise.withResolvers<RegExpExecArray>();
      const look = () => {
        const found = pattern.exec(printed);
        if (found !== null) resolve(found);
      };
      watches.add(look);
      look();
      const ended = read.then(() => {
        throw new Error(`it did not print ${pattern}:\n${printed}`);
      });
      return Promise.race([promise, ended]).finally(() => watches.delete(look));
    },
    /** Once the process has ended. */
    async ended() {
      await read;
      return { code: await child.exited, complaints: withoutPauses(await complaints) };
    },
    /** What of it is left: its chain's process and its directories. After a moment, for a killed one. */
    async leftovers(): Promise<string[]> {
      const until = performance.now() + GONE_MS_MAX;
      for (;;) {
        const pid = existsSync(pidFile) ? readFileSync(pidFile, "utf8").trim() : "";
        const found = [...readdirSync(temporary), ...(pid !== "" && runs(Number(pid)) ? [`process ${pid}`] : [])];
        if (found.length === 0 || performance.now() > until) return found;
        await Bun.sleep(10);
      }
    },
    async [Symbol.asyncDispose]() {
      child.kill("SIGKILL");
      await child.exited;
      rmSync(home, { recursive: true, force: true });
    },
  };
}

function runs(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch {
    return false;
  }
}

/** A busy machine holds up the event loop too, and the demo says so like the gateway. */
function withoutPauses(log: string): string {
  return log
    .split("\n")
    .filter((line) => !line.includes('"event_loop_blocked"'))
    .join("\n");
}
