// The time of a database that several processes share: the server's clock, carried on between two questions by the
// monotonic clock of this process. So a step of this machine's clock changes nothing, and processes whose clocks
// differ agree on what is due.

const ASK_EVERY_MS = 2_000;
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
  let isAsking = false;

  async function synchronise(roundTripMsMax: number): Promise<void> {
    const askedAt = performance.now();
    const time = await ask();
    const answeredAt = performance.now();
    if (answeredAt - askedAt <= roundTripMsMax) offset = time - (askedAt + answeredAt) / 2;
  }

  await synchronise(Number.POSITIVE_INFINITY);
  const timer = setInterval(() => {
    if (isAsking) return;
    isAsking = true;
    synchronise(ROUND_TRIP_MS_MAX)
      .catch(() => {})
      .finally(() => {
        isAsking = false;
      });
  }, everyMs);
  timer.unref();
  return { now: () => Math.round(offset + performance.now()), stop: () => clearInterval(timer) };
}
