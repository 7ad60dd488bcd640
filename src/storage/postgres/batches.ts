// Batches commands on Postgres: those that arrive in one turn of the event loop, or while a batch is being written, share a
// transaction, in which each kind of command is one statement. A command that is alone is written at once.
import { createTurnQueue } from "../../kernel/batch.ts";
import { MAX } from "../../kernel/limits.ts";
import { inSlices } from "../../kernel/loop.ts";
import { createFairShare } from "../../kernel/share.ts";
import { LONG_WAIT_MS } from "../../kernel/wait.ts";
import { isUnavailable, unavailable } from "../failures.ts";
import type { Command, CommandBase, SqlRow, Tx } from "../store.ts";
import type { DatabaseConnection } from "./pool.ts";

// biome-ignore lint/suspicious/noExplicitAny: commands of all kinds are in one queue, each with its own type of input.
type AnyCommand = CommandBase<any, any>;

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
  /** What is taken may be written, so nobody is told from then on that it was not; what is refused is never taken. */
  state: "waiting" | "taken" | "refused";
  resolve(output: unknown): void;
  reject(error: unknown): void;
}

interface CommandBatchesOptions {
  /**
   * The most transactions at a time. Only one of them executes statements, unless it is slow: the next begins when that one
   * waits for its commit. By then more commands have come, and a larger batch costs less for each. Compared with two transactions
   * that begin at will (128 connections): 25 instead of 29 µs of the server for an accept, 131 instead of 143 for a whole call.
   */
  readonly atOnce: number;
  /** The longest that a command takes, its wait included. */
  readonly waitMsMax: number;
  /** Runs the groups in one transaction: the outputs of each. @param committing to be called when only the commit is left */
  run(groups: readonly CommandGroup[], until: number, committing: () => void): Promise<unknown[][]>;
}

function refuseLate(member: WaitingCommand): void {
  if (member.state !== "waiting") return;
  member.state = "refused";
  member.reject(unavailable(new Error("the command waited too long")));
}

/** The queue of waiting commands, which forms the batches. */
function createQueue(waitMsMax: number) {
  const waiting = createTurnQueue<WaitingCommand>();
  /** Bounds the commands that are not answered yet, by tenant. */
  const share = createFairShare({ size: MAX.storeWaiting });
  /** By key, the commands behind the one that waits or is written, in order. Outside of `waiting` they hold up no others. */
  const lines = new Map<string, WaitingCommand[]>();

  /** Takes an answered command off the queue, so that the next one of its key may be written. */
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
    /** @returns false when the tenant already has its share of waiting commands */
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
     * The next batch. Its time limit is that of the command with the least time left, so commands with far more time are left
     * out: they would be refused together with that one.
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
        if (until <= now || member.state === "refused") {
          refuseLate(member);
          leave(member);
        } else if (Math.abs(until - (batch[0] ?? member).until) > waitMsMax / 2) {
          others.push(member);
        } else {
          batch.push(member);
          member.state = "taken";
          bytes += member.bytes;
        }
      }
      waiting.putBack([...others, ...next.slice(at)]);
      return batch;
    },
  };
}

/** The transactions that are executing statements. Each holds up the next one until its commit, or until it took too long. */
function createExecutions(onFree: () => void) {
  const executing = new Set<object>();
  return {
    isFree: () => executing.size === 0,
    /** Begins an execution. @returns the function that ends it */
    begin(): () => void {
      const over = () => {
        clearTimeout(timer);
        executing.delete(over);
        onFree();
      };
      // A transaction that has not reached its commit by then is waiting for a lock, and no longer holds up others.
      const timer = setTimeout(over, 20);
      executing.add(over);
      return over;
    },
  };
}

function memberOf(
  command: AnyCommand,
  input: unknown,
  until: number,
  { resolve, reject }: PromiseWithResolvers<unknown>,
): WaitingCommand {
  const key = command.keyOf?.(input) ?? null;
  const tenant = command.tenantOf(input);
  const bytes = command.bytesOf(input);
  return { command, input, key, tenant, bytes, until, state: "waiting", resolve, reject };
}

/** For a command with less time than the batches that are under way may take: it is not left to wait for their end. */
function endsEarly<T>(member: WaitingCommand, promise: Promise<T>): Promise<T> {
  const timer = setTimeout(refuseLate, member.until - performance.now(), member);
  return promise.finally(() => clearTimeout(timer));
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

  /** Settles a command's promise, so that the next one of its key may be written. */
  function answer(member: WaitingCommand, settlePromise: () => void): void {
    settlePromise();
    queue.leave(member);
    if (!queue.isEmpty()) schedule();
  }

  /** Writes a batch. A command that fails undoes the whole batch, so each half is then written by itself. */
  async function writeBatch(batch: readonly WaitingCommand[], executed: () => void): Promise<void> {
    // Groups are always in one order, so that two transactions do not deadlock.
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
      // Where the database is unreachable or slow no single command is to blame, and retrying each would make it worse.
      if (batch.length === 1 || isUnavailable(error)) {
        for (const member of batch) answer(member, () => member.reject(error));
        return;
      }
      const half = batch.length >> 1;
      await writeBatch(batch.slice(0, half), executed);
      await writeBatch(batch.slice(half), executed);
    }
  }

  function serve(): void {
    isScheduled = false;
    while (running < atOnce && executions.isFree() && !queue.isEmpty()) {
      const batch = queue.next();
      // All were refused, which is enough work for one turn of the event loop.
      if (batch.length === 0) {
        schedule();
        break;
      }
      running++;
      const executed = executions.begin();
      void writeBatch(batch, executed).finally(() => {
        running--;
        executed();
        resolveIfIdle();
      });
    }
    resolveIfIdle();
  }

  function resolveIfIdle(): void {
    if (isClosed && running === 0 && queue.isEmpty()) idle.resolve();
  }

  /** Serves the queue when all requests of this turn of the event loop have added their commands. */
  function schedule(): void {
    if (isScheduled) return;
    isScheduled = true;
    setImmediate(serve);
  }

  return {
    /** @param until by performance.now(), at most `waitMsMax` from now @throws Fault `unavailable` when too many wait */
    execute<Input, Output>(
      command: CommandBase<Input, Output>,
      input: Input,
      until = performance.now() + waitMsMax,
    ): Promise<Output> {
      if (isClosed) return Promise.reject(unavailable(new Error("the store is closed")));
      const answered = Promise.withResolvers<unknown>();
      const member = memberOf(command, input, until, answered);
      if (!queue.enter(member)) member.reject(unavailable(new Error("too many commands wait")));
      else if (!queue.isEmpty()) schedule();
      const isEarly = until - performance.now() < waitMsMax - LONG_WAIT_MS / 2;
      return (isEarly ? endsEarly(member, answered.promise) : answered.promise) as Promise<Output>;
    },
    /** Refuses further commands and resolves when the waiting ones have ended. */
    close(): Promise<void> {
      isClosed = true;
      resolveIfIdle();
      return idle.promise;
    },
  };
}

/** Batches for each kind of command, so that one that waits for a locked table holds up no other kind. */
export function createCommandKinds(options: Pick<CommandBatchesOptions, "waitMsMax" | "run">) {
  const kinds = new Map<unknown, ReturnType<typeof createCommandBatches>>();
  return {
    execute<Input, Output>(command: CommandBase<Input, Output>, input: Input, until?: number): Promise<Output> {
      const kind = kinds.getOrInsertComputed(command, () => createCommandBatches({ ...options, atOnce: 1 }));
      return kind.execute(command, input, until);
    },
    close: () => Promise.all([...kinds.values()].map((kind) => kind.close())),
  };
}

/** A command from this size on is large. One of 32 MiB takes the server as long as thousands of small ones. */
const LARGE_BYTES = 256 * 1024;

/** Separate batches for large and small commands, so that small ones do not wait for large ones. */
export function createCommandLanes(options: CommandBatchesOptions & { readonly largeAtOnce: number }) {
  const small = createCommandBatches(options);
  const large = createCommandBatches({ ...options, atOnce: options.largeAtOnce });
  return {
    execute<Input, Output>(command: Command<Input, Output>, input: Input, until?: number): Promise<Output> {
      const lane = command.bytesOf(input) < LARGE_BYTES ? small : large;
      return lane.execute(command, input, until);
    },
    close: () => Promise.all([small.close(), large.close()]),
  };
}

/** Runs commands of one kind as a single statement. */
export async function runCommands<Input, Output>(
  connection: DatabaseConnection,
  { postgres }: CommandBase<Input, Output>,
  inputs: readonly Input[],
  { ended }: Pick<Tx, "ended">,
): Promise<Output[]> {
  const rows = (await connection.query(postgres.text, postgres.valuesOf(inputs), "objects")) as SqlRow[];
  return postgres.outputsOf(inputs, rows, { ended });
}

/** Runs the groups one after the other. Resolves with the outputs of each. */
export async function runGroups(groups: readonly CommandGroup[], on: DatabaseConnection, effects: Pick<Tx, "ended">) {
  const outputs: unknown[][] = [];
  for (const { command, inputs } of groups) outputs.push(await runCommands(on, command, inputs, effects));
  return outputs;
}
