// Opens what commands that work on the data need first: the data directory, the database, and the master key.
import { closeSync, existsSync, mkdirSync, openSync, statSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import { DATA_DIR_MUST } from "../config/rules.ts";
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { systemClock } from "../core/time.ts";
import {
  DATABASE_FILE,
  findMasterKeys,
  loadMasterKeys,
  MASTER_KEY_FILE,
  type MasterKeys,
} from "../keys/master-keys.ts";
import { untilStored } from "../storage/failures.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";

export type DataLocation = Pick<Config, "databaseUrl" | "dataDir">;

/**
 * Creates the data directory if it is missing, and writes to it once, since permissions alone don't reveal a full or read-only
 * disk. With Postgres there is no data directory.
 *
 * @throws StartupProblem when the directory can't be used
 */
export function openDataDir({ databaseUrl, dataDir }: DataLocation, log: Log): void {
  if (databaseUrl !== null) return;
  try {
    mkdirSync(dataDir, { recursive: true, mode: 0o700 });
    // A new name each time, so that a file that a crash has left does no harm.
    const trial = join(dataDir, `.trial-${crypto.randomUUID()}`);
    closeSync(openSync(trial, "wx", 0o600));
    unlinkSync(trial);
    if ((statSync(dataDir).mode & 0o077) !== 0) log.warn("data_dir_too_open", { path: dataDir });
  } catch (cause) {
    const reason = cause instanceof Error && "code" in cause ? ` (${String(cause.code)})` : "";
    throw new StartupProblem(`TOLLGATE_DATA_DIR ${DATA_DIR_MUST}${reason}`, { cause });
  }
}

/** Opens the data directory, and loads the master key or makes one. @throws StartupProblem when either can't be used */
export function prepareMasterKeys(config: DataLocation & Pick<Config, "masterKeys">, log: Log) {
  openDataDir(config, log);
  return loadMasterKeys({ ...config, log });
}

/** Whether there is no database yet, so that opening it would create one. */
export function lacksDatabase({ databaseUrl, dataDir }: DataLocation): boolean {
  return databaseUrl === null && !existsSync(join(dataDir, DATABASE_FILE));
}

/**
 * Makes sure that a command for an existing deployment does not create a database, for example in a misspelt directory.
 *
 * @throws StartupProblem when there is no database
 */
export function requireDatabase({ databaseUrl, dataDir }: DataLocation, whose: "gateway" | "facilitator"): void {
  if (!lacksDatabase({ databaseUrl, dataDir })) return;
  throw new StartupProblem(`TOLLGATE_DATA_DIR must be the ${whose}'s: ${dataDir} holds no ${DATABASE_FILE}`);
}

/**
 * Opens the database of a gateway, for commands on keys and tokens, which would have no effect in another database.
 *
 * @throws StartupProblem when there is no database, or it holds no keys
 */
export async function openGatewayStore({ databaseUrl, dataDir }: DataLocation, log: Log): Promise<Store> {
  requireDatabase({ databaseUrl, dataDir }, "gateway");
  const store = patient(await openStore({ databaseUrl, dataDir, log, clock: systemClock }));
  const { signingKeys } = store.read.tables;
  const keys = await store.read.db.select({ kid: signingKeys.kid }).from(signingKeys).limit(1);
  if (keys.length > 0) return store;
  await store.close();
  const place = databaseUrl === null ? "TOLLGATE_DATA_DIR" : "DATABASE_URL";
  throw new StartupProblem(`${place} must be the gateway's: the database there holds no keys and made no tokens`);
}

/** The existing master key. @throws StartupProblem when there is none, or it can't be used */
export function requireMasterKeys(config: DataLocation & Pick<Config, "masterKeys">, log: Log): MasterKeys {
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys !== null) return masterKeys;
  throw new StartupProblem(
    `there is no master key: TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} be in the data directory`,
  );
}

/** Does the work with an open store, which is closed afterwards. */
export async function withStore<T>(opening: Promise<Store>, work: (store: Store) => Promise<T>): Promise<T> {
  const store = await opening;
  try {
    return await work(store);
  } finally {
    await store.close();
  }
}

const PAUSE_MS_MOST = 500;

/** A store that retries its writes for a minute, since beside a busy gateway they may time out. A write may happen twice. */
function patient(store: Store): Store {
  return {
    ...store,
    write(work, bytes) {
      const until = performance.now() + 60_000;
      return untilStored(
        () => store.write(work, bytes),
        () => performance.now() > until,
        PAUSE_MS_MOST,
      );
    },
  };
}
