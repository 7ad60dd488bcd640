// What every command that touches the data needs first: the directory, and the master key where secrets are kept.
import { makeDataDir } from "../config/data-dir.ts";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { loadMasterKeys } from "../keys/master-key.ts";
import { untilStored } from "../storage/retry-until-stored.ts";
import type { Store } from "../storage/store.ts";

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

const PATIENCE_MS = 60_000;
const PAUSE_MS_MOST = 500;

/** A store for a command whose writes may be done twice: beside a busy gateway, one may have to wait its turn for long. */
export function patient(store: Store): Store {
  return {
    ...store,
    write(work, bytes) {
      const until = performance.now() + PATIENCE_MS;
      return untilStored(
        () => store.write(work, bytes),
        () => performance.now() > until,
        PAUSE_MS_MOST,
      );
    },
  };
}
