// Group commit: works that wait at the same time share one transaction of the one SQLite writer, and all are answered
// after its commit. A commit costs one wait for the disk, so this makes durable writes fast. A savepoint for each work
// would let one fail alone, but copies every page that the work touches (measured: half of the cost of an accept). So a
// group first runs without savepoints, but for what a tenant may make fail as often as it likes; when another work fails, the
// group is rolled back and runs again with them.
// The writer is on the main thread: on one of its own (measured by turns on two cores, commands handed over as one JSON text)
// an accept took 36 instead of 38 µs of the main thread but 56 instead of 43 in all, and a whole call 96 instead of 145 but
// 285 instead of 245, so that two cores did less. Checkpoints are on a thread of their own: checkpoints.ts.
// In one file, since what a failure undoes is seen only with all of it.
import { type Database, SQLiteError } from "bun:sqlite";
import type { CountDimension, Tables } from "../../db/schema.ts";
import { createFairShare } from "../concurrency/fair-share.ts";
import { actingTenant } from "../concurrency/request-turns.ts";
import { inSlices } from "../concurrency/slices.ts";
import type { CallEnd } from "../core/call-end.ts";
import type { Log } from "../core/log.ts";
import { type Command, type CommandEffects, FOR_ALL } from "./commands.ts";
import { addCount, addCounts, type Counts } from "./counts.ts";
import { sqliteFailure, unavailable } from "./failures.ts";
import { afterFailure, GroupLost, type GroupOutcome, type WaitingWrite, WorkFailed } from "./group-outcome.ts";
import { createGroupQueue, GROUP_BYTES_MAX } from "./group-queue.ts";
import { type CommandOn, commandsOn } from "./sqlite-commands.ts";
import type { SqliteTotals } from "./sqlite-totals.ts";
import type { Queries, Tx } from "./store.ts";

/** It keeps the wait of the first work of a group and the pause of the event loop short, beside the bounds of its size. */
const GROUP_MS_MAX = 10;
/**
 * Works that may wait for their answer. With more of them the disk is far too slow, and memory would run out next. A tenant
 * alone may have seven eighths of them, so that it is refused before its neighbours are.
 */
const WAITING_MAX = 20_000;
/** Another process (a command, a backup) may hold the write lock for this long before writes are refused. */
const BUSY_MS_MAX = 4_000;
const BUSY_RETRY_MS = 20;

interface GroupOptions {
  /** The only connection of this process that writes; nothing else may run on it while a group runs. */
  readonly writer: Database;
  /** Drizzle over `writer`: the same object in every work, so that prepared queries are built once. */
  readonly db: Queries;
  readonly tables: Tables;
  readonly totals: SqliteTotals;
  readonly now: Tx["now"];
  readonly log: Log;
  /** Called after the commit with the calls that a work has ended. */
  readonly ended: (ends: readonly CallEnd[]) => void;
  /** How long a group takes in works. */
  readonly groupMs?: number;
}

export type GroupCommit = ReturnType<typeof createGroupCommit>;

function statements(writer: Database) {
  return {
    begin: writer.prepare("begin immediate"),
    commit: writer.prepare("commit"),
    rollback: writer.prepare("rollback"),
    save: writer.prepare("savepoint work"),
    release: writer.prepare("release work"),
    undo: writer.prepare("rollback to work"),
  };
}

/** What one work does beside its own rows. */
class Effects implements CommandEffects {
  readonly #counts: Counts;
  /** Calls that it has ended; null for most works, which end none. */
  ends: CallEnd[] | null = null;

  constructor(counts: Counts) {
    this.#counts = counts;
  }

  count(tenant: string, period: number, dimension: CountDimension, value: string, delta: number): void {
    addCount(this.#counts, tenant, period, dimension, value, delta);
  }

  ended(end: CallEnd): void {
    this.ends ??= [];
    this.ends.push(end);
  }
}

/** How far a group has come. */
interface Progress {
  readonly answers: (() => void)[];
  readonly counts: Counts;
  /** Works that were begun. */
  ran: number;
}

function createGroupRunner(
  { writer, db, tables, totals, now, log, ended, groupMs = GROUP_MS_MAX }: GroupOptions,
  commandOn: CommandOn,
) {
  const sql = statements(writer);

  /** What a closure may do in its transaction: more than commands, which many more works are. */
  const txOf = (effects: CommandEffects): Tx => ({
    count: (...count) => effects.count(...count),
    ended: (end) => effects.ended(end),
    db,
    tables,
    logged: totals,
    now,
    lock: async () => {},
    execute: async (command, input) => commandOn(command)(input, effects),
  });

  /** Runs one work, and returns a function that answers it after the commit: at once for a command. */
  function perform(work: WaitingWrite, counts: Counts): Bun.MaybePromise<() => void> {
    const effects = new Effects(counts);
    const value = work.run(effects, txOf);
    return value instanceof Promise ? answerLate(work, effects, value) : answerOf(work, effects, value);
  }

  const answerLate = async (work: WaitingWrite, effects: Effects, value: Promise<unknown>) =>
    answerOf(work, effects, await value);

  const answerOf = (work: WaitingWrite, effects: Effects, value: unknown) => () => {
    if (effects.ends !== null) ended(effects.ends);
    work.resolve(value);
  };

  /** The same; its failure fails the whole group. */
  function runTogether(work: WaitingWrite, counts: Counts): Bun.MaybePromise<() => void> {
    try {
      const answer = perform(work, counts);
      return answer instanceof Promise ? answer.catch(failTogether) : answer;
    } catch (cause) {
      return failTogether(cause);
    }
  }

  /** The same in a savepoint; its failure is its own. */
  async function runApart(work: WaitingWrite, counts: Counts): Promise<() => void> {
    const own: Counts = new Map();
    sql.save.run();
    try {
      const answer = await perform(work, own);
      sql.release.run();
      addCounts(counts, own);
      return answer;
    } catch (thrown) {
      // On a full disk and the like SQLite may have rolled back everything.
      if (!writer.inTransaction) throw new GroupLost(work, thrown);
      sql.undo.run();
      sql.release.run();
      return () => work.reject(sqliteFailure(thrown));
    }
  }

  const inItsWay = (work: WaitingWrite, apart: boolean) => (apart || work.mayFail ? runApart : runTogether);

  /** Runs works for as long as a group takes. */
  async function runSome(group: readonly WaitingWrite[], apart: boolean, progress: Progress): Promise<void> {
    const late = performance.now() + groupMs;
    let bytes = 0;
    for (const work of group) {
      bytes += work.bytes;
      if (progress.ran > 0 && bytes > GROUP_BYTES_MAX) break;
      progress.ran += 1;
      const answer = inItsWay(work, apart)(work, progress.counts);
      progress.answers.push(answer instanceof Promise ? await answer : answer);
      if (performance.now() > late) break;
    }
  }

  /** When the disk refuses even this, the next group tries again before it begins. */
  function undoAll(): void {
    try {
      sql.rollback.run();
    } catch (error) {
      log.error("rollback_failed", { error });
    }
  }

  return {
    /** @throws SQLiteError SQLITE_BUSY when another process holds the write lock. */
    begin(): void {
      if (writer.inTransaction) sql.rollback.run();
      sql.begin.run();
    },
    /** Runs as many works as fit into the bounds of a group, and commits. Never throws. */
    async run(group: readonly WaitingWrite[], apart: boolean): Promise<GroupOutcome> {
      const progress: Progress = { answers: [], counts: new Map(), ran: 0 };
      try {
        await runSome(group, apart, progress);
        const tellStored = totals.write(progress.counts);
        sql.commit.run();
        // At once, before anybody reads what is committed.
        tellStored();
        return { answers: progress.answers, again: group.slice(progress.ran) };
      } catch (thrown) {
        if (writer.inTransaction) undoAll();
        return afterFailure(thrown, group, progress.ran);
      }
    },
  };
}

function failTogether(cause: unknown): never {
  throw new WorkFailed("a work of the group failed", { cause });
}

function isBusy(error: unknown): boolean {
  return error instanceof SQLiteError && (error.code?.startsWith("SQLITE_BUSY") ?? false);
}

export function createGroupCommit(options: GroupOptions) {
  const commandOn = commandsOn(options.writer);
  const runner = createGroupRunner(options, commandOn);
  const queue = createGroupQueue();
  const share = createFairShare({ size: WAITING_MAX });
  let scheduled = false;
  let closed = false;
  let apart = false;
  let busySince: number | undefined;
  let onIdle = () => {};

  /** False when another process holds the write lock: the works go on waiting, without blocking the event loop. */
  async function begin(): Promise<boolean> {
    try {
      runner.begin();
      busySince = undefined;
      return true;
    } catch (error) {
      busySince ??= performance.now();
      if (isBusy(error) && performance.now() - busySince < BUSY_MS_MAX) return false;
      busySince = undefined;
      await inSlices(queue.all(), (work) => work.reject(sqliteFailure(error)));
      return false;
    }
  }

  async function turn(): Promise<void> {
    if (await begin()) {
      const outcome = await runner.run(queue.next(), apart);
      const { answers, again } = outcome;
      apart = outcome.apart === true;
      if (again.length > 0) queue.putBack(again, apart);
      await inSlices(answers, (answer) => answer());
    }
    scheduled = false;
    if (queue.size() > 0) schedule();
    else onIdle();
  }

  /** A group starts when all requests of this turn of the event loop have handed in their works. */
  function schedule(): void {
    if (scheduled) return;
    scheduled = true;
    if (busySince === undefined) setImmediate(turn);
    else setTimeout(turn, BUSY_RETRY_MS);
  }

  function enter<T>({ tenant, ...work }: Omit<WaitingWrite, "resolve" | "reject">): Promise<T> {
    if (closed) return Promise.reject(unavailable(new Error("the store is closed")));
    if (share.take(tenant) !== null) return Promise.reject(unavailable(new Error("too many works wait")));
    return new Promise<T>((resolve, reject) => {
      queue.add({
        ...work,
        tenant,
        resolve(value) {
          share.giveBack(tenant);
          resolve(value as T);
        },
        reject(error) {
          share.giveBack(tenant);
          reject(error);
        },
      });
      schedule();
    });
  }

  return {
    // Queries are promises of Drizzle's own kind, so what a work gives is always awaited.
    write<T>(work: (tx: Tx) => Promise<T>, bytes = 0): Promise<T> {
      const tenant = actingTenant();
      const run: WaitingWrite["run"] = async (effects, txOf) => await work(txOf(effects));
      return enter({ tenant: tenant ?? FOR_ALL, mayFail: tenant !== null, bytes, run });
    },
    execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output> {
      const run = commandOn(command);
      return enter({
        tenant: command.tenantOf(input),
        mayFail: false,
        bytes: command.bytesOf(input),
        run: (effects) => run(input, effects),
      });
    },
    /** Refuses further works and resolves when those that wait have ended. */
    close(): Promise<void> {
      closed = true;
      if (!scheduled) return Promise.resolve();
      return new Promise((resolve) => {
        onIdle = resolve;
      });
    },
  };
}
