// Wall time. Everything that needs the time of day takes a Clock, so tests can move it; timers and
// durations use performance.now() and setTimeout directly, which no test needs to fake.

export interface Clock {
  /** Milliseconds since the Unix epoch. */
  now(): number;
}

export const systemClock: Clock = { now: () => Date.now() };

/** The earliest and the latest that the time can be, however the clock was stepped since this was made. */
export interface TimeBounds {
  earliest(): number;
  latest(): number;
}

/** For what may end late but must not end early: its end is set by the latest time and judged by the earliest. */
export function timeBounds(clock: Clock, monotonic: () => number = () => performance.now()): TimeBounds {
  const origin = clock.now() - monotonic();
  const passed = () => Math.floor(origin + monotonic());
  return {
    earliest: () => Math.min(clock.now(), passed()),
    latest: () => Math.max(clock.now(), passed()),
  };
}
