// Group commit: writes that wait at the same time share one transaction of the one SQLite writer, and all resolve after its
// commit. A commit costs one wait for the disk, so this makes durable writes fast. A savepoint for each write would let it fail
// alone, but copies every page that it touches (measured: half of the cost of an accept). So only writes that a tenant can make
// fail at will run in savepoints at first. When another one fails, the group is rolled back and retried with a savepoint each.
// The writer is on the main thread. On a thread of its own (measured alternately on two cores, commands sent as one JSON text) an
// accept took 36 instead of 38 µs of the main thread but 56 instead of 43 in all, and a whole call 96 instead of 145 but 285
// instead of 245, so that two cores did less. Checkpoints are on a thread of their own: checkpoints.ts.
import type { Database } from "bun:sqlite";
import type { CountDimension, Tables } from "../../../db/schema.ts";
import type { CallEnd } from "../../core/call.ts";
import type { Log } from "../../core/log.ts";
import { createTurnQueue } from "../../kernel/batch.ts";
import { MAX } from "../../kernel/limits.ts";
import { inSlices } from "../../kernel/loop.ts";
import { createFairShare, type FairShare } from "../../kernel/share.ts";
import { actingRequest, actingTenant } from "../../kernel/wait.ts";
import { isSqliteBusy, sqliteCommitFailure, sqliteFailure, unavailable, waitedTooLong } from "../failures.ts";
import type { Command, CommandEffects, Queries, SqliteStatement, SqlValue, Tx, WriteOptions } from "../store.ts";
import { FOR_ALL } from "../store.ts";
import { addCount, type Counts, changedCounts } from "../totals.ts";

/** How long a group may run, so that its first write waits little and the event loop is not held for long. */
const GROUP_MS_MAX = 10;

interface GroupOptions {
  /** The process's only writing connection; nothing else may run on it while a group runs. */
  readonly writer: Database;
  /** Drizzle over `writer`: one object for all writes, so that prepared queries are built once. */
  readonly db: Queries;
  readonly tables: Tables;
  readonly now: Tx["now"];
  readonly log: Log;
  /** Called after the commit with the calls that a write has ended. */
  readonly ended: (ends: readonly CallEnd[]) => void;
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

/** What one write does in addition to changing its own rows. */
class Effects implements CommandEffects {
  readonly #counts: Counts;
  /** Calls that the write has ended; null for most writes, which end none. */
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

interface GroupProgress {
  readonly answers: (() => void)[];
  readonly counts: Counts;
  /** How many writes were begun. */
  ran: number;
}

function createGroupRunner(
  { writer, db, tables, now, log, ended, groupMs = GROUP_MS_MAX }: GroupOptions,
  commandOn: CommandOn,
) {
  const sql = statements(writer);

  /** The transaction of a closure. Commands, by far the most writes, don't need one. */
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

  /** Runs a command without a savepoint. @returns the function that resolves it after the commit. @throws WriteFailed */
  function runCommand(write: WaitingWrite, command: Run, { counts }: GroupProgress): () => void {
    const effects = new Effects(counts);
    try {
      return answerOf(write, effects, command(effects));
    } catch (cause) {
      throw new WriteFailed("a write of the group failed", { cause });
    }
  }

  /** Runs a command or a closure. @returns the function that resolves it after the commit */
  async function perform(write: WaitingWrite, counts: Counts): Promise<() => void> {
    const effects = new Effects(counts);
    const { job } = write;
    return answerOf(write, effects, "command" in job ? job.command(effects) : await job.work(txOf(effects)));
  }

  /** Runs a write without a savepoint. @throws WriteFailed, which fails the whole group */
  async function runWithGroup(write: WaitingWrite, counts: Counts): Promise<() => void> {
    try {
      return await perform(write, counts);
    } catch (cause) {
      throw new WriteFailed("a write of the group failed", { cause });
    }
  }

  /** Runs a write in a savepoint, so that it fails alone. */
  async function runInSavepoint(write: WaitingWrite, counts: Counts): Promise<() => void> {
    const own: Counts = new Map();
    sql.save.run();
    try {
      const answer = await perform(write, own);
      sql.release.run();
      for (const { tenant, dimension, value, delta } of changedCounts(own))
        addCount(counts, tenant, dimension, value, delta);
      return answer;
    } catch (thrown) {
      // On conditions such as a full disk SQLite may have rolled back the whole transaction.
      if (!writer.inTransaction) throw new GroupLost(write, thrown);
      sql.undo.run();
      sql.release.run();
      return () => write.reject(sqliteFailure(thrown));
    }
  }

  const runAwaited = (write: WaitingWrite, isolated: boolean, { counts }: GroupProgress) =>
    (isolated || write.mayFail ? runInSavepoint : runWithGroup)(write, counts);

  /** Runs writes until a bound of the group is reached. */
  async function runSome(group: readonly WaitingWrite[], isolated: boolean, progress: GroupProgress): Promise<void> {
    const until = performance.now() + groupMs;
    let bytes = 0;
    for (const write of group) {
      bytes += write.bytes;
      if (progress.ran > 0 && bytes > GROUP_BYTES_MAX) break;
      progress.ran += 1;
      const command = commandOf(write, isolated);
      progress.answers.push(
        command === null ? await runAwaited(write, isolated, progress) : runCommand(write, command, progress),
      );
      if (performance.now() > until) break;
    }
  }

  /** Rolls the group back. If the disk refuses even that, the next group tries it again before it begins. */
  function undoAll(): void {
    try {
      sql.rollback.run();
    } catch (error) {
      log.error("rollback_failed", { error });
    }
  }

  return {
    /** Begins a transaction. @throws SQLiteError SQLITE_BUSY when another process holds the write lock */
    begin(): void {
      if (writer.inTransaction) sql.rollback.run();
      sql.begin.run();
    },
    /** Runs as many writes as fit into the bounds of a group, and commits. Never throws. */
    async run(group: readonly WaitingWrite[], isolated: boolean): Promise<GroupOutcome> {
      const progress: GroupProgress = { answers: [], counts: new Map(), ran: 0 };
      try {
        await runSome(group, isolated, progress);
        for (const { tenant, dimension, value, delta } of changedCounts(progress.counts)) {
          sql.addToTotal.run(tenant, dimension, value, delta);
        }
        sql.commit.run();
        return { answers: progress.answers, retry: group.slice(progress.ran) };
      } catch (thrown) {
        if (writer.inTransaction) undoAll();
        return afterFailure(thrown, group, progress.ran);
      }
    },
  };
}

/** The command of a write that runs without a savepoint. It is not awaited, to save each a turn of the microtask queue. */
const commandOf = ({ job, mayFail }: WaitingWrite, isolated: boolean): Run | null =>
  "command" in job && !isolated && !mayFail ? job.command : null;

export function createGroupCommit(options: GroupOptions) {
  const commandOn = commandsOn(options.writer);
  const runner = createGroupRunner(options, commandOn);
  const queue = createGroupQueue();
  const share = createFairShare({ size: MAX.storeWaiting });
  let scheduled = false;
  let closed = false;
  let isolated = false;
  let busySince: number | undefined;
  let lookedAt = 0;
  let onIdle = () => {};

  /** Begins a group. False when another process holds the write lock: the writes wait on, without blocking the event loop. */
  async function begin(): Promise<boolean> {
    try {
      runner.begin();
      busySince = undefined;
      return true;
    } catch (error) {
      busySince ??= performance.now();
      if (isSqliteBusy(error) && performance.now() - busySince < MAX.storeLockMs) return false;
      busySince = undefined;
      await inSlices(queue.all(), (write) => write.reject(sqliteFailure(error)));
      return false;
    }
  }

  /** Refuses the writes whose requests may wait no longer. A group that comes to one passes over it. */
  async function refuseLate(): Promise<void> {
    const now = performance.now();
    if (now - lookedAt < LOOK_PAUSE) return;
    lookedAt = now;
    const why = waitedTooLong();
    await inSlices(queue.lateAt(now), (write) => write.reject(why));
  }

  async function runGroup(): Promise<void> {
    await refuseLate();
    if (await begin()) {
      const group = queue.next().filter((write) => !write.isOver);
      const outcome = await runner.run(group, isolated);
      const { answers, retry } = outcome;
      isolated = outcome.isolated === true;
      if (retry.length > 0) queue.putBack(retry, isolated);
      await inSlices(answers, (answer) => answer());
    }
    scheduled = false;
    if (queue.size() > 0) schedule();
    else onIdle();
  }

  /** Schedules a group for when all requests of this turn of the event loop have added their writes. */
  function schedule(): void {
    if (scheduled) return;
    scheduled = true;
    if (busySince === undefined) setImmediate(runGroup);
    else setTimeout(runGroup, 20);
  }

  function enter<T>(asked: AskedWrite): Promise<T> {
    if (closed) return Promise.reject(unavailable(new Error("the store is closed")));
    if (share.take(asked.tenant) !== null) return Promise.reject(unavailable(new Error("too many writes wait")));
    const { promise, resolve, reject } = Promise.withResolvers<unknown>();
    const write = new WaitingWrite(asked, resolve, reject, share);
    queue.add(write);
    schedule();
    return promise as Promise<T>;
  }

  return {
    /** Runs a closure, which may await Drizzle's queries only. `urgent` changes nothing here, since no other process writes. */
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
    /** Refuses further writes and resolves when the waiting ones have ended. */
    async close(): Promise<void> {
      closed = true;
      const { promise, resolve } = Promise.withResolvers<void>();
      onIdle = resolve;
      if (scheduled) await promise;
    },
  };
}

type Run = (effects: CommandEffects) => unknown;

interface AskedWrite {
  /** A command is synchronous and needs no `Tx`; a closure is given one. */
  readonly job: { readonly command: Run } | { readonly work: (tx: Tx) => Promise<unknown> };
  /** The tenant whose turn it takes; FOR_ALL for the process's own writes. */
  readonly tenant: string;
  /** Whether it runs in a savepoint from the first, since a tenant can make it fail, for example by a name that is in use. */
  readonly mayFail: boolean;
  /** About how many bytes it stores. */
  readonly bytes: number;
}

/** A class: with two functions of its own for each write, an accept took a quarter more of the processor's time (measured). */
class WaitingWrite implements AskedWrite {
  readonly job: AskedWrite["job"];
  readonly tenant: string;
  readonly mayFail: boolean;
  readonly bytes: number;
  /** Until when its request may wait for it, by performance.now(). */
  readonly until: number;
  /** Whether its caller has been told already, so that it must not be run any more. */
  isOver = false;
  readonly #resolve: (value: unknown) => void;
  readonly #reject: (error: unknown) => void;
  readonly #share: FairShare;
  readonly #request = actingRequest();

  /** @param share of which it has taken one place, which it gives back */
  constructor(
    { job, tenant, mayFail, bytes }: AskedWrite,
    resolve: (value: unknown) => void,
    reject: (error: unknown) => void,
    share: FairShare,
  ) {
    this.job = job;
    this.tenant = tenant;
    this.mayFail = mayFail;
    this.bytes = bytes;
    this.#resolve = resolve;
    this.#reject = reject;
    this.#share = share;
    // The wait of a request is counted here and not by countWait, which would cost each write a promise of its own.
    this.until = this.#request?.beginWait(performance.now()) ?? Number.POSITIVE_INFINITY;
  }

  resolve(value: unknown): void {
    if (this.#end()) this.#resolve(value);
  }

  reject(error: unknown): void {
    if (this.#end()) this.#reject(error);
  }

  /** False when it has ended before. */
  #end(): boolean {
    if (this.isOver) return false;
    this.isOver = true;
    this.#share.giveBack(this.tenant);
    this.#request?.endWait(performance.now());
    return true;
  }
}

/** A write failed without a savepoint, so the whole group has to be rolled back. */
class WriteFailed extends Error {}

/** The failure of one write rolled back the whole transaction; the others may succeed without it. */
class GroupLost extends Error {
  readonly failed: WaitingWrite;

  constructor(failed: WaitingWrite, cause: unknown) {
    super("the transaction was rolled back", { cause });
    this.failed = failed;
  }
}

/** The outcome of a group: functions that settle its finished writes, and the writes that have to run in another group. */
interface GroupOutcome {
  readonly answers: readonly (() => void)[];
  readonly retry: readonly WaitingWrite[];
  /** Whether the next group needs a savepoint for each write. */
  readonly isolated?: boolean;
}

/** Between two looks for writes whose requests may wait no longer, in milliseconds: thousands may wait. */
const LOOK_PAUSE = 100;

/** The outcome of a group of which nothing was stored: which writes are rejected, and which are retried. */
function afterFailure(thrown: unknown, group: readonly WaitingWrite[], ran: number): GroupOutcome {
  if (thrown instanceof WriteFailed) return { answers: [], retry: group, isolated: true };
  if (thrown instanceof GroupLost) {
    const { failed, cause } = thrown;
    return {
      answers: [() => failed.reject(sqliteFailure(cause))],
      retry: group.filter((write) => write !== failed),
      isolated: true,
    };
  }
  const fault = sqliteCommitFailure(thrown);
  return { answers: group.slice(0, ran).map((write) => () => write.reject(fault)), retry: group.slice(ran) };
}

const GROUP_WRITES_MAX = 512;
/** The most bytes of a group. Its commit writes them: 5 ms for this size on an idle disk (measured), 114 ms for 32 MiB. */
const GROUP_BYTES_MAX = 1024 * 1024;
/**
 * A write from this size on is large: every second group begins with one, and other writes wait for no more than that. While a
 * tenant sent 150 bodies of 1 MiB at a time, its neighbour's call took 1 s, and 3 s at most; with this, 17 ms and 310 (measured).
 */
const LARGE_BYTES = 16 * 1024;

/** Interleaves two lists: one of each, then the rest of the longer one. */
function alternating(some: readonly WaitingWrite[], others: readonly WaitingWrite[]): readonly WaitingWrite[] {
  if (some.length === 0) return others;
  if (others.length === 0) return some;
  const all = Array.from({ length: Math.max(some.length, others.length) }, (_, at) => [some[at], others[at]]);
  return all.flat().filter((write) => write !== undefined);
}

/** The queue of waiting writes, which forms the groups. When more wait than fit into a group, tenants take turns. */
function createGroupQueue() {
  const small = createTurnQueue<WaitingWrite>();
  const forAll = createTurnQueue<WaitingWrite>();
  const large = createTurnQueue<WaitingWrite>();
  /** The writes of a group that was rolled back. */
  let undone: readonly WaitingWrite[] = [];
  let isLargeDue = false;
  let isForAllFirst = true;

  const queues = [small, forAll, large];
  const queueOf = ({ tenant, bytes }: WaitingWrite) => {
    if (bytes >= LARGE_BYTES) return large;
    // Writes on behalf of all tenants have turns of their own, since a thousand tenants may be waiting.
    return tenant === FOR_ALL ? forAll : small;
  };

  /**
   * Small writes, every second one FOR_ALL, so that neither these nor the tenants' wait for all of the others. Which kind comes
   * first alternates too, since the group may have time for one write only.
   */
  function nextSmall(): readonly WaitingWrite[] {
    const some = forAll.take(Math.max(GROUP_WRITES_MAX / 2, GROUP_WRITES_MAX - small.size));
    const others = small.take(GROUP_WRITES_MAX - some.length);
    if (!isLargeDue) isForAllFirst = !isForAllFirst;
    return isForAllFirst ? alternating(some, others) : alternating(others, some);
  }

  return {
    size: () => small.size + forAll.size + large.size + undone.length,
    add: (write: WaitingWrite) => queueOf(write).add(write),
    /** The writes whose requests may not wait beyond `now`, and that have not been refused yet. */
    lateAt(now: number): readonly WaitingWrite[] {
      const late: WaitingWrite[] = [];
      const look = (write: WaitingWrite) => void (write.until <= now && !write.isOver && late.push(write));
      undone.forEach(look);
      for (const each of queues) each.forEach(look);
      return late;
    },
    /** Puts writes back at the front. Isolated ones all run in the next group, since any of them may be the failed one. */
    putBack(writes: readonly WaitingWrite[], isolated: boolean): void {
      if (isolated) {
        undone = writes;
        return;
      }
      for (const queue of queues) queue.putBack(writes.filter((write) => queueOf(write) === queue));
    },
    next(): readonly WaitingWrite[] {
      if (undone.length > 0) {
        const retry = undone;
        undone = [];
        return retry;
      }
      if (large.size === 0) {
        isLargeDue = false;
        return nextSmall();
      }
      const group = [...(isLargeDue ? large.take(1) : []), ...nextSmall()];
      let bytes = group.reduce((sum, write) => sum + write.bytes, 0);
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
      const writes = [...undone, ...queues.flatMap((queue) => queue.take(queue.size))];
      undone = [];
      return writes;
    },
  };
}

type CommandOn = <Input, Output>(command: Command<Input, Output>) => (input: Input, effects: CommandEffects) => Output;

/** Returns a function that runs commands on this connection, each with its statements prepared once. */
export function commandsOn(writer: Database): CommandOn {
  const known = new Map<unknown, (input: never, effects: CommandEffects) => unknown>();
  function prepare(text: string): SqliteStatement {
    const statement = writer.prepare<Record<string, unknown>, SqlValue[]>(text);
    return { run: (...values) => statement.run(...values).changes, get: (...values) => statement.get(...values) };
  }
  return (command) => {
    const run = known.get(command) ?? command.sqlite(prepare);
    known.set(command, run);
    return run as ReturnType<typeof command.sqlite>;
  };
}
