// Making partitions ahead. The last one has no end and is empty: it takes the rows for which none was made in time. A new
// one is made by giving the last one an end, with whatever it has taken by then, and putting another behind it. So a row
// never stands in the way of a partition.
import type { SQL } from "bun";
import { HOUR_MS } from "../../core/time.ts";
import type { TimedTable } from "../periods.ts";
import { boundsOf, keyOf, type Partition, partitionsOf } from "./catalog.ts";
import { briefly } from "./transaction.ts";

/** So far ahead at least, so that a job that comes every hour may fail for long. */
const AHEAD_HOURS_MIN = 24;
/** Up to here the server looks through a partition that gets its end while others wait: 32 MiB take it about 20 ms. */
const SMALL_BYTES = 32 * 1024 * 1024;
/**
 * A larger one is looked through beforehand, while it is in use. From the beginning of that it refuses rows from its end on,
 * so its end is far off.
 */
const LARGE_AHEAD_HOURS = 72;
/** Nearer to its end, it gets a later one. */
const LARGE_AHEAD_HOURS_MIN = 12;

const ENDS = "ends";

/** The next hour after `hour` at which a partition may begin. */
const boundaryAfter = (hour: number, hours: number) => (Math.floor(hour / hours) + 1) * hours;

interface Preparing {
  readonly hours: number;
  readonly now: number;
  /** Tests take less for large. */
  readonly smallBytes?: number;
}

export async function preparePartitions(
  client: SQL,
  table: TimedTable,
  { hours, now, smallBytes = SMALL_BYTES }: Preparing,
): Promise<Partition[]> {
  const present = Math.floor(now / HOUR_MS);
  const until = boundaryAfter(present, hours) + Math.max(hours, AHEAD_HOURS_MIN);
  for (;;) {
    const partitions = await partitionsOf(client, table);
    const last = partitions.at(-1);
    if (last === undefined || last.from >= until) return partitions;
    if (last.bytes > smallBytes) await endLarge(client, table, last, { present, hours });
    else await endSmall(client, table, last, { present, hours });
  }
}

interface When {
  readonly present: number;
  readonly hours: number;
}

async function endSmall(client: SQL, table: TimedTable, last: Partition, { present, hours }: When): Promise<void> {
  await briefly(client, [lockOf(table)], async (tx) => {
    if (!(await isStillLast(tx, table, last))) return;
    const made = await makeBehind(tx, table, last);
    await tx.unsafe(`alter table ${table.name} detach partition ${last.name}`);
    // All rows until now are in the first partition of a table that was not laid out before, if there are any.
    const [{ none } = { none: false }] = await tx.unsafe(`select not exists (select from ${last.name}) as none`);
    const from = last.from === 0 && none ? present - hours : Math.max(last.from, present);
    const end = boundaryAfter(from, hours);
    await tx.unsafe(
      `with later as (delete from ${last.name} where ${table.key} >= ${keyOf(table, end)} returning *)
       insert into ${made} select * from later`,
    );
    await attach(tx, table, last, { end, made });
  });
}

/** Looks through it with a constraint that is not enforced for the rows that are there, which keeps nobody waiting. */
async function endLarge(client: SQL, table: TimedTable, last: Partition, { present, hours }: When): Promise<void> {
  const end = (await endBegun(client, table, last)) ?? boundaryAfter(present + LARGE_AHEAD_HOURS, hours);
  if (isNear(end, present)) {
    await dropEnd(client, table, last);
    return;
  }
  await briefly(client, [lockOf(table)], async (tx) => {
    if (!(await isStillLast(tx, table, last)) || (await endBegun(tx, table, last)) !== null) return;
    const lowest = last.from === 0 ? "" : `${table.key} >= ${keyOf(table, last.from)} and `;
    await tx.unsafe(
      `alter table ${last.name} add constraint ${ENDS} check (${lowest}${table.key} < ${keyOf(table, end)}) not valid`,
    );
  });
  await client.begin(async (tx) => {
    await tx.unsafe("set local statement_timeout = 0");
    await tx.unsafe(`alter table ${last.name} validate constraint ${ENDS}`);
  });
  await briefly(client, [lockOf(table)], async (tx) => {
    if (!(await isStillLast(tx, table, last)) || (await endBegun(tx, table, last)) !== end) return;
    const made = await makeBehind(tx, table, last);
    await tx.unsafe(`alter table ${table.name} detach partition ${last.name}`);
    await attach(tx, table, last, { end, made });
    await tx.unsafe(`alter table ${last.name} drop constraint ${ENDS}`);
  });
}

const isNear = (end: number, present: number) => end < present + LARGE_AHEAD_HOURS_MIN;

function dropEnd(client: SQL, table: TimedTable, { name }: Partition): Promise<unknown> {
  return briefly(client, [lockOf(table)], (tx) => tx.unsafe(`alter table ${name} drop constraint if exists ${ENDS}`));
}

/** Of a process that was ended while it looked through a partition, long enough ago that rows are refused now or soon. */
export async function dropPassedEnds(client: SQL, tables: readonly TimedTable[], now: number): Promise<void> {
  const begun = await client.unsafe("select from pg_constraint where conname = $1 limit 1", [ENDS]);
  if (begun.length === 0) return;
  for (const table of tables) {
    const last = (await partitionsOf(client, table)).at(-1);
    const end = last === undefined ? null : await endBegun(client, table, last);
    if (last !== undefined && end !== null && isNear(end, Math.floor(now / HOUR_MS)))
      await dropEnd(client, table, last);
  }
}

/** The end that a large partition is about to get, or null. */
async function endBegun(client: SQL, table: TimedTable, { name }: Partition): Promise<number | null> {
  const [row]: { check: string }[] = await client.unsafe(
    `select pg_get_constraintdef(oid) as check from pg_constraint where conrelid = $1::regclass and conname = $2`,
    [name, ENDS],
  );
  const end = /< '([^']+)'/.exec(row?.check ?? "")?.[1];
  return end === undefined ? null : Math.round(table.timeAt(end) / HOUR_MS);
}

export const lockOf = ({ name }: TimedTable): string => `partitions:${name}`;

/** Whether nobody else has given it an end meanwhile. */
async function isStillLast(client: SQL, table: TimedTable, last: Partition): Promise<boolean> {
  return (await partitionsOf(client, table)).at(-1)?.name === last.name;
}

/** Makes the table that is to be the last partition. Two that begin at the same hour can't be there at once. */
async function makeBehind(client: SQL, table: TimedTable, last: Partition): Promise<string> {
  const number = Number(/_(\d+)$/.exec(last.name)?.[1] ?? 0) + 1;
  const made = `${table.name}_${number}`;
  await makeLike(client, table, made);
  return made;
}

/** With the same indexes and checks, and with what a copy of the definition leaves out. */
export async function makeLike(client: SQL, table: TimedTable, made: string): Promise<void> {
  await client.unsafe(`create table ${made} (like ${table.name} including all)`);
  const unmeasured: { name: string }[] = await client.unsafe(
    "select attname as name from pg_attribute where attrelid = $1::regclass and attnum > 0 and attstattarget = 0",
    [table.name],
  );
  for (const { name } of unmeasured) await client.unsafe(`alter table ${made} alter column ${name} set statistics 0`);
  for (const statement of table.ownIndexes?.(made) ?? []) await client.unsafe(statement);
}

async function attach(
  client: SQL,
  table: TimedTable,
  last: Partition,
  { end, made }: { readonly end: number; readonly made: string },
): Promise<void> {
  const bounds = [
    [last.name, boundsOf(table, last.from, end)],
    [made, boundsOf(table, end, Number.POSITIVE_INFINITY)],
  ];
  for (const [name, values] of bounds) {
    await client.unsafe(`alter table ${table.name} attach partition ${name} for values ${values}`);
  }
}
