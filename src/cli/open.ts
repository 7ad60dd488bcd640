// What every command that touches the data needs first: the directory, and the master key where secrets are kept.
import { makeDataDir } from "../config/data-dir.ts";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { loadMasterKeys } from "../keys/master-key.ts";

type DataPlace = Pick<Config, "databaseUrl" | "dataDir">;

/**
 * The directory of the database; Postgres needs none.
 *
 * @throws StartupProblem when it can't be used
 */
export function openDataDir({ databaseUrl, dataDir }: DataPlace, log: Log): void {
  if (databaseUrl === null && makeDataDir(dataDir).shared) {
    log.warn("data_dir_too_open", { path: dataDir });
  }
}

/** @throws StartupProblem when the directory or the key can't be used. */
export function openMasterKeys(config: DataPlace & Pick<Config, "masterKeys">, log: Log) {
  openDataDir(config, log);
  return loadMasterKeys({ ...config, log });
}
