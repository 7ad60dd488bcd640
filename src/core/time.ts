// Wall-clock time and its text form (RFC 3339). Code that needs the time of day takes a Clock, so that tests can set it;
// timers and durations use performance.now() and setTimeout.
export interface Clock {
  /** Milliseconds since the Unix epoch. */
  now(): number;
}

export const systemClock: Clock = { now: () => Date.now() };

/** Bounds of the true time (milliseconds since the epoch), however the clock was stepped after they were created. */
export interface TimeBounds {
  earliest(): number;
  latest(): number;
}

/** Bounds for a deadline that may pass late but never early: set it by the latest time and judge it by the earliest. */
export function timeBounds(clock: Clock, monotonic: () => number = () => performance.now()): TimeBounds {
  const origin = clock.now() - monotonic();
  const unstepped = () => Math.floor(origin + monotonic());
  return {
    earliest: () => Math.min(clock.now(), unstepped()),
    latest: () => Math.max(clock.now(), unstepped()),
  };
}

export const DAY_MS = 86_400_000;
export const HOUR_MS = 3_600_000;

const RFC_3339 = /^(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+\- ])(\d\d):(\d\d))$/;

/** In ms since the epoch; null unless it is an RFC 3339 date-time with a zone. A blank before the offset was a plus in the query. */
export function parseDateTime(text: string): number | null {
  const match = RFC_3339.exec(text);
  if (match === null) return null;
  const part = (index: number) => Number(match[index] ?? 0);
  const [year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0] = match.slice(1, 7).map(Number);
  const offsetMinutes = part(9) * 60 + part(10);
  // Second 60 is a leap second. Months and days are checked below, by comparing with the date that results.
  if (hour > 23 || minute > 59 || second > 60 || part(9) > 23 || part(10) > 59) return null;
  const midnight = new Date(0);
  midnight.setUTCFullYear(year, month - 1, day);
  if (midnight.getUTCMonth() !== month - 1 || midnight.getUTCDate() !== day) return null;
  const milliseconds = Number((match[7] ?? "").padEnd(3, "0").slice(0, 3));
  const local = midnight.getTime() + ((hour * 60 + minute) * 60 + second) * 1000 + milliseconds;
  return local - (match[8] === "-" ? -offsetMinutes : offsetMinutes) * 60_000;
}

export const formatDateTime = (time: number): string => new Date(time).toISOString();
