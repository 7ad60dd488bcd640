// What every command that touches the data needs first: the directory and the master key.
import { makeDataDir } from "../config/data-dir.ts";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { loadMasterKey, type MasterKey } from "../keys/master-key.ts";

type Settings = Pick<Config, "databaseUrl" | "dataDir" | "masterKey">;

/** @throws StartupProblem when the directory or the key can't be used. */
export function openDataDir({ databaseUrl, dataDir, masterKey }: Settings, log: Log): MasterKey {
  if (databaseUrl === null && makeDataDir(dataDir).shared) {
    log.warn("the data directory is open to others than its owner", { path: dataDir });
  }
  return loadMasterKey({ configured: masterKey, dataDir, log });
}
