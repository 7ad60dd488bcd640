// Statements that the server undid because of another transaction (40001, 40P01), or that never reached it, run again.
import { isConnectionLost, isTransactionUndone, postgresFailure, unavailable } from "./failures.ts";
import type { ConnectionPool, DatabaseConnection } from "./pool.ts";

/** In a lost connection one try finds the loss, and the next has a new one. */
const LOST_TRIES_MAX = 4;
const [PAUSE_MS_LEAST, PAUSE_MS_MOST] = [2, 200];

/**
 * Runs `attempt` until it succeeds, or `until` (by performance.now()) is near: one side of a conflict always goes on, but
 * at `repeatable read` a lock that is released undoes all who wait for it, so one of many may be undone often. Between two
 * tries it pauses for a random time of up to 2, 4, 8 … 200 ms (full jitter), so that those who were in each other's way
 * come back at different times.
 *
 * @param mayRepeat whether a try that lost its connection certainly changed nothing
 * @throws what the last try threw
 */
export async function untilNotUndone<T>(
  until: number,
  attempt: () => Promise<T>,
  mayRepeat: () => boolean,
): Promise<T> {
  let lost = 0;
  for (let tries = 1; ; tries += 1) {
    try {
      return await attempt();
    } catch (thrown) {
      if (isConnectionLost(thrown) && mayRepeat() && ++lost < LOST_TRIES_MAX) continue;
      if (!isTransactionUndone(thrown)) throw thrown;
      const pause = Math.random() * Math.min(PAUSE_MS_LEAST * 2 ** (tries - 1), PAUSE_MS_MOST);
      if (performance.now() + pause >= until) throw unavailable(thrown);
      await Bun.sleep(pause);
    }
  }
}

/**
 * Runs a task that may be done twice on a connection of the pool, until it was not undone.
 *
 * @throws the store's own failure
 */
export async function untilNotUndoneOn<T>(
  pool: ConnectionPool,
  until: number,
  task: (connection: DatabaseConnection) => Promise<T>,
  tenant: string | null = null,
): Promise<T> {
  try {
    return await untilNotUndone(
      until,
      () => pool.use(until, task, tenant),
      () => true,
    );
  } catch (thrown) {
    throw postgresFailure(thrown);
  }
}
