// The log of policy decisions. A deny is stored before its caller is answered. An allow or a warn delays no call: it goes into
// a bounded buffer (write-behind), which is written at once, batch by batch. Writing it with the call instead would cost
// Postgres a round trip per call. A kill -9 can lose the last batch of allows and warns.
//
// The buffer drops nothing while the gateway runs. When it is full, because the store is away, every decision is stored like
// a deny: its call waits, and is refused if the store still can't take the decision.
import { and, desc, eq, gte, lt, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { idFloor } from "../../core/id.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import { type Clock, DAY_MS } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { actFor } from "../../kernel/wait.ts";
import { type KeyRange, removeRanges } from "../../storage/cleanup.ts";
import { within } from "../../storage/failures.ts";
import { prepared, type Reader, type Store, type StoreTools, type Tx } from "../../storage/store.ts";

export type DecisionRow = Tables["policyDecisions"]["$inferSelect"];

const BATCH_ROWS = 256;
/** Rows of one INSERT: on Postgres a fifth of the time and a seventh of the CPU of single rows; on SQLite alike (measured). */
const ROWS_PER_INSERT = 16;
const BACKOFF_MS_MIN = 50;

const insertRows = (rows: number) =>
  prepared(({ db, tables: { policyDecisions } }: Tx) =>
    db
      .insert(policyDecisions)
      .values(
        Array.from({ length: rows }, (_, at) => ({
          tenant: sql.placeholder(`tenant${at}`),
          id: sql.placeholder(`id${at}`),
          agent_id: sql.placeholder(`agent_id${at}`),
          protocol: sql.placeholder(`protocol${at}`),
          mcp_tool: sql.placeholder(`mcp_tool${at}`),
          action: sql.placeholder(`action${at}`),
          matched_rule: sql.placeholder(`matched_rule${at}`),
          reason: sql.placeholder(`reason${at}`),
        })),
      )
      // A commit whose answer was lost is retried.
      .onConflictDoNothing(),
  );

const insertOne = insertRows(1);
const insertMany = insertRows(ROWS_PER_INSERT);

async function insertAll(tx: Tx, rows: readonly DecisionRow[]): Promise<void> {
  let done = 0;
  for (; rows.length - done >= ROWS_PER_INSERT; done += ROWS_PER_INSERT) {
    await insertMany(tx).execute(placeholderValues(rows.slice(done, done + ROWS_PER_INSERT)));
  }
  for (const row of rows.slice(done)) await insertOne(tx).execute(placeholderValues([row]));
}

function placeholderValues(rows: readonly DecisionRow[]): Record<string, unknown> {
  const values: Record<string, unknown> = {};
  for (const [at, row] of rows.entries()) {
    for (const [name, value] of Object.entries(row)) values[`${name}${at}`] = value;
  }
  return values;
}

interface DecisionLogOptions extends Pick<StoreTools, "store" | "log"> {
  readonly meters?: Pick<Meters, "policyDecided">;
  /** Tests shorten it. */
  readonly bufferedMax?: number;
}

export function createDecisionLog(options: DecisionLogOptions) {
  const { store, log, meters = silentMeters, bufferedMax = MAX.decisionsBuffered } = options;
  const buffer: DecisionRow[] = [];
  let isWriting = false;
  let isClosed = false;
  /** How many decisions were ever put into the buffer, and how many of them have been stored. */
  let enqueued = 0;
  let stored = 0;
  /** Resolves when the current attempt to store a batch, or the backoff after one, ends. */
  let attempt: Promise<void> = Promise.resolve();

  async function writeBatch(): Promise<void> {
    let batch: readonly DecisionRow[] = [];
    await store.write((tx) => {
      // Taken inside the write, so that the batch includes decisions that came during the wait for it.
      batch = buffer.slice(0, BATCH_ROWS);
      return insertAll(tx, batch);
    });
    buffer.splice(0, batch.length);
    stored += batch.length;
  }

  async function writeAll(): Promise<void> {
    let pause = BACKOFF_MS_MIN;
    while (buffer.length > 0 && !isClosed) {
      const trying = writeBatch();
      attempt = trying.catch(() => {});
      try {
        await trying;
        pause = BACKOFF_MS_MIN;
      } catch (error) {
        log.warn("policy_decisions_delayed", { buffered: buffer.length, error });
        attempt = Bun.sleep(pause);
        await attempt;
        pause = Math.min(pause * 2, 2_000);
      }
    }
    isWriting = false;
  }

  async function flush(ms: number): Promise<void> {
    const until = enqueued;
    const done = async () => {
      while (stored < until && !isClosed) await attempt;
    };
    // A time-out is ignored: decisions that are not stored yet stay in the buffer.
    await within(ms, done()).catch(() => {});
  }

  function count(rows: readonly DecisionRow[]): void {
    for (const { action } of rows) meters.policyDecided(action);
  }

  function bufferAll(rows: readonly DecisionRow[]): void {
    buffer.push(...rows);
    enqueued += rows.length;
    if (rows.length === 0 || isWriting) return;
    isWriting = true;
    void actFor(null, writeAll);
  }

  const mustStoreFirst = ({ action }: DecisionRow) => action === "deny" || buffer.length >= bufferedMax || isClosed;

  return {
    /** The synchronous fast path of `record`: buffers the decisions; false when any of them must be stored first. */
    recordNow(rows: readonly DecisionRow[]): boolean {
      if (rows.some(mustStoreFirst)) return false;
      bufferAll(rows);
      count(rows);
      return true;
    },
    /**
     * Records decisions of one tenant. A deny is durable when this resolves; other decisions are written soon after. All the
     * decisions of one request are one write, so that the request takes one slot of the store.
     * @throws Fault `unavailable` when the store can't take them now
     */
    async record(rows: readonly DecisionRow[]): Promise<void> {
      const { first = [], later = [] } = Object.groupBy(rows, (row) => (mustStoreFirst(row) ? "first" : "later"));
      bufferAll(later);
      if (first.length > 0) await store.write((tx) => insertAll(tx, first));
      count(rows);
    },
    /** Resolves when all decisions recorded until now can be read, or after `ms`. */
    flush,
    /** Flushes for the last time. Decisions that can't be stored within `ms` are lost, and the loss is logged. */
    async close(ms: number) {
      await flush(ms);
      isClosed = true;
      if (buffer.length > 0) log.error("policy_decisions_lost", { count: buffer.length });
    },
  };
}

export async function newestDecisions(reader: Reader, tenant: string, limit: number): Promise<DecisionRow[]> {
  const { policyDecisions: t } = reader.tables;
  return await reader.db.select().from(t).where(eq(t.tenant, tenant)).orderBy(desc(t.id)).limit(limit);
}

/** Deletes the decisions older than `days`; 0 keeps all. */
export async function removeOldDecisions(store: Store, clock: Clock, days: number): Promise<void> {
  if (days === 0) return;
  const { policyDecisions: t } = store.read.tables;
  await removeRanges(store, t, t.id, idFloor("pdec", clock.now() - days * DAY_MS), removeRange);
}

async function removeRange(tx: Tx, { tenant, from, below }: KeyRange): Promise<void> {
  const { policyDecisions: t } = tx.tables;
  await tx.db.delete(t).where(and(eq(t.tenant, tenant), gte(t.id, from), lt(t.id, below)));
}
