// What commands say to a person at a terminal: a question before what can't be undone, and the progress of long work. Much of
// that work holds the event loop (SQLite copies a database in one call), so a thread shows the progress; this file is the entry
// point of that thread too. Without a terminal nothing is shown and nobody is asked.
import { statSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";
import { type CommandLine, type CommandVerdict, NOTHING_CHANGED } from "../command-line.ts";

const STANDARD_ERROR = 2;
const ERASE_LINE = "\r\x1b[K";

export const canAsk = () => process.stdin.isTTY && process.stderr.isTTY;

/** Adds a problem where somebody would have to be asked, and nobody can be. */
export function requireAgreement({ command, flags, problems }: CommandLine): void {
  if (flags.has("yes") || canAsk()) return;
  problems.push(`${command} can't be undone, and there is no terminal to ask on: add --yes if you are sure`);
}

/** Asks whether to go on, unless --yes says so. @returns null to go on, and otherwise what to print */
export function disagreement({ flags }: CommandLine, question: string): Promise<CommandVerdict | null> {
  if (flags.has("yes")) return Promise.resolve(null);
  const { promise, resolve } = Promise.withResolvers<CommandVerdict | null>();
  const prompt = createInterface({ input: process.stdin, output: process.stderr, terminal: false });
  // Ctrl-C and the end of the input close it without an answer.
  prompt.once("close", () => resolve(NOTHING_CHANGED));
  prompt.question(`${question} It can't be undone. Go on? [y/N] `, (answer) => {
    resolve(/^y(es)?$/i.test(answer.trim()) ? null : NOTHING_CHANGED);
    prompt.close();
  });
  return promise;
}

export interface Progress {
  /** Reports how many of all the bytes are done. */
  done(bytes: number, all: number): void;
  /** Names the file that the work writes and its final size: from then on progress is the file's present size. */
  writes(path: string, all: number): void;
}

interface ProgressOptions {
  readonly what: string;
  /** The bytes that are done, all bytes, and whether the work has ended. */
  readonly counts: BigInt64Array;
}

const [DONE, ALL, ENDED] = [0, 1, 2];

/** Does the work, and shows on a terminal that it goes on, how long it has taken, and how much of it is done. */
export async function withProgress<T>(what: string, work: (progress: Progress) => Promise<T>): Promise<T> {
  if (!process.stderr.isTTY) return work({ done() {}, writes() {} });
  const counts = new BigInt64Array(new SharedArrayBuffer(3 * BigInt64Array.BYTES_PER_ELEMENT));
  const entry = Bun.isStandaloneExecutable ? "./cli/terminal/interactive.ts" : import.meta.url;
  const thread = new Worker(entry, { smol: true });
  // The event loop has to be free until the thread runs.
  const { promise: isShown, resolve } = Promise.withResolvers<void>();
  thread.onmessage = () => resolve();
  thread.onerror = () => resolve();
  thread.postMessage({ what, counts } satisfies ProgressOptions);
  await isShown;
  try {
    return await work({
      done(bytes, all) {
        Atomics.store(counts, DONE, BigInt(bytes));
        Atomics.store(counts, ALL, BigInt(all));
      },
      writes(path, all) {
        Atomics.store(counts, ALL, BigInt(all));
        thread.postMessage(path);
      },
    });
  } finally {
    Atomics.store(counts, ENDED, 1n);
    thread.terminate();
    process.stderr.write(ERASE_LINE);
  }
}

function show({ what, counts }: ProgressOptions, pathOf: () => string | null): void {
  const startedAt = performance.now();
  const print = () => {
    const path = pathOf();
    const written = path === null ? null : (statSync(path, { throwIfNoEntry: false })?.size ?? 0);
    const done = written ?? Number(Atomics.load(counts, DONE));
    const all = Number(Atomics.load(counts, ALL));
    const part = all === 0 ? "" : `${Math.min(Math.floor((100 * done) / all), 100)} %, `;
    const seconds = Math.floor((performance.now() - startedAt) / 1000);
    // The cursor returns to the beginning of the line, where a line of the log may overwrite the progress.
    if (Atomics.load(counts, ENDED) === 0n) writeSync(STANDARD_ERROR, `${ERASE_LINE}${what}: ${part}${seconds} s\r`);
  };
  print();
  setInterval(print, 250);
}

declare const self: Worker;

if (!Bun.isMainThread) {
  let path: string | null = null;
  self.onmessage = ({ data }: MessageEvent<ProgressOptions | string>) => {
    if (typeof data === "string") path = data;
    else {
      show(data, () => path);
      self.postMessage(null);
    }
  };
}
