// The commands for a database as a whole: `tollgate migrate`, `tollgate backup` and `tollgate restore`. A Postgres database is
// backed up and restored with its own tools. How the services handle a restore is in src/storage/restoration.ts.
import { copyFileSync, existsSync, rmSync, statSync } from "node:fs";
import { join, resolve } from "node:path";
import type { Config } from "../config.ts";
import { attempt } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { systemClock } from "../core/time.ts";
import { settleRestored, waitingCalls } from "../gateway/payment/restored.ts";
import { keysThatDoNotOpen, openKeyring } from "../keys/keyring.ts";
import { DATABASE_FILE, findMasterKeys, MASTER_KEY_FILE } from "../keys/master-keys.ts";
import { acquireDataDirLock, makePrivateFile, syncToDisk } from "../storage/data-dir.ts";
import { schemaText } from "../storage/migrate.ts";
import { openStore } from "../storage/open.ts";
import { markCopy, recordRestore, tellsRestore, unmarkCopy } from "../storage/restoration.ts";
import { checkSqliteCopy, copySqlite, replaceSqlite } from "../storage/sqlite/backup.ts";
import type { Store } from "../storage/store.ts";
import { begin, type CommandLine, type CommandOutcome, type CommandVerdict } from "./command-line.ts";
import * as place from "./open.ts";
import { canAsk, disagreement, type Progress, withProgress } from "./terminal/interactive.ts";

/** Brings the schema up to date, for deployments that do so before the new version takes calls. */
export async function migrate(line: CommandLine): Promise<CommandOutcome> {
  const { config, log } = begin(line, "migrate");
  // The next start would refuse a gateway's database without its master key. A facilitator's database holds no secrets.
  const service = config.mode ?? "gateway";
  await place.requireOwnDataDir(service, config);
  const isNew = place.lacksDatabase(config);
  if (service === "facilitator") place.openDataDir(config, log);
  else place.prepareMasterKeys(config, log);
  await withProgress("migrating the database", async () => (await place.openStoreOf(service, config, log)).close());
  const isSqlite = config.databaseUrl === null;
  log.info("database_up_to_date", { database: isSqlite ? "sqlite" : "postgres" });
  // The result is the last line.
  log.flush();
  const database = isSqlite ? join(config.dataDir, DATABASE_FILE) : "the database";
  return isNew ? `created a new database, ${database}\n` : `${database} is up to date\n`;
}

export async function backup(line: CommandLine): Promise<CommandOutcome> {
  const [target] = line.words;
  // To check a copy, its file is given as the value of --verify, so that a misspelt name does not make a new backup.
  const verify = line.flags.get("verify");
  if (target !== undefined && verify) {
    line.problems.push("two files are named: FILE --verify copies and checks, --verify FILE checks a copy that exists");
  }
  const named = target ?? verify ?? "";
  if (named === "") line.problems.push("FILE is missing: tollgate backup FILE");
  const { config, log } = begin(line, "backup");
  const file = resolve(named);
  const written = target !== undefined;
  if (written) {
    const database = join(config.dataDir, DATABASE_FILE);
    const copy = async ({ writes }: Progress) => copySqlite(database, file, systemClock.now(), writes);
    await withProgress(`copying the database to ${file}`, copy);
  }
  const bytes = statSync(file, { throwIfNoEntry: false })?.size ?? null;
  const unverified = { file, written, bytes, verified: false, problem: null };
  if (verify === undefined) return { holds: true, text: `wrote ${file}\n`, document: unverified };
  const { problem, facts } = await withProgress(`checking ${file}`, async () => check(config, file, log));
  const holds = problem === null;
  const done = written ? `wrote ${file} and verified it` : `${file} is complete`;
  const text = holds ? `${done}: ${facts}\n` : `${file} can't be restored: ${problem}\n`;
  return { holds, text, document: { file, written, bytes, verified: holds, problem } };
}

/** Checks a copy. `problem` is null if it can be restored. */
function check(config: Config, file: string, log: Log) {
  const checked = checkSqliteCopy(file);
  if (checked.problem !== null) return { problem: checked.problem, facts: "" };
  const { bytes, schema, keys } = checked;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const facts = `${bytes} bytes, ${schemaText(schema)}, ${count === 0 ? "no keys" : `all ${count} keys open`}`;
  if (count === 0) return { problem: null, facts };
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys === null) {
    const needed = `set TOLLGATE_MASTER_KEY, or put ${MASTER_KEY_FILE} into the data directory`;
    return { problem: `its ${count} keys can't be opened: ${needed}`, facts };
  }
  const closed = keysThatDoNotOpen(masterKeys.all(), keys).length;
  const needed = "the copy needs the master key of its time, as TOLLGATE_MASTER_KEY";
  const unopened = `${closed} of its ${count} keys do not open with the master key (${masterKeys.place}): ${needed}`;
  return { problem: closed === 0 ? null : unopened, facts };
}

/** `tollgate restore`. Without FILE, the operator has put the restored database in its place already. */
export async function restore(line: CommandLine): Promise<CommandOutcome> {
  const { config, log } = begin(line, "restore");
  const { databaseUrl, dataDir } = config;
  const [named] = line.words;
  const file = named === undefined ? null : resolve(named);
  if (databaseUrl !== null) {
    if (file === null) return record(line, config, null, log);
    throw new StartupProblem("FILE must be left out: a Postgres database is restored by its own tools");
  }
  const path = join(dataDir, DATABASE_FILE);
  if (file === null) place.requireDatabase(config, "service");
  else {
    // Before anything is made in the directory.
    await withProgress(`checking ${file}`, async () => requireCopy(config, file, path, log));
    place.openDataDir(config, log);
  }
  // Makes sure that no service runs, and that none starts meanwhile.
  const lock = acquireDataDirLock(dataDir, ": stop it first");
  try {
    if (file === null) return await record(line, config, path, log);
    const before = await withProgress(`restoring ${file}`, () => putCopy(config, file, path));
    const put = before === null ? [] : [`the previous database is ${before} now`];
    return await recordPut(line, config, file, put, log);
  } finally {
    lock.release();
  }
}

/** @throws StartupProblem when the file can't be restored */
function requireCopy(config: Config, file: string, path: string, log: Log): void {
  const itself = "is the database itself: name a copy, or leave FILE out if it is the copy already";
  if (isOneFile(file, path)) throw new StartupProblem(`${file} ${itself}`);
  const { problem } = check(config, file, log);
  if (problem !== null) throw new StartupProblem(`${file} can't be restored: ${problem}`);
}

/** @param kept what became of the previous database @throws StartupProblem that tells what was done already */
async function recordPut(line: CommandLine, config: Config, file: string, kept: readonly string[], log: Log) {
  try {
    syncToDisk(config.dataDir);
    const outcome = await record(line, config, join(config.dataDir, DATABASE_FILE), log);
    return typeof outcome === "string" ? [...kept, outcome].join("\n") : outcome;
  } catch (cause) {
    const done = [`${file} is in its place`, ...kept].join(", ");
    const rest = `run tollgate restore without FILE for the rest, which failed: ${(cause as Error).message}`;
    throw new StartupProblem(`${done}; ${rest}`, { cause });
  }
}

function restoredText(what: string, services: readonly place.Service[]): string {
  const ended =
    "; calls that had not begun have ended, and for 14 minutes the gateway refuses payments that may be older";
  const again = services.map((service) => (service === "gateway" ? "revoke tokens" : "disable accounts"));
  return (
    `${what} is marked as restored${services.includes("gateway") ? ended : ""}\nchanges made after the copy are lost` +
    `${again.length === 0 ? "" : `: ${again.join(" and ")} again`} (see tollgate help backups)\n`
  );
}

/**
 * Puts the copy in the place of the database. @returns the name under which the previous database is kept; null if there was none
 * @throws StartupProblem when the copy is that of the other service, or can't be put there
 */
async function putCopy(config: Config, file: string, path: string): Promise<string | null> {
  const draft = `${path}.${crypto.randomUUID()}`;
  try {
    makePrivateFile(draft);
    copyFileSync(file, draft);
    await place.requireOwnCopy(draft, config);
    markCopy(draft, systemClock.now());
    const before = `${path}.before-${systemClock.now()}`;
    replaceSqlite(draft, path, before);
    return existsSync(before) ? before : null;
  } catch (cause) {
    if (cause instanceof StartupProblem) throw cause;
    const why = (cause as Error).message;
    throw new StartupProblem(`${file} can't be put in its place, and nothing was changed: ${why}`, { cause });
  } finally {
    for (const leaving of [draft, `${draft}-journal`, `${draft}-wal`, `${draft}-shm`]) rmSync(leaving, { force: true });
  }
}

function isOneFile(...paths: [string, string]): boolean {
  const [one, other] = paths.map((path) => attempt(() => statSync(path)));
  return one !== undefined && one.ino === other?.ino && one.dev === other.dev;
}

/** Marks the database as restored. @returns what to print */
async function record(line: CommandLine, config: Config, file: string | null, log: Log) {
  const { databaseUrl, dataDir } = config;
  return place.withStore(openStore({ databaseUrl, dataDir, log, clock: systemClock }), async (store) => {
    const services = await place.servicesIn(store.read);
    // A gateway would not start with another master key.
    if (services.includes("gateway")) await openKeyring(store, place.requireMasterKeys(config, log), store.clock);
    const disagreed = (await tellsRestore(store, file)) ? null : await disagreementToEnd(line, store);
    if (disagreed !== null) return disagreed;
    await recordRestore(store, () => settleRestored(store));
    if (file !== null) unmarkCopy(file);
    return restoredText(file ?? "the database", services);
  });
}

/** Asks before calls are ended: if the database is the latest state and no older one, a start would still make them. */
async function disagreementToEnd(line: CommandLine, store: Store): Promise<CommandVerdict | null> {
  // A script that runs the command has put the older state there itself.
  if (!canAsk()) return null;
  const { calls, paid } = await waitingCalls(store);
  if (calls === 0) return null;
  const ends = `this ends ${calls} waiting ${calls === 1 ? "call" : "calls"}, ${paid} of them paid`;
  return disagreement(line, `Nothing in the database shows that it was restored, and ${ends}.`);
}
