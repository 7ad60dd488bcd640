// Commands on Postgres: those that come in one turn of the event loop, and while others are being written, share a
// transaction, in which each kind is one statement. A command alone is written at once.

import { inSlices } from "../concurrency/slices.ts";
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
  readonly key: string | null;
  readonly bytes: number;
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

/** The commands that wait, and which of them are written next. */
function createQueue(waitMsMax: number) {
  let waiting: WaitingCommand[] = [];
  /**
   * By key, the commands behind the one that waits or is being written, in their order. They are not among the waiting,
   * so that however many there are, the others do not wait for them.
   */
  const lines = new Map<string, WaitingCommand[]>();
  let inLines = 0;

  /** A command has been answered: the next one of its key may be written. */
  function leave({ key }: WaitingCommand): void {
    if (key === null) return;
    const next = lines.get(key)?.shift();
    if (next === undefined) {
      lines.delete(key);
      return;
    }
    inLines--;
    waiting.push(next);
  }

  return {
    leave,
    isEmpty: () => waiting.length === 0,
    isFull: () => waiting.length + inLines >= WAITING_MAX,
    enter(member: WaitingCommand): void {
      const line = member.key === null ? undefined : lines.get(member.key);
      if (line !== undefined) {
        line.push(member);
        inLines++;
        return;
      }
      if (member.key !== null) lines.set(member.key, []);
      waiting.push(member);
    },
    /**
     * The next commands that may be written together, in the order of their arrival. They have as long as the one that
     * has waited longest, so those that have far more time are not among them: they would be refused together with it.
     */
    next(): WaitingCommand[] {
      const batch: WaitingCommand[] = [];
      const now = performance.now();
      let bytes = 0;
      let at = 0;
      for (const member of waiting) {
        const { until } = member;
        const isFull = batch.length === COMMANDS_MAX || bytes + member.bytes > BYTES_MAX;
        const isOther = Math.abs(until - (batch[0] ?? member).until) > waitMsMax / 2;
        if (batch.length > 0 && (isFull || isOther)) break;
        at++;
        if (until <= now) {
          member.reject(unavailable(new Error("the command waited too long")));
          leave(member);
          continue;
        }
        batch.push(member);
        bytes += member.bytes;
      }
      waiting = waiting.slice(at);
      return batch;
    },
  };
}

export function createCommandBatches({ atOnce, waitMsMax, run }: CommandBatchesOptions) {
  const queue = createQueue(waitMsMax);
  let isScheduled = false;
  let running = 0;
  let isClosed = false;
  const idle = Promise.withResolvers<void>();

  /** Answers a command, so that the next one of its key may be written. */
  function answer(member: WaitingCommand, tell: () => void): void {
    tell();
    queue.leave(member);
    if (!queue.isEmpty()) schedule();
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
      const answers = groups.flatMap(([, members], group) =>
        members.map((member, place) => () => answer(member, () => member.resolve(outputs[group]?.[place]))),
      );
      await inSlices(answers, (give) => give());
    } catch (error) {
      if (batch.length === 1 || isOfAll(error)) {
        for (const member of batch) answer(member, () => member.reject(error));
        return;
      }
      const half = batch.length >> 1;
      await settle(batch.slice(0, half));
      await settle(batch.slice(half));
    }
  }

  function serve(): void {
    isScheduled = false;
    while (running < atOnce && !queue.isEmpty()) {
      const batch = queue.next();
      if (batch.length === 0) continue;
      running++;
      void settle(batch).finally(() => {
        running--;
        if (!queue.isEmpty()) schedule();
        tellIfIdle();
      });
    }
    tellIfIdle();
  }

  function tellIfIdle(): void {
    if (isClosed && running === 0 && queue.isEmpty()) idle.resolve();
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
      if (queue.isFull()) return Promise.reject(unavailable(new Error("too many commands wait")));
      return new Promise((resolve, reject) => {
        queue.enter({
          command,
          input,
          key: command.keyOf?.(input) ?? null,
          bytes: command.bytesOf(input),
          until: performance.now() + waitMsMax,
          resolve: (output) => resolve(output as Output),
          reject,
        });
        if (!queue.isEmpty()) schedule();
      });
    },
    /** Refuses further commands and resolves when those that wait have ended. */
    close(): Promise<void> {
      isClosed = true;
      tellIfIdle();
      return idle.promise;
    },
  };
}

/** The database is away, or slow: no command is to blame, and asking again for each would only make it worse. */
function isOfAll(error: unknown): boolean {
  return error instanceof CommitUnknown || (error instanceof Fault && error.kind === "unavailable");
}

/** From here on a command is large. One of 32 MiB takes the server as long as thousands of small ones. */
const LARGE_BYTES = 256 * 1024;

/** Large commands are written beside the others, which do not wait for them. */
export function createCommandLanes(options: CommandBatchesOptions & { readonly largeAtOnce: number }) {
  const small = createCommandBatches(options);
  const large = createCommandBatches({ ...options, atOnce: options.largeAtOnce });
  return {
    execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output> {
      const lane = command.bytesOf(input) < LARGE_BYTES ? small : large;
      return lane.execute(command, input);
    },
    async close(): Promise<void> {
      await Promise.all([small.close(), large.close()]);
    },
  };
}
