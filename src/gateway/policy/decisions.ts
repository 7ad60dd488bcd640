// The record of decisions. A deny is durable before its caller hears of it. An allow or a warn holds up no call: it goes
// into a bounded buffer that is written at once, one group after the other. Writing it with the call instead would cost
// Postgres a round trip on the path of every call. A kill -9 can lose the last group of allows and warns.
//
// Nothing in the buffer is dropped while the gateway runs. When it is full, because the store is away, a decision is written
// like a deny: its call waits, and is refused if the store still can't take it.

import { and, desc, eq, gte, lt, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { idFloor } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS } from "../../core/time.ts";
import { MAX } from "../../kernel/limits.ts";
import { actFor } from "../../kernel/turns.ts";
import { type KeyRange, removeRanges } from "../../storage/cleanup.ts";
import { within } from "../../storage/failures.ts";
import { prepared, type Reader, type Store, type Tx } from "../../storage/store.ts";

export type DecisionRow = Tables["policyDecisions"]["$inferSelect"];

const ROWS_AT_ONCE = 256;
/**
 * Rows of one statement, if there are so many. On Postgres this takes a fifth of the time and a seventh of the CPU of one
 * statement per row (measured); on SQLite it makes little difference.
 */
const ROWS_TOGETHER = 16;
const PAUSE_MS_MIN = 50;

const insertTogether = (rows: number) =>
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
      // A commit whose answer was lost is repeated.
      .onConflictDoNothing(),
  );

const insertOne = insertTogether(1);
const insertSeveral = insertTogether(ROWS_TOGETHER);

async function insertAll(tx: Tx, rows: readonly DecisionRow[]): Promise<void> {
  let done = 0;
  for (; rows.length - done >= ROWS_TOGETHER; done += ROWS_TOGETHER) {
    await insertSeveral(tx).execute(numbered(rows.slice(done, done + ROWS_TOGETHER)));
  }
  for (const row of rows.slice(done)) await insertOne(tx).execute(numbered([row]));
}

/** The values of the rows under the names of their placeholders. */
function numbered(rows: readonly DecisionRow[]): Record<string, unknown> {
  const values: Record<string, unknown> = {};
  for (const [at, row] of rows.entries()) {
    for (const [name, value] of Object.entries(row)) values[`${name}${at}`] = value;
  }
  return values;
}

interface DecisionLogOptions {
  readonly store: Store;
  readonly log: Log;
  readonly meters?: Pick<Meters, "policyDecided">;
  /** Tests shorten it. */
  readonly bufferedMax?: number;
}

export function createDecisionLog(options: DecisionLogOptions) {
  const { store, log, meters = silentMeters, bufferedMax = MAX.decisionsBuffered } = options;
  const buffer: DecisionRow[] = [];
  let running = false;
  let closed = false;
  /** Decisions that were put into the buffer, and how many of these have left it. */
  let put = 0;
  let stored = 0;
  /** Resolves when the current attempt ends. */
  let attempt: Promise<void> = Promise.resolve();

  /** One attempt to store the oldest decisions. */
  async function writeSome(): Promise<void> {
    let group: readonly DecisionRow[] = [];
    await store.write((tx) => {
      // Taken only now, so that the group holds decisions that came during the wait.
      group = buffer.slice(0, ROWS_AT_ONCE);
      return insertAll(tx, group);
    });
    buffer.splice(0, group.length);
    stored += group.length;
  }

  async function writeAll(): Promise<void> {
    let pause = PAUSE_MS_MIN;
    while (buffer.length > 0 && !closed) {
      const trying = writeSome();
      attempt = trying.catch(() => {});
      try {
        await trying;
        pause = PAUSE_MS_MIN;
      } catch (error) {
        log.warn("policy_decisions_delayed", { buffered: buffer.length, error });
        attempt = Bun.sleep(pause);
        await attempt;
        pause = Math.min(pause * 2, 2_000);
      }
    }
    running = false;
  }

  async function settle(ms: number): Promise<void> {
    const until = put;
    const done = async () => {
      while (stored < until && !closed) await attempt;
    };
    // Ignores the time limit's error: decisions that are not stored yet stay in the buffer.
    await within(ms, done()).catch(() => {});
  }

  function count(rows: readonly DecisionRow[]): void {
    for (const { action } of rows) meters.policyDecided(action);
  }

  function bufferAll(rows: readonly DecisionRow[]): void {
    buffer.push(...rows);
    put += rows.length;
    if (rows.length === 0 || running) return;
    running = true;
    void actFor(null, writeAll);
  }

  const mustWait = ({ action }: DecisionRow) => action === "deny" || buffer.length >= bufferedMax || closed;

  return {
    /** The fast path of decisions that hold up no call: records them as `record` does; false where they have to wait. */
    recordNow(rows: readonly DecisionRow[]): boolean {
      if (rows.some(mustWait)) return false;
      bufferAll(rows);
      count(rows);
      return true;
    },
    /**
     * Records decisions of one tenant: a deny is durable when this resolves; any other decision is written soon after. The
     * decisions on the messages of one batch are one write, so that a request takes one slot of the store.
     * @throws Fault `unavailable` when the store can't take them now
     */
    async record(rows: readonly DecisionRow[]): Promise<void> {
      const { first = [], later = [] } = Object.groupBy(rows, (row) => (mustWait(row) ? "first" : "later"));
      bufferAll(later);
      if (first.length > 0) await store.write((tx) => insertAll(tx, first));
      count(rows);
    },
    /** Resolves when what was recorded until now can be read, or `ms` have passed. */
    settle,
    /** Settles for the last time. Decisions that can't be stored within `ms` are lost, and logged as lost. */
    async close(ms: number) {
      await settle(ms);
      closed = true;
      if (buffer.length > 0) log.error("policy_decisions_lost", { count: buffer.length });
    },
  };
}

export async function newestDecisions(reader: Reader, tenant: string, limit: number): Promise<DecisionRow[]> {
  const { policyDecisions: t } = reader.tables;
  return await reader.db.select().from(t).where(eq(t.tenant, tenant)).orderBy(desc(t.id)).limit(limit);
}

/** Removes the decisions that are older than `days`; 0 keeps all. */
export async function removeOldDecisions(store: Store, clock: Clock, days: number): Promise<void> {
  if (days === 0) return;
  await removeRanges(store, "policyDecisions", idFloor("pdec", clock.now() - days * DAY_MS), removeSome);
}

async function removeSome(tx: Tx, { tenant, from, below }: KeyRange): Promise<void> {
  const { policyDecisions: t } = tx.tables;
  await tx.db.delete(t).where(and(eq(t.tenant, tenant), gte(t.id, from), lt(t.id, below)));
}
