// Periods on Postgres, as partitions by time. The server's catalogue is the one truth about where they begin and end: their
// width changes with the retention. Together they reach from the lowest key to the highest, so that a row always has a place,
// and without a default partition, beside which Postgres reads no others in their order.
//
// Ahead: the last partition has no end and is empty. It takes the rows for which none was made in time. A new one is made by
// giving the last one an end, with whatever it has taken by then, and putting another behind it. So a row never stands in
// the way of a partition.
//
// Behind: partitions whose rows are all too old are dropped. The rows that must stay go into the first partition, which
// reaches back to the lowest key. Their part of the totals goes with the others in the same transaction.
import type { SQL } from "bun";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { DAY_MS, HOUR_MS } from "../../core/time.ts";
import { sqlState, within } from "../failures.ts";
import { type DroppedRange, type Periods, periodHours, type TimedTable } from "../store.ts";
import { TOTALS_LOCK } from "../totals.ts";
import { postgresClient } from "./pool.ts";
import { lockStatement } from "./transactions.ts";

interface Partition {
  readonly name: string;
  /** Hours since the epoch: from `from` on, and below `to`. The first begins at 0, the last ends at Infinity. */
  readonly from: number;
  readonly to: number;
  /** Without its indexes. */
  readonly bytes: number;
}

const PARTITIONS = `select c.relname as name, pg_get_expr(c.relpartbound, c.oid) as bounds, pg_relation_size(c.oid) as bytes
  from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = $1::regclass`;
const BOUNDS = /FROM \((.+)\) TO \((.+)\)/;

interface Row {
  readonly name: string;
  readonly bounds: string;
  readonly bytes: number | string;
}

/** In the order of their time. */
export async function partitionsOf(client: SQL, table: TimedTable): Promise<Partition[]> {
  const rows: Row[] = await client.unsafe(PARTITIONS, [table.name]);
  const hourOf = (bound: string | undefined) => {
    if (bound === undefined || bound === "MINVALUE") return 0;
    if (bound === "MAXVALUE") return Number.POSITIVE_INFINITY;
    return Math.round(table.timeAt(bound.replaceAll("'", "")) / HOUR_MS);
  };
  return rows
    .map(({ name, bounds, bytes }) => {
      const [, from, to] = BOUNDS.exec(bounds) ?? [];
      return { name, from: hourOf(from), to: hourOf(to), bytes: Number(bytes) };
    })
    .sort((a, b) => a.from - b.from);
}

/** The key of an hour, as SQL says it. */
const keyOf = (table: TimedTable, hour: number): string => `'${table.keyAt(hour * HOUR_MS)}'`;

/** For `for values`. */
function boundsOf(table: TimedTable, from: number, to: number): string {
  const first = from === 0 ? "minvalue" : keyOf(table, from);
  return `from (${first}) to (${to === Number.POSITIVE_INFINITY ? "maxvalue" : keyOf(table, to)})`;
}

/** While it waits for a table, all that come after it wait too. */
const LOCK_WAIT = "250ms";
const [PAUSE_MS_MIN, PAUSE_MS_MAX] = [20, 400];
/** A lock that was not had in time, and what comes of several that change the same. */
const HELD_UP = /^(55P03|40P01|40001)$/;

/**
 * A short transaction that gives up as soon as it would keep others waiting, and is tried again. It holds the table's row of
 * `locks`, so that of several replicas one does the work, and the next finds it done. Read committed, whatever the database's
 * default: each statement sees what was committed while it
 * waited for locks.
 */
async function briefly<T>(client: SQL, locks: readonly string[], work: (tx: SQL) => Promise<T>): Promise<T> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await client.begin("isolation level read committed", async (tx) => {
        await tx.unsafe(`set local lock_timeout = '${LOCK_WAIT}'; set local statement_timeout = '20s'`);
        for (const key of locks) await tx.unsafe(...lockStatement(key));
        return await work(tx);
      });
    } catch (error) {
      if (tries === 8 || !HELD_UP.test(sqlState(error) ?? "")) throw error;
      await Bun.sleep(PAUSE_MS_MIN + Math.random() * (PAUSE_MS_MAX - PAUSE_MS_MIN));
    }
  }
}

/** Up to here the server looks through a partition that gets its end while others wait: 32 MiB take it about 20 ms. */
const SMALL_BYTES = 32 * 1024 * 1024;
/**
 * A larger one is looked through beforehand, while it is in use. From the beginning of this look it refuses rows from its end on,
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
  // A day ahead at least, so that a job that comes every hour may fail for long.
  const until = boundaryAfter(present, hours) + Math.max(hours, 24);
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

const lockOf = ({ name }: TimedTable): string => `partitions:${name}`;

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
async function makeLike(client: SQL, table: TimedTable, made: string): Promise<void> {
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

/** With more of them the partition stays, and its other rows are removed one by one. */
const KEPT_MAX = 5_000;
/** A first partition of this size holds more than what was kept, and is worth a drop of its own. */
const FIRST_BYTES_MIN = 8 * 1024 * 1024;

interface Dropping {
  /** Milliseconds: a partition is dropped when all of it is older. */
  readonly before: number;
  /** Of a partition that is wider than this, old rows go before all of it is old. */
  readonly hours: number;
  readonly log: Log;
  /** Tests take less for much. */
  readonly firstBytesMin?: number;
}

/** @returns the time below which there may still be rows */
export async function dropPartitions(
  client: SQL,
  table: TimedTable,
  { before, hours, log, firstBytesMin = FIRST_BYTES_MIN }: Dropping,
): Promise<number> {
  await removeDropped(client, table);
  const hour = Math.floor(before / HOUR_MS);
  try {
    while (await dropOldest(client, table, hour, firstBytesMin)) await removeDropped(client, table);
  } catch (error) {
    log.warn("partition_not_dropped", { table: table.name, error });
  }
  const partitions = await partitionsOf(client, table);
  const young = partitions.find(({ to }) => to > hour);
  const isWide = young === undefined || young.from === 0 || young.to - young.from > hours;
  return isWide ? before : young.from * HOUR_MS;
}

/** False when there is none, or it has to stay. */
async function dropOldest(client: SQL, table: TimedTable, hour: number, firstBytesMin: number): Promise<boolean> {
  const locks = table.isCounted ? [lockOf(table), TOTALS_LOCK] : [lockOf(table)];
  return await briefly(client, locks, async (tx) => {
    const [first, second] = await partitionsOf(tx, table);
    if (first === undefined || second === undefined || first.to > hour) return false;
    if (first.bytes > firstBytesMin) return await dropFirst(tx, table, first);
    return second.to <= hour && (await dropSecond(tx, table, first, second));
  });
}

/** What stood in the table before it was laid out, as where retention was turned on late, or was kept. */
async function dropFirst(tx: SQL, table: TimedTable, first: Partition): Promise<boolean> {
  const kept = await keepers(tx, table, first);
  if (kept === null) return false;
  const made = `${first.name}_kept`;
  await makeLike(tx, table, made);
  await tx.unsafe(`alter table ${table.name} detach partition ${first.name}`);
  await keepRows(tx, table, kept, made);
  await tx.unsafe(`alter table ${table.name} attach partition ${made} for values ${boundsOf(table, 0, first.to)}`);
  await setAside(tx, table, first);
  await tx.unsafe(`alter table ${made} rename to ${first.name}`);
  return true;
}

async function dropSecond(tx: SQL, table: TimedTable, first: Partition, second: Partition): Promise<boolean> {
  const kept = await keepers(tx, table, second);
  if (kept === null) return false;
  await tx.unsafe(`alter table ${table.name} detach partition ${second.name}`);
  await tx.unsafe(`alter table ${table.name} detach partition ${first.name}`);
  await keepRows(tx, table, kept, first.name);
  await tx.unsafe(
    `alter table ${table.name} attach partition ${first.name} for values ${boundsOf(table, 0, second.to)}`,
  );
  await setAside(tx, table, second);
  return true;
}

interface RowsToKeep {
  readonly range: DroppedRange;
  /** One for each row, in the same order. */
  readonly tenants: readonly string[];
  readonly keys: readonly string[];
}

/**
 * Looks for what must stay, with its totals, before anything is locked that others want. Null when that is too much. Looked
 * for once: what a row stays for may go meanwhile, and it would be missing where the totals count it.
 */
async function keepers(tx: SQL, table: TimedTable, { name, from, to }: Partition): Promise<RowsToKeep | null> {
  const range = { rows: name, from: keyOf(table, from), to: keyOf(table, to) };
  // Nobody changes a row of it from here on, while all may still be read.
  await tx.unsafe(`lock table ${name} in share mode`);
  const found: { tenant: string; key: string }[] =
    table.kept === null
      ? []
      : await tx.unsafe(`select tenant, ${table.key} as key from (${table.kept(range)}) k limit ${KEPT_MAX + 1}`);
  if (found.length > KEPT_MAX) return null;
  const kept = { range, tenants: found.map(({ tenant }) => tenant), keys: found.map(({ key }) => key) };
  if (table.isCounted) await dropTotals(tx, table, kept, { from, to });
  // The statements that follow keep others waiting.
  await tx.unsafe("set local statement_timeout = '2s'");
  return kept;
}

const joined = ({ key }: TimedTable, { rows }: DroppedRange) =>
  `${rows} v join unnest($1::text[], $2::text[]) as k (tenant, key) on k.tenant = v.tenant and k.key = v.${key}`;

async function keepRows(tx: SQL, table: TimedTable, { range, tenants, keys }: RowsToKeep, into: string): Promise<void> {
  if (keys.length > 0) await tx.unsafe(`insert into ${into} select v.* from ${joined(table, range)}`, [tenants, keys]);
}

const COUNTED = "tenant, agent_id, mode, status, model, settlement_status";

/** Afterwards the totals of this time are those of the calls that stay: of kept rows and of open calls. */
async function dropTotals(
  tx: SQL,
  table: TimedTable,
  { range, tenants, keys }: RowsToKeep,
  { from, to }: Pick<Partition, "from" | "to">,
) {
  const open = `from open_invocations where id >= ${range.from} and id < ${range.to}`;
  await tx.unsafe(`select id ${open} order by id for update`);
  await tx.unsafe(`delete from invocation_counts where period >= ${from} and period < ${to}`);
  const columns = COUNTED.split(", ").map((column) => `v.${column}`);
  await tx.unsafe(
    `insert into invocation_counts (tenant, dimension, value, period, shard, count)
    select tenant, dimension, value, ${from}, 0, count(*)
    from (select ${columns}, v.error_class from ${joined(table, range)}
      union all select ${COUNTED}, null::text as error_class ${open}) as call, lateral (values ('all', ''), ('agent', agent_id), ('mode', mode),
      ('status', status), ('model', model), ('error_class', error_class), ('settlement', settlement_status)
    ) as total (dimension, value)
    where value is not null group by tenant, dimension, value`,
    [tenants, keys],
  );
}

const DROPPED = "dropped";

async function setAside(tx: SQL, table: TimedTable, { name }: Partition): Promise<void> {
  await tx.unsafe(`alter table ${name} rename to ${DROPPED}_${name.slice(table.name.length + 1)}_${table.name}`);
}

/** Nobody uses these tables any more. Removing their files takes long, but nobody waits for it. */
async function removeDropped(client: SQL, table: TimedTable): Promise<void> {
  const rows: { name: string }[] = await client.unsafe(
    `select relname as name from pg_class where relkind = 'r' and not relispartition and pg_table_is_visible(oid)
       and relname like $1`,
    [`${DROPPED}\\_%\\_${table.name.replaceAll("_", "\\_")}`],
  );
  for (const { name } of rows)
    await briefly(client, [lockOf(table)], (tx) => tx.unsafe(`drop table if exists ${name}`));
}

/** A change of a large table takes its time; a connection that hangs since a failover would take for ever. */
const WORK_MS_MAX = 3_600_000;

interface PartitionsOptions {
  readonly databaseUrl: string;
  readonly clock: Clock;
  readonly log: Log;
  /** Tests shorten it. */
  readonly workMsMax?: number;
}

/** Each change uses a connection of its own, for as long as it takes. */
export function createPartitions({ databaseUrl, clock, log, workMsMax = WORK_MS_MAX }: PartitionsOptions): Periods {
  async function connected<T>(work: (client: SQL) => Promise<T>): Promise<T> {
    const client = postgresClient(databaseUrl);
    try {
      return await within(workMsMax, work(client));
    } finally {
      await client.close({ timeout: 0 });
    }
  }

  return {
    clearTheWay: (tables) => connected((client) => dropPassedEnds(client, tables, clock.now())),
    prepare: (table, hours) =>
      connected(async (client) => {
        const partitions = await preparePartitions(client, table, { hours, now: clock.now() });
        return partitions.map(({ from }) => from);
      }),
    drop(table, before) {
      // As wide as they are made for rows that live as long as this.
      const hours = periodHours((clock.now() - before) / DAY_MS);
      return connected((client) => dropPartitions(client, table, { before, hours, log }));
    },
    flushTotals: async () => {},
  };
}
