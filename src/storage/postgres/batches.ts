// Commands on Postgres: those that come in one turn of the event loop, and while others are being written, share a
// transaction, in which each kind is one statement. A command alone is written at once.

import { Fault } from "../../core/fault.ts";
import { createTurnQueue } from "../../kernel/batch.ts";
import { MAX } from "../../kernel/limits.ts";
import { inSlices } from "../../kernel/loop.ts";
import { createFairShare } from "../../kernel/share.ts";
import { unavailable } from "../failures.ts";
import { type Command, type CommandBase, CommitUnknown, type SqlRow, type Tx } from "../store.ts";
import type { DatabaseConnection } from "./pool.ts";

// biome-ignore lint/suspicious/noExplicitAny: commands of all kinds stand in one queue, each beside its own input.
type AnyCommand = CommandBase<any, any>;

/** Commands of one kind. */
export interface CommandGroup {
  readonly command: AnyCommand;
  readonly inputs: readonly unknown[];
}

interface WaitingCommand {
  readonly command: AnyCommand;
  readonly input: unknown;
  readonly key: string | null;
  readonly tenant: string;
  readonly bytes: number;
  /** By performance.now(). */
  readonly until: number;
  resolve(output: unknown): void;
  reject(error: unknown): void;
}

interface CommandBatchesOptions {
  /**
   * Transactions at once. Of those that are quick only one is at its statements: the next one begins when this one waits
   * for the disk, and has gathered more by then, which costs less for each. Measured with 128 connections beside two that
   * began as they liked: 25 instead of 29 µs of the server for an accept, 131 instead of 143 for a whole call.
   */
  readonly atOnce: number;
  /** The longest that a command takes, its wait included. */
  readonly waitMsMax: number;
  /**
   * Runs all of them in one transaction, and gives what came of them by group.
   *
   * @param committing to be called when nothing but the commit is left
   */
  run(groups: readonly CommandGroup[], until: number, committing: () => void): Promise<unknown[][]>;
}

/** The commands that wait, and which of them are written next. */
function createQueue(waitMsMax: number) {
  const waiting = createTurnQueue<WaitingCommand>();
  /** Of all that have not been answered. */
  const share = createFairShare({ size: MAX.storeWaiting });
  /**
   * By key, the commands behind the one that waits or is being written, in their order. They are not among the waiting,
   * so that however many there are, the others do not wait for them.
   */
  const lines = new Map<string, WaitingCommand[]>();

  /** A command has been answered: the next one of its key may be written. */
  function leave({ key, tenant }: WaitingCommand): void {
    share.giveBack(tenant);
    if (key === null) return;
    const next = lines.get(key)?.shift();
    if (next === undefined) {
      lines.delete(key);
      return;
    }
    waiting.add(next);
  }

  return {
    leave,
    isEmpty: () => waiting.size === 0,
    /** False when its tenant may not have more that wait. */
    enter(member: WaitingCommand): boolean {
      if (share.take(member.tenant) !== null) return false;
      const line = member.key === null ? undefined : lines.get(member.key);
      if (line !== undefined) {
        line.push(member);
        return true;
      }
      if (member.key !== null) lines.set(member.key, []);
      waiting.add(member);
      return true;
    },
    /**
     * The next commands that may be written together. They have as long as the one of them that has least time, so those
     * that have far more are not among them: they would be refused together with it.
     */
    next(): WaitingCommand[] {
      const batch: WaitingCommand[] = [];
      const now = performance.now();
      const others: WaitingCommand[] = [];
      let bytes = 0;
      let at = 0;
      const next = waiting.take(256);
      for (const member of next) {
        const { until } = member;
        if (batch.length > 0 && bytes + member.bytes > 4 * 1024 * 1024) break;
        at++;
        if (until <= now) {
          member.reject(unavailable(new Error("the command waited too long")));
          leave(member);
        } else if (Math.abs(until - (batch[0] ?? member).until) > waitMsMax / 2) {
          others.push(member);
        } else {
          batch.push(member);
          bytes += member.bytes;
        }
      }
      waiting.putBack([...others, ...next.slice(at)]);
      return batch;
    },
  };
}

/**
 * Those that are at their statements, and hold up others until they are not any more or have been for too long.
 *
 * @param onFree called whenever one holds up nobody any more
 */
function createExecutions(onFree: () => void) {
  const executing = new Set<object>();
  return {
    isFree: () => executing.size === 0,
    /** @returns what says that it is over */
    begin(): () => void {
      const over = () => {
        clearTimeout(timer);
        executing.delete(over);
        onFree();
      };
      // A transaction that has not come to its commit by then waits for somebody, and holds up no other any more.
      const timer = setTimeout(over, 20);
      executing.add(over);
      return over;
    },
  };
}

export function createCommandBatches({ atOnce, waitMsMax, run }: CommandBatchesOptions) {
  const queue = createQueue(waitMsMax);
  let isScheduled = false;
  let running = 0;
  const executions = createExecutions(() => {
    if (!queue.isEmpty()) schedule();
  });
  let isClosed = false;
  const idle = Promise.withResolvers<void>();

  /** Answers a command, so that the next one of its key may be written. */
  function answer(member: WaitingCommand, tell: () => void): void {
    tell();
    queue.leave(member);
    if (!queue.isEmpty()) schedule();
  }

  /** One that fails undoes the others with it, so each half of them is then written by itself. */
  async function settle(batch: readonly WaitingCommand[], executed: () => void): Promise<void> {
    // In one order everywhere, so that two transactions do not wait for each other.
    const groups = [...Map.groupBy(batch, ({ command }) => command)].sort(([a], [b]) => (a.name < b.name ? -1 : 1));
    try {
      const outputs = await run(
        groups.map(([command, members]) => ({ command, inputs: members.map(({ input }) => input) })),
        Math.min(...batch.map(({ until }) => until)),
        executed,
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
      await settle(batch.slice(0, half), executed);
      await settle(batch.slice(half), executed);
    }
  }

  function serve(): void {
    isScheduled = false;
    while (running < atOnce && executions.isFree() && !queue.isEmpty()) {
      const batch = queue.next();
      // They were refused, and what that leads to is enough for one turn of the event loop.
      if (batch.length === 0) {
        schedule();
        break;
      }
      running++;
      const executed = executions.begin();
      void settle(batch, executed).finally(() => {
        running--;
        executed();
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
    execute<Input, Output>(command: CommandBase<Input, Output>, input: Input): Promise<Output> {
      if (isClosed) return Promise.reject(unavailable(new Error("the store is closed")));
      return new Promise((resolve, reject) => {
        const isTaken = queue.enter({
          command,
          input,
          key: command.keyOf?.(input) ?? null,
          tenant: command.tenantOf(input),
          bytes: command.bytesOf(input),
          until: performance.now() + waitMsMax,
          resolve: (output) => resolve(output as Output),
          reject,
        });
        if (!isTaken) reject(unavailable(new Error("too many commands wait")));
        else if (!queue.isEmpty()) schedule();
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

/** Of each kind one statement at a time: one that has to wait, for a table that is locked, holds up no other kind. */
export function createCommandKinds(options: Pick<CommandBatchesOptions, "waitMsMax" | "run">) {
  const kinds = new Map<unknown, ReturnType<typeof createCommandBatches>>();
  return {
    execute<Input, Output>(command: CommandBase<Input, Output>, input: Input): Promise<Output> {
      const kind = kinds.get(command) ?? createCommandBatches({ ...options, atOnce: 1 });
      kinds.set(command, kind);
      return kind.execute(command, input);
    },
    close: () => Promise.all([...kinds.values()].map((kind) => kind.close())),
  };
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

/** Runs commands of one kind as one statement. */
export async function runCommands<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: CommandBase<Input, Output>,
  inputs: readonly Input[],
  { ended }: Pick<Tx, "ended">,
): Promise<Output[]> {
  const rows = (await connection.query(postgres.text, postgres.valuesOf(inputs), "objects")) as SqlRow[];
  return postgres.outputsOf(inputs, rows, { ended });
}

/** One kind after the other, each with `run`. Gives the outputs of each. */
export async function runGroups(
  groups: readonly CommandGroup[],
  run: (group: CommandGroup) => Promise<unknown[]>,
): Promise<unknown[][]> {
  const outputs: unknown[][] = [];
  for (const group of groups) outputs.push(await run(group));
  return outputs;
}
