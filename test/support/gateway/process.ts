// The compiled binary as a process of its own, for tests: its commands run to their end, its services until they are
// told to end or killed. Whatever happens to the test process, what it started and its directories go with it.
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { type Config, loadConfig } from "../../../src/config.ts";
import { endsWithin } from "../../../src/kernel/wait.ts";
import { temporaryPlace } from "../temporary.ts";
import { tollgateBinary } from "./binary.ts";

export const START_MS_MAX = 40_000;
const STOP_MS_MAX = 40_000;
/** For the last of the output of a process that is gone. */
const OUTPUT_MS_MAX = 2_000;

export type Environment = Readonly<Record<string, string>>;

export interface Surroundings {
  readonly cwd: string;
  readonly env: Environment;
  /** Runs in the place of the compiled binary. */
  readonly program?: readonly string[];
}

export interface Finished {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** The kernel ends the process when the thread that started it ends, which is the end of the test process. */
function spawn(args: readonly string[], { cwd, env, program = [tollgateBinary()] }: Surroundings) {
  const command = ["setpriv", "--pdeathsig", "KILL", "--", ...program, ...args];
  return Bun.spawn(command, { cwd, env, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
}

/** Runs a command of the binary to its end. */
export async function runCommand(args: readonly string[], surroundings: Surroundings): Promise<Finished> {
  const child = spawn(args, surroundings);
  const [out, err]: [string[], string[]] = [[], []];
  const reading = [readText(child.stdout, (text) => out.push(text)), readText(child.stderr, (text) => err.push(text))];
  const code = await ended(child, reading);
  return { code, stdout: out.join(""), stderr: err.join("") };
}

/** What a command of the binary would be configured with. */
export function configOf(purpose: Parameters<typeof loadConfig>[0], env: Environment): Config {
  const { config, problems } = loadConfig(purpose, new Map(), env, false);
  if (config === null) throw new Error(problems.join("; "));
  return config;
}

/**
 * The exit status, once all output has been read. On a busy machine Bun 1.4.5 now and then never tells the end of a stream
 * whose process is gone (seen in one of some ten runs), so that is not waited for without end.
 */
async function ended({ exited }: ReturnType<typeof spawn>, reading: readonly Promise<void>[]): Promise<number> {
  const code = await exited;
  await endsWithin(OUTPUT_MS_MAX, Promise.all(reading));
  return code;
}

export interface Service {
  /** The fields of the line which says that it listens. */
  readonly listening: { readonly url: string; readonly open_url?: string };
  readonly pid: number;
  /** Resolves with the exit status. */
  end(signal: "SIGTERM" | "SIGKILL"): Promise<number>;
}

interface ServiceOptions extends Surroundings {
  readonly args: readonly string[];
  /** Gets everything that the process prints. */
  readonly log: string[];
}

/** Starts a service and waits until it listens. */
export async function startService({ args, log, ...surroundings }: ServiceOptions): Promise<Service> {
  const child = spawn(args, surroundings);
  const listening = Promise.withResolvers<Service["listening"]>();
  const logged = readLog(child.stderr, log, listening.resolve);
  const printed = readLog(child.stdout, log, listening.resolve);
  const failed = (why: string) => listening.reject(new Error(`tollgate ${why}:\n${log.join("")}`));
  const timer = setTimeout(() => failed("took too long to start"), START_MS_MAX);
  ended(child, [logged, printed]).then((code) => failed(`ended with ${code} before it listened`), listening.reject);
  const end = async (signal: "SIGTERM" | "SIGKILL") => {
    child.kill(signal);
    const overdue = setTimeout(() => child.kill("SIGKILL"), STOP_MS_MAX);
    const code = await ended(child, [logged, printed]);
    clearTimeout(overdue);
    return code;
  };
  try {
    return { listening: await listening.promise, pid: child.pid, end };
  } catch (error) {
    await end("SIGKILL");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Keeps all that comes and finds the line that says where it listens. */
function readLog(
  stream: ReadableStream<Uint8Array>,
  log: string[],
  found: (listening: Service["listening"]) => void,
): Promise<void> {
  let line = "";
  return readText(stream, (text) => {
    log.push(text);
    const lines = (line + text).split("\n");
    line = lines.pop() ?? "";
    for (const whole of lines) if (whole.includes('"event":"listening"')) found(JSON.parse(whole));
  });
}

async function readText(stream: ReadableStream<Uint8Array>, on: (text: string) => void): Promise<void> {
  const decoder = new TextDecoder();
  for await (const chunk of stream) on(decoder.decode(chunk, { stream: true }));
}

/** In the background of a shell that ends at once, since the test runner kills its own children at a timeout. */
const SWEEPER = `
{
  trap '' INT TERM HUP
  while kill -0 "$2"; do sleep 1; done
  rm -rf "$1"
} &
`;

let root: string | undefined;

/** A directory that a process of its own removes when this one is gone, killed or not. */
export function temporaryRoot(): string {
  if (root !== undefined) return root;
  root = mkdtempSync(join(temporaryPlace(), "tollgate-test-"));
  const stdio = { stdin: "ignore", stdout: "ignore", stderr: "ignore" } as const;
  Bun.spawnSync(["sh", "-c", SWEEPER, "sweeper", root, String(process.pid)], stdio);
  return root;
}
