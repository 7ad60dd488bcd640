// Identifiers: `<prefix>_<uuidv7>` (RFC 9562). The first 48 bits are the creation time, so the order of
// IDs is the order of creation, and a time window over records is a range of IDs.

export type IdPrefix = "agt" | "cred" | "inv" | "pdec" | "rcpt" | "rep";

/** A new ID whose time is `now` (milliseconds). IDs made in one process rise strictly. */
export function newId(prefix: IdPrefix, now: number): string {
  return `${prefix}_${Bun.randomUUIDv7("hex", now)}`;
}

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;

export function isId(prefix: IdPrefix, value: string): boolean {
  return value.startsWith(`${prefix}_`) && UUID_V7.test(value.slice(prefix.length + 1));
}

/** The creation time in milliseconds that an ID carries. The ID must be well formed. */
export function idTime(id: string): number {
  const start = id.indexOf("_") + 1;
  return Number.parseInt(id.slice(start, start + 8) + id.slice(start + 9, start + 13), 16);
}

const MAX_TIME = 0xffff_ffff_ffff;

/** The lowest string that an ID made at `time` (milliseconds) or later can have: an inclusive lower bound. */
export function idFloor(prefix: IdPrefix, time: number): string {
  const hex = Math.min(Math.max(Math.trunc(time), 0), MAX_TIME)
    .toString(16)
    .padStart(12, "0");
  return `${prefix}_${hex.slice(0, 8)}-${hex.slice(8)}`;
}
