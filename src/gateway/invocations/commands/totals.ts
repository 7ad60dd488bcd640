// The exact totals that a command changes on Postgres, as a part of its statement.

/** Picks the rows that the additions of one statement go to: the first parameter of each. */
const SHARD = "$1::bigint";

/**
 * Adds to totals. The rows are locked in one order, which is the same everywhere.
 *
 * @param additions a query of tenant, dimension, value and delta; a value that is null counts nowhere
 */
export const addTotals = (additions: string) => `
  insert into invocation_counts as c (tenant, dimension, value, shard, count)
  select tenant, dimension, value, ${SHARD}, sum(delta) from (${additions}) as additions
  where value is not null group by tenant, dimension, value having sum(delta) <> 0
  order by tenant, dimension, value
  on conflict (tenant, dimension, value, shard) do update set count = c.count + excluded.count`;
