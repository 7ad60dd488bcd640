// Changes of partitions: each a short transaction that gives up as soon as it would keep others waiting, and is tried
// again. It holds the table's row of `locks`, so that of several replicas one does it, and the next finds it done.
import type { SQL } from "bun";
import { sqlState } from "../failures.ts";
import { lockStatement } from "../row-locks.ts";

/** While it waits for a table, whoever comes after it waits too. */
const LOCK_WAIT = "250ms";
const STATEMENT_MAX = "20s";
const TRIES_MAX = 8;
const [PAUSE_MS_MIN, PAUSE_MS_MAX] = [20, 400];
/** A lock that was not had in time, and what comes of several that change the same. */
const HELD_UP = /^(55P03|40P01|40001)$/;

/** Read committed, whatever the database's default: each statement sees what was committed while it waited for locks. */
export async function briefly<T>(client: SQL, locks: readonly string[], work: (tx: SQL) => Promise<T>): Promise<T> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await client.begin("isolation level read committed", async (tx) => {
        await tx.unsafe(`set local lock_timeout = '${LOCK_WAIT}'; set local statement_timeout = '${STATEMENT_MAX}'`);
        for (const key of locks) await tx.unsafe(...lockStatement(key));
        return await work(tx);
      });
    } catch (error) {
      if (tries === TRIES_MAX || !HELD_UP.test(sqlState(error) ?? "")) throw error;
      await Bun.sleep(PAUSE_MS_MIN + Math.random() * (PAUSE_MS_MAX - PAUSE_MS_MIN));
    }
  }
}
