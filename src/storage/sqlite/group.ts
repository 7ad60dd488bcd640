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
import type { CountDimension, Tables } from "../../../db/schema.ts";
import type { CallEnd } from "../../core/call.ts";
import type { Log } from "../../core/log.ts";
import { createTurnQueue } from "../../kernel/batch.ts";
import { MAX } from "../../kernel/limits.ts";
import { inSlices } from "../../kernel/loop.ts";
import { createFairShare } from "../../kernel/share.ts";
import { actingTenant } from "../../kernel/turns.ts";
import { sqliteCommitFailure, sqliteFailure, unavailable } from "../failures.ts";
import {
  type Command,
  type CommandEffects,
  FOR_ALL,
  type Queries,
  type SqliteStatement,
  type SqlValue,
  type Tx,
  type WriteOptions,
} from "../store.ts";
import { addCount, type Counts, changedCounts } from "../totals.ts";

/** It keeps the wait of the first work of a group and the pause of the event loop short, beside the bounds of its size. */
const GROUP_MS_MAX = 10;

interface GroupOptions {
  /** The only connection of this process that writes; nothing else may run on it while a group runs. */
  readonly writer: Database;
  /** Drizzle over `writer`: the same object in every work, so that prepared queries are built once. */
  readonly db: Queries;
  readonly tables: Tables;
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
    addToTotal: writer.prepare<never, [string, string, string, number]>(
      `insert into invocation_counts (tenant, dimension, value, shard, count) values (?, ?, ?, 0, ?)
       on conflict (tenant, dimension, value, shard) do update set count = count + excluded.count`,
    ),
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

  count(tenant: string, dimension: CountDimension, value: string, delta: number): void {
    addCount(this.#counts, tenant, dimension, value, delta);
  }

  ended(end: CallEnd): void {
    this.ends ??= [];
    this.ends.push(end);
  }
}

/** How far a group has come. */
interface GroupProgress {
  readonly answers: (() => void)[];
  readonly counts: Counts;
  /** Works that were begun. */
  ran: number;
}

function createGroupRunner(
  { writer, db, tables, now, log, ended, groupMs = GROUP_MS_MAX }: GroupOptions,
  commandOn: CommandOn,
) {
  const sql = statements(writer);

  /** What a closure may do in its transaction: more than commands, which many more works are. */
  const txOf = (effects: CommandEffects): Tx => ({
    count: (...count) => effects.count(...count),
    ended: (end) => effects.ended(end),
    db,
    tables,
    now,
    lock: async () => {},
    execute: async (command, input) => commandOn(command)(input, effects),
  });

  const answerOf = (write: WaitingWrite, effects: Effects, value: unknown) => () => {
    if (effects.ends !== null) ended(effects.ends);
    write.resolve(value);
  };

  /** Runs a command, and returns what answers it after the commit. Its failure fails the whole group. */
  function runCommand(write: WaitingWrite, command: Run, counts: Counts): () => void {
    const effects = new Effects(counts);
    try {
      return answerOf(write, effects, command(effects));
    } catch (cause) {
      throw new WorkFailed("a work of the group failed", { cause });
    }
  }

  /** Runs a command or a work, and returns what answers it after the commit. */
  async function perform(write: WaitingWrite, counts: Counts): Promise<() => void> {
    const effects = new Effects(counts);
    const { job } = write;
    return answerOf(write, effects, "command" in job ? job.command(effects) : await job.work(txOf(effects)));
  }

  /** Runs a work; its failure fails the whole group. */
  async function runWork(write: WaitingWrite, counts: Counts): Promise<() => void> {
    try {
      return await perform(write, counts);
    } catch (cause) {
      throw new WorkFailed("a work of the group failed", { cause });
    }
  }

  /** Runs a command or a work in a savepoint; its failure is its own. */
  async function runApart(write: WaitingWrite, counts: Counts): Promise<() => void> {
    const own: Counts = new Map();
    sql.save.run();
    try {
      const answer = await perform(write, own);
      sql.release.run();
      for (const { tenant, dimension, value, delta } of changedCounts(own))
        addCount(counts, tenant, dimension, value, delta);
      return answer;
    } catch (thrown) {
      // On a full disk and the like SQLite may have rolled back everything.
      if (!writer.inTransaction) throw new GroupLost(write, thrown);
      sql.undo.run();
      sql.release.run();
      return () => write.reject(sqliteFailure(thrown));
    }
  }

  const runAwaited = (write: WaitingWrite, apart: boolean, counts: Counts) =>
    (apart || write.mayFail ? runApart : runWork)(write, counts);

  /** Runs works for as long as a group takes. */
  async function runSome(group: readonly WaitingWrite[], apart: boolean, progress: GroupProgress): Promise<void> {
    const late = performance.now() + groupMs;
    let bytes = 0;
    for (const work of group) {
      bytes += work.bytes;
      if (progress.ran > 0 && bytes > GROUP_BYTES_MAX) break;
      progress.ran += 1;
      const command = commandOf(work, apart);
      progress.answers.push(
        command === null ? await runAwaited(work, apart, progress.counts) : runCommand(work, command, progress.counts),
      );
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
      const progress: GroupProgress = { answers: [], counts: new Map(), ran: 0 };
      try {
        await runSome(group, apart, progress);
        for (const { tenant, dimension, value, delta } of changedCounts(progress.counts)) {
          sql.addToTotal.run(tenant, dimension, value, delta);
        }
        sql.commit.run();
        return { answers: progress.answers, again: group.slice(progress.ran) };
      } catch (thrown) {
        if (writer.inTransaction) undoAll();
        return afterFailure(thrown, group, progress.ran);
      }
    },
  };
}

/** A command that fails together with its group is not awaited: that would cost each of them a turn of the queue of promises. */
function commandOf({ job, mayFail }: WaitingWrite, apart: boolean): Run | null {
  return "command" in job && !apart && !mayFail ? job.command : null;
}

function isBusy(error: unknown): boolean {
  return error instanceof SQLiteError && (error.code?.startsWith("SQLITE_BUSY") ?? false);
}

export function createGroupCommit(options: GroupOptions) {
  const commandOn = commandsOn(options.writer);
  const runner = createGroupRunner(options, commandOn);
  const queue = createGroupQueue();
  const share = createFairShare({ size: MAX.storeWaiting });
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
      // Another process (a command, a backup) may hold the write lock for this long before writes are refused.
      if (isBusy(error) && performance.now() - busySince < 4_000) return false;
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
    else setTimeout(turn, 20);
  }

  function enter<T>({ tenant, mayFail, bytes, job }: Omit<WaitingWrite, "resolve" | "reject">): Promise<T> {
    if (closed) return Promise.reject(unavailable(new Error("the store is closed")));
    if (share.take(tenant) !== null) return Promise.reject(unavailable(new Error("too many works wait")));
    return new Promise<T>((resolve, reject) => {
      queue.add({
        tenant,
        mayFail,
        bytes,
        job,
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
    /** Nothing but this process writes, so that an urgent work comes with the next group too. */
    write<T>(work: (tx: Tx) => Promise<T>, { bytes = 0 }: WriteOptions = {}): Promise<T> {
      const tenant = actingTenant();
      return enter({ tenant: tenant ?? FOR_ALL, mayFail: tenant !== null, bytes, job: { work } });
    },
    execute<Input, Output>(command: Command<Input, Output>, input: Input): Promise<Output> {
      const run = commandOn(command);
      return enter({
        tenant: command.tenantOf(input),
        mayFail: false,
        bytes: command.bytesOf(input),
        job: { command: (effects) => run(input, effects) },
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

type Run = (effects: CommandEffects) => unknown;

interface WaitingWrite {
  /** A command gives its output at once, and needs no transaction made for it. */
  readonly job: { readonly command: Run } | { readonly work: (tx: Tx) => Promise<unknown> };
  /** Whose turn it takes. The process's own work is FOR_ALL. */
  readonly tenant: string;
  /** Whether it has a savepoint of its own from the first: a tenant can make it fail, as by a name that is in use. */
  readonly mayFail: boolean;
  /** About how many it carries. */
  readonly bytes: number;
  resolve(value: unknown): void;
  reject(error: unknown): void;
}

/** A work failed without a savepoint: nothing of the group may stay. */
class WorkFailed extends Error {}

/** The failure of one work undid the others with it; they may succeed without that one. */
class GroupLost extends Error {
  readonly work: WaitingWrite;

  constructor(work: WaitingWrite, cause: unknown) {
    super("the transaction was rolled back", { cause });
    this.work = work;
  }
}

/** The outcome of a group: how to answer the works that are done, and which ones have to run in another group. */
interface GroupOutcome {
  readonly answers: readonly (() => void)[];
  readonly again: readonly WaitingWrite[];
  /** Whether the next group needs a savepoint for each work. */
  readonly apart?: boolean;
}

/** Nothing of the group was stored: which works are told so, and which run again. */
function afterFailure(thrown: unknown, group: readonly WaitingWrite[], ran: number): GroupOutcome {
  if (thrown instanceof WorkFailed) return { answers: [], again: group, apart: true };
  if (thrown instanceof GroupLost) {
    const { work: lost, cause } = thrown;
    return {
      answers: [() => lost.reject(sqliteFailure(cause))],
      again: group.filter((work) => work !== lost),
      apart: true,
    };
  }
  const fault = sqliteCommitFailure(thrown);
  return {
    answers: group.slice(0, ran).map((work) => () => work.reject(fault)),
    again: group.slice(ran),
  };
}

/** Bounds of one group, beside its time. */
const GROUP_WORKS_MAX = 512;
/** A commit writes what its works have changed: 5 ms for so much on an idle disk (measured), 114 ms for 32 MiB. */
const GROUP_BYTES_MAX = 1024 * 1024;
/**
 * From here on a work is large: every second group begins with one, and no other work waits for more. While a tenant sent
 * 150 bodies of a mebibyte at a time, its neighbour's call took 1 s, and 3 s at most; with this, 17 ms and 310 (measured).
 */
const LARGE_BYTES = 16 * 1024;

/** Works that are done for all: beside them a thousand tenants may have turns. */
const isForAll = ({ tenant }: WaitingWrite) => tenant === FOR_ALL;

const isLarge = ({ bytes }: WaitingWrite) => bytes >= LARGE_BYTES;

/** One of each, for as long as there are any. */
function alternating(some: readonly WaitingWrite[], others: readonly WaitingWrite[]): readonly WaitingWrite[] {
  if (some.length === 0) return others;
  if (others.length === 0) return some;
  const all = Array.from({ length: Math.max(some.length, others.length) }, (_, at) => [some[at], others[at]]);
  return all.flat().filter((work) => work !== undefined);
}

/** The works that wait to be written, and which of them are the next group: by turns of the tenants when there are more. */
function createGroupQueue() {
  const small = createTurnQueue<WaitingWrite>();
  const forAll = createTurnQueue<WaitingWrite>();
  const large = createTurnQueue<WaitingWrite>();
  let undone: readonly WaitingWrite[] = [];
  let isLargeDue = false;
  let isForAllFirst = true;

  const queues = [small, forAll, large];
  const queueOf = (work: WaitingWrite) => {
    if (isLarge(work)) return large;
    return isForAll(work) ? forAll : small;
  };

  /**
   * Those for all have every second place, so that neither they nor the tenants wait for all of the others. The first place
   * goes by turns too, since it may be the only one that the group has time for.
   */
  function nextSmall(): readonly WaitingWrite[] {
    const some = forAll.take(Math.max(GROUP_WORKS_MAX / 2, GROUP_WORKS_MAX - small.size));
    const others = small.take(GROUP_WORKS_MAX - some.length);
    if (!isLargeDue) isForAllFirst = !isForAllFirst;
    return isForAllFirst ? alternating(some, others) : alternating(others, some);
  }

  return {
    size: () => small.size + forAll.size + large.size + undone.length,
    add: (work: WaitingWrite) => queueOf(work).add(work),
    /** They come next. Those that are to run apart do so all together, as the failed one is among them. */
    putBack(works: readonly WaitingWrite[], apart: boolean): void {
      if (apart) {
        undone = works;
        return;
      }
      for (const queue of queues) queue.putBack(works.filter((work) => queueOf(work) === queue));
    },
    next(): readonly WaitingWrite[] {
      if (undone.length > 0) {
        const again = undone;
        undone = [];
        return again;
      }
      if (large.size === 0) {
        isLargeDue = false;
        return nextSmall();
      }
      const group = [...(isLargeDue ? large.take(1) : []), ...nextSmall()];
      let bytes = group.reduce((sum, work) => sum + work.bytes, 0);
      for (let next = large.take(1); next[0] !== undefined; next = large.take(1)) {
        bytes += next[0].bytes;
        if (group.length > 0 && bytes > GROUP_BYTES_MAX) {
          large.putBack(next);
          break;
        }
        group.push(next[0]);
      }
      isLargeDue = !isLargeDue && large.size > 0;
      return group;
    },
    all(): readonly WaitingWrite[] {
      const works = [...undone, ...queues.flatMap((queue) => queue.take(queue.size))];
      undone = [];
      return works;
    },
  };
}

type CommandOn = <Input, Output>(command: Command<Input, Output>) => (input: Input, effects: CommandEffects) => Output;

/** Commands, their statements prepared once on this connection. */
export function commandsOn(writer: Database): CommandOn {
  const known = new Map<unknown, (input: never, effects: CommandEffects) => unknown>();
  function prepare(text: string): SqliteStatement {
    const statement = writer.prepare<Record<string, unknown>, SqlValue[]>(text);
    return {
      run: (...values) => statement.run(...values).changes,
      get: (...values) => statement.get(...values),
    };
  }
  return (command) => {
    const run = known.get(command) ?? command.sqlite(prepare);
    known.set(command, run);
    return run as ReturnType<typeof command.sqlite>;
  };
}
