// What a server says of when to come again (RFC 9110 section 10.2.3): seconds, or a date by its clock.

const SECONDS = /^\d{1,9}$/;

/**
 * Milliseconds from now; null where it says nothing that can be read. Never more than `mostMs`, whatever the server or a
 * clock says.
 *
 * @param value of the header
 * @param now milliseconds since the epoch
 */
export function retryAfterMs(value: string | null, now: number, mostMs: number): number | null {
  if (value === null) return null;
  const text = value.trim();
  const ms = SECONDS.test(text) ? Number(text) * 1000 : Date.parse(text) - now;
  return Number.isNaN(ms) ? null : Math.min(Math.max(ms, 0), mostMs);
}
