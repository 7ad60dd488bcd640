// Dropping partitions whose rows are all too old. The rows that must stay go into the first partition, which reaches back
// to the lowest key. Their part of the totals goes with the others in the same transaction.
import type { SQL } from "bun";
import type { Log } from "../../core/log.ts";
import { HOUR_MS } from "../../core/time.ts";
import type { DroppedRange, TimedTable } from "../periods.ts";
import { TOTALS_LOCK } from "../total-periods.ts";
import { boundsOf, keyOf, type Partition, partitionsOf } from "./catalog.ts";
import { lockOf, makeLike } from "./prepare.ts";
import { briefly } from "./transaction.ts";

/** With more of them the partition stays, and its other rows are removed one by one. */
const KEPT_MAX = 5_000;
/** The statements that keep others waiting. */
const EXCLUSIVE_MAX = "2s";
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

interface Kept {
  readonly range: DroppedRange;
  /** One for each row, in the same order. */
  readonly tenants: readonly string[];
  readonly keys: readonly string[];
}

/**
 * Looks for what must stay, with its totals, before anything is locked that others want. Null when that is too much. Looked
 * for once: what a row stays for may go meanwhile, and it would be missing where the totals count it.
 */
async function keepers(tx: SQL, table: TimedTable, { name, from, to }: Partition): Promise<Kept | null> {
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
  await tx.unsafe(`set local statement_timeout = '${EXCLUSIVE_MAX}'`);
  return kept;
}

const joined = ({ key }: TimedTable, { rows }: DroppedRange) =>
  `${rows} v join unnest($1::text[], $2::text[]) as k (tenant, key) on k.tenant = v.tenant and k.key = v.${key}`;

async function keepRows(tx: SQL, table: TimedTable, { range, tenants, keys }: Kept, into: string): Promise<void> {
  if (keys.length > 0) await tx.unsafe(`insert into ${into} select v.* from ${joined(table, range)}`, [tenants, keys]);
}

const COUNTED = "tenant, agent_id, mode, status, model, settlement_status";

/** Afterwards the totals of this time are those of the calls that stay: of kept rows and of open calls. */
async function dropTotals(
  tx: SQL,
  table: TimedTable,
  { range, tenants, keys }: Kept,
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
