// `tollgate migrate`: brings the schema up to date without starting anything else, for deployments that do so
// before the new version takes calls.
import type { Config } from "../config.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { openStore } from "../storage/open.ts";
import { openDataDir, openMasterKeys } from "./open.ts";

export async function migrate(config: Config, log: Log): Promise<void> {
  // A gateway's database without its key would be refused at the next start. A facilitator keeps no secrets in it.
  if (config.mode === "facilitator") openDataDir(config, log);
  else openMasterKeys(config, log);
  const store = await openStore({ ...config, log, clock: systemClock });
  await store.close();
  log.info("database_up_to_date", { database: store.dialect });
}
