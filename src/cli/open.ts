// What every command that touches the data needs first: the directory, and the master key where secrets are kept.
import { makeDataDir } from "../config/data-dir.ts";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { loadMasterKey, type MasterKey } from "../keys/master-key.ts";

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
export function openMasterKey(config: DataPlace & Pick<Config, "masterKey">, log: Log): MasterKey {
  openDataDir(config, log);
  return loadMasterKey({ configured: config.masterKey, dataDir: config.dataDir, log });
}
