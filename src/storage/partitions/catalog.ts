// The partitions of a table as the server's catalogue has them, which is the one truth about where they begin and end:
// their width changes with the retention. Together they reach from the lowest key to the highest, so that a row always has
// a place, and without a default partition, beside which Postgres reads no others in their order.
import type { SQL } from "bun";
import { HOUR_MS } from "../../core/time.ts";
import type { TimedTable } from "../periods.ts";

export interface Partition {
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
export const keyOf = (table: TimedTable, hour: number): string => `'${table.keyAt(hour * HOUR_MS)}'`;

/** For `for values`. */
export function boundsOf(table: TimedTable, from: number, to: number): string {
  const first = from === 0 ? "minvalue" : keyOf(table, from);
  return `from (${first}) to (${to === Number.POSITIVE_INFINITY ? "maxvalue" : keyOf(table, to)})`;
}
