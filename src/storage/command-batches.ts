// Commands on Postgres: those that come in one turn of the event loop, and while others are being written, share a
// transaction, in which each kind is one statement. A command alone is written at once.

import { Fault } from "../core/fault.ts";
import type { Command } from "./commands.ts";
import { unavailable } from "./failures.ts";
import { CommitUnknown } from "./store.ts";

const COMMANDS_MAX = 256;
const BYTES_MAX = 4 * 1024 * 1024;
/** With more of them the database is far too slow, and memory would run out next. */
const WAITING_MAX = 20_000;

// biome-ignore lint/suspicious/noExplicitAny: commands of all kinds stand in one queue, each beside its own input.
type AnyCommand = Command<any, any>;

/** Commands of one kind. */
export interface CommandGroup {
  readonly command: AnyCommand;
  readonly inputs: readonly unknown[];
}

interface WaitingCommand {
  readonly command: AnyCommand;
  readonly input: unknown;
  /** By performance.now(). */
  readonly until: number;
  resolve(output: unknown): void;
  reject(error: unknown): void;
}

interface CommandBatchesOptions {
  /** Transactions at once. */
  readonly atOnce: number;
  /** The longest that a command takes, its wait included. */
  readonly waitMsMax: number;
  /** Runs all of them in one transaction, and gives what came of them by group. */
  run(groups: readonly CommandGroup[], until: number): Promise<unknown[][]>;
}

export function createCommandBatches({ atOnce, waitMsMax, run }: CommandBatchesOptions) {
  let waiting: WaitingCommand[] = [];
  let isScheduled = false;
  let running = 0;
  let isClosed = false;
  let onIdle = () => {};

  /** The next commands that may be written together, in the order of their arrival. */
  function next(): WaitingCommand[] {
    const batch: WaitingCommand[] = [];
    const later: WaitingCommand[] = [];
    const keys = new Set<string | null>();
    let bytes = 0;
    let at = 0;
    for (const each of waiting) {
      const { command, input } = each;
      const key = command.keyOf?.(input) ?? null;
      const own = command.bytesOf(input);
      if (batch.length === COMMANDS_MAX || (batch.length > 0 && bytes + own > BYTES_MAX)) break;
      at++;
      const isFree = key === null || !keys.has(key);
      (isFree ? batch : later).push(each);
      if (!isFree) continue;
      keys.add(key);
      bytes += own;
    }
    waiting = [...later, ...waiting.slice(at)];
    return batch;
  }

  /** One that fails undoes the others with it, so each half of them is then written by itself. */
  async function settle(batch: readonly WaitingCommand[]): Promise<void> {
    // In one order everywhere, so that two transactions do not wait for each other.
    const groups = [...Map.groupBy(batch, ({ command }) => command)].sort(([a], [b]) => (a.name < b.name ? -1 : 1));
    try {
      const outputs = await run(
        groups.map(([command, members]) => ({ command, inputs: members.map(({ input }) => input) })),
        Math.min(...batch.map(({ until }) => until)),
      );
      groups.forEach(([, members], group) => {
        for (const [place, member] of members.entries()) member.resolve(outputs[group]?.[place]);
      });
    } catch (error) {
      if (batch.length === 1 || isOfAll(error)) {
        for (const { reject } of batch) reject(error);
        return;
      }
      const half = batch.length >> 1;
      await settle(batch.slice(0, half));
      await settle(batch.slice(half));
    }
  }

  function serve(): void {
    isScheduled = false;
    while (running < atOnce && waiting.length > 0) {
      running++;
      void settle(next()).finally(() => {
        running--;
        if (waiting.length > 0) schedule();
        else if (running === 0) onIdle();
      });
    }
  }

  /** When all requests of this turn of the event loop have handed in theirs. */
  function schedule(): void {
    if (isScheduled) return;
    isScheduled = true;
    setImmediate(serve);
  }

  return {
    /** @throws Fault `unavailable` when too many wait */
    execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output> {
      if (isClosed) return Promise.reject(unavailable(new Error("the store is closed")));
      if (waiting.length >= WAITING_MAX) return Promise.reject(unavailable(new Error("too many commands wait")));
      return new Promise((resolve, reject) => {
        const until = performance.now() + waitMsMax;
        waiting.push({ command, input, until, resolve: (output) => resolve(output as Output), reject });
        schedule();
      });
    },
    /** Refuses further commands and resolves when those that wait have ended. */
    close(): Promise<void> {
      isClosed = true;
      if (running === 0 && waiting.length === 0) return Promise.resolve();
      return new Promise((resolve) => {
        onIdle = resolve;
      });
    },
  };
}

/** The database is away, or slow: no command is to blame, and asking again for each would only make it worse. */
function isOfAll(error: unknown): boolean {
  return error instanceof CommitUnknown || (error instanceof Fault && error.kind === "unavailable");
}
