// What every command that touches the data needs first: the directory, and the master key where secrets are kept.
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

export type DataPlace = Pick<Config, "databaseUrl" | "dataDir">;

/**
 * Creates the directory of the database if need be, and writes to it once, since permissions alone do not tell of a full or
 * read-only disk. Postgres needs none.
 *
 * @throws StartupProblem when it can't be used
 */
export function openDataDir({ databaseUrl, dataDir }: DataPlace, log: Log): void {
  if (databaseUrl !== null) return;
  try {
    mkdirSync(dataDir, { recursive: true, mode: 0o700 });
    // A new name each time: a file that a crash left behind must not be in the way.
    const trial = join(dataDir, `.trial-${crypto.randomUUID()}`);
    closeSync(openSync(trial, "wx", 0o600));
    unlinkSync(trial);
    if ((statSync(dataDir).mode & 0o077) !== 0) log.warn("data_dir_too_open", { path: dataDir });
  } catch (cause) {
    const reason = cause instanceof Error && "code" in cause ? ` (${String(cause.code)})` : "";
    throw new StartupProblem(`TOLLGATE_DATA_DIR ${DATA_DIR_MUST}${reason}`, { cause });
  }
}

/** @throws StartupProblem when the directory or the key can't be used. */
export function prepareMasterKeys(config: DataPlace & Pick<Config, "masterKeys">, log: Log) {
  openDataDir(config, log);
  return loadMasterKeys({ ...config, log });
}

/** Whether a database will be made, as in a mistyped directory. */
export function lacksDatabase({ databaseUrl, dataDir }: DataPlace): boolean {
  return databaseUrl === null && !existsSync(join(dataDir, DATABASE_FILE));
}

/**
 * For what is done to a deployment that is there.
 *
 * @throws StartupProblem when there is none
 */
export function requireDatabase({ databaseUrl, dataDir }: DataPlace, whose: "gateway" | "facilitator"): void {
  if (!lacksDatabase({ databaseUrl, dataDir })) return;
  throw new StartupProblem(`TOLLGATE_DATA_DIR must be the ${whose}'s: ${dataDir} holds no ${DATABASE_FILE}`);
}

/**
 * The database of a gateway that has keys: what is done to keys or tokens elsewhere is done to nothing.
 *
 * @throws StartupProblem when there are none
 */
export async function openGatewayStore({ databaseUrl, dataDir }: DataPlace, log: Log): Promise<Store> {
  requireDatabase({ databaseUrl, dataDir }, "gateway");
  const store = patient(await openStore({ databaseUrl, dataDir, log, clock: systemClock }));
  const { signingKeys } = store.read.tables;
  const keys = await store.read.db.select({ kid: signingKeys.kid }).from(signingKeys).limit(1);
  if (keys.length > 0) return store;
  await store.close();
  const place = databaseUrl === null ? "TOLLGATE_DATA_DIR" : "DATABASE_URL";
  throw new StartupProblem(`${place} must be the gateway's: the database there holds no keys, so no token is of it`);
}

/** @throws StartupProblem when there is none, or it can't be used */
export function requireMasterKeys(config: DataPlace & Pick<Config, "masterKeys">, log: Log): MasterKeys {
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys !== null) return masterKeys;
  throw new StartupProblem(
    `there is no master key: TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} be in the data directory`,
  );
}

/** What the work gives, for which the store is open. */
export async function withStore<T>(opening: Promise<Store>, work: (store: Store) => Promise<T>): Promise<T> {
  const store = await opening;
  try {
    return await work(store);
  } finally {
    await store.close();
  }
}

const PAUSE_MS_MOST = 500;

/** A store for a command whose writes may be done twice: beside a busy gateway, a write may wait for long. */
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
