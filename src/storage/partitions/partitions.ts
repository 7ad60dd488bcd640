// Periods on Postgres, as partitions. It uses a connection of its own, for the time of a change.
import type { SQL } from "bun";
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import { DAY_MS } from "../../core/time.ts";
import { within } from "../deadline.ts";
import { type Periods, periodHours } from "../periods.ts";
import { postgresClient } from "../pool.ts";
import { dropPartitions } from "./drop.ts";
import { dropPassedEnds, preparePartitions } from "./prepare.ts";

/** A change of a large table takes its time; a connection that hangs since a failover would take for ever. */
const WORK_MS_MAX = 3_600_000;

interface PartitionsOptions {
  readonly databaseUrl: string;
  readonly clock: Clock;
  readonly log: Log;
  /** Tests shorten it. */
  readonly workMsMax?: number;
}

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
  };
}
