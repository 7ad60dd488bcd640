// Wall time. Everything that needs the time of day takes a Clock, so tests can move it; timers and
// durations use performance.now() and setTimeout directly, which no test needs to fake.

export interface Clock {
  /** Milliseconds since the Unix epoch. */
  now(): number;
}

export const systemClock: Clock = { now: () => Date.now() };
