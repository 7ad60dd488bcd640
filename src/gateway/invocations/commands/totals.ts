// The exact totals that a command changes on Postgres, as a part of its statement.
import { HOUR_MS } from "../../../core/time.ts";

/** Picks the rows that the additions of one statement go to: the first parameter of each. */
const SHARD = "$1::bigint";

/** As `periodOf`. */
const PERIOD = `('x' || translate(substr(id, 5, 13), '-', ''))::bit(48)::bigint / ${HOUR_MS}`;

/**
 * Adds to totals. The rows are locked in one order, which is the same everywhere.
 *
 * @param additions a query of tenant, id of the call, dimension, value and delta; a value that is null counts nowhere
 */
export const addTotals = (additions: string) => `
  insert into invocation_counts as c (tenant, dimension, value, period, shard, count)
  select tenant, dimension, value, ${PERIOD} as period, ${SHARD}, sum(delta) from (${additions}) as additions
  where value is not null group by period, tenant, dimension, value having sum(delta) <> 0
  order by period, tenant, dimension, value
  on conflict (tenant, dimension, value, period, shard) do update set count = c.count + excluded.count`;
