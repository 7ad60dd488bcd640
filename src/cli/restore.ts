// `tollgate restore`: tells a database that it was restored to an older state, before a service starts on it. Of SQLite it
// can also put a copy in its place. What the services make of it: src/storage/restoration.ts.
import { copyFileSync, existsSync, linkSync, renameSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";
import { makeDataDir } from "../config/data-dir.ts";
import type { Config } from "../config.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { settleRestored } from "../gateway/payment/restored.ts";
import { openKeyring } from "../keys/keyring.ts";
import { DATABASE_FILE } from "../keys/master-keys.ts";
import { syncFile } from "../storage/backup.ts";
import { acquireDataDirLock } from "../storage/lock.ts";
import { openStore } from "../storage/open.ts";
import { makePrivateFile, syncDirectory } from "../storage/private-file.ts";
import { markCopy, recordRestore, unmarkCopy } from "../storage/restoration.ts";
import { check } from "./backup.ts";
import { requireDatabase, requireMasterKeys } from "./open.ts";

/**
 * @param named the copy; null where the database is in its place
 * @throws StartupProblem
 */
export async function restore(config: Config, named: string | null, log: Log): Promise<string> {
  const { databaseUrl, dataDir } = config;
  const file = named === null ? null : resolve(named);
  if (databaseUrl !== null) {
    if (file !== null) throw new StartupProblem("FILE must be left out: Postgres is restored by its own tools");
    await record(config, null, log);
    return restoredText("the database");
  }
  if (file === null) requireDatabase(config, "gateway");
  else makeDataDir(dataDir);
  // No service runs, and none starts in the middle of it.
  const lock = acquireDataDirLock(dataDir);
  const path = join(dataDir, DATABASE_FILE);
  try {
    const before = file === null ? null : place(config, file, path, log);
    await record(config, path, log);
    return `${before === null ? "" : `what was there is ${before} now\n`}${restoredText(path)}`;
  } finally {
    lock.release();
  }
}

function restoredText(what: string): string {
  return (
    `${what} is taken for restored just now; a gateway's calls that had not begun have ended, and for 14 minutes it refuses ` +
    "payments that may be older\nwhat was changed after the copy is forgotten: revoke tokens and disable accounts again (see " +
    "tollgate help operations)\n"
  );
}

/**
 * Puts the copy in the place of the database. What was there is kept, with its log, under another name.
 *
 * @returns that name; null when there was none
 * @throws StartupProblem when the copy does not hold, or can't be put there
 */
function place(config: Config, file: string, path: string, log: Log): string | null {
  const { problem } = check(config, file, log);
  if (problem !== null) throw new StartupProblem(`${file} does not hold: ${problem}`);
  const draft = `${path}.${crypto.randomUUID()}`;
  try {
    makePrivateFile(draft);
    copyFileSync(file, draft);
    markCopy(draft, systemClock.now());
    syncFile(draft);
    const before = moveAway(path);
    linkSync(draft, path);
    syncDirectory(config.dataDir);
    return before;
  } catch (cause) {
    throw new StartupProblem(`${file} can't be put in its place: ${(cause as Error).message}`, { cause });
  } finally {
    for (const leaving of [draft, `${draft}-journal`, `${draft}-wal`, `${draft}-shm`]) rmSync(leaving, { force: true });
  }
}

/**
 * With its log, without which the database is another one, and which must not come to lie beside the copy. The database goes
 * first: SQLite takes no log for one that is not there.
 */
function moveAway(path: string): string | null {
  const isThere = existsSync(path);
  const away = `${path}.before-${systemClock.now()}`;
  for (const part of ["", "-wal", "-shm"]) {
    if (existsSync(`${path}${part}`)) renameSync(`${path}${part}`, `${away}${part}`);
  }
  return isThere ? away : null;
}

async function record(config: Config, file: string | null, log: Log): Promise<void> {
  const { databaseUrl, dataDir } = config;
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  try {
    const { signingKeys } = store.read.tables;
    const keys = await store.read.db.select({ kid: signingKeys.kid }).from(signingKeys).limit(1);
    // Of a gateway: with another key it would not start.
    if (keys.length > 0) await openKeyring(store, requireMasterKeys(config, log), store.clock);
    await recordRestore(store, () => settleRestored(store));
    if (file !== null) unmarkCopy(file);
  } finally {
    await store.close();
  }
}
