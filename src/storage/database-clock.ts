// The time of a database that several processes share: the server's clock, carried on between two questions by the
// monotonic clock of this process. So a step of this machine's clock changes nothing, and processes whose clocks
// differ agree on what is due.
import { poll } from "../concurrency/poll.ts";

/** The server's own time in milliseconds since the epoch, in SQL. */
export const NOW = "(extract(epoch from clock_timestamp()) * 1000)::bigint";

/** While the two clocks go alike, it is asked less and less often, down to a fourth of this. */
const ASK_EVERY_MS = 2_000;
const SELDOM = 4;
/** Less than this is the way there and back. */
const ALIKE_MS = 20;
/** The answer was true at some moment during the question, so the answer to a long one says little. */
const ROUND_TRIP_MS_MAX = 500;

export interface DatabaseClockOptions {
  /** The server's time in milliseconds since the epoch. */
  ask(): Promise<number>;
  readonly everyMs?: number;
}

/** @throws what the first question throws; later ones may fail, and the clock goes on */
export async function openDatabaseClock({ ask, everyMs = ASK_EVERY_MS }: DatabaseClockOptions) {
  let offset = 0;

  /** Whether the server's clock was not where it was expected. */
  async function synchronise(roundTripMsMax: number): Promise<boolean> {
    const askedAt = performance.now();
    const time = await ask();
    const answeredAt = performance.now();
    if (answeredAt - askedAt > roundTripMsMax) return true;
    const before = offset;
    offset = time - (askedAt + answeredAt) / 2;
    return Math.abs(offset - before) > ALIKE_MS;
  }

  await synchronise(Number.POSITIVE_INFINITY);
  const asking = poll({ leastMs: everyMs, mostMs: everyMs * SELDOM }, () =>
    synchronise(ROUND_TRIP_MS_MAX).catch(() => true),
  );
  return { now: () => Math.round(offset + performance.now()), stop: asking.stop };
}
