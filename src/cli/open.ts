// Opens what commands that work on the data need first: the data directory, the database, and the master key.
import { closeSync, existsSync, mkdirSync, openSync, statSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import { eq } from "drizzle-orm";
import { systemReason } from "../config/values.ts";
import type { Config } from "../config.ts";
import { attempt } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { listenProblem, StartupProblem } from "../core/startup.ts";
import { systemClock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";
import {
  DATABASE_FILE,
  findMasterKeys,
  loadMasterKeys,
  MASTER_KEY_FILE,
  type MasterKeys,
} from "../keys/master-keys.ts";
import { untilStored, within } from "../storage/failures.ts";
import type { DatabaseInspection } from "../storage/inspect.ts";
import { fitOf } from "../storage/migrate.ts";
import { openStore } from "../storage/open.ts";
import { inspectPostgres } from "../storage/postgres/inspect.ts";
import { inspectSqlite } from "../storage/sqlite/inspect.ts";
import type { Reader, Store } from "../storage/store.ts";

export type DataLocation = Pick<Config, "databaseUrl" | "dataDir">;

/**
 * Creates the data directory (with Postgres there is none) and writes to it once, since permissions alone don't reveal a full
 * or read-only disk. @throws StartupProblem when the directory can't be used
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
    const must = "--data-dir (or TOLLGATE_DATA_DIR) must be a directory that tollgate can create and write to";
    throw new StartupProblem(`${must}; ${dataDir} can't be used: ${systemReason(cause)}`, { cause });
  }
}

/** Opens the data directory, and loads the master key or makes one. @throws StartupProblem when either can't be used */
export function prepareMasterKeys(config: DataLocation & Pick<Config, "masterKeys">, log: Log) {
  openDataDir(config, log);
  const loaded = loadMasterKeys({ ...config, log });
  const path = join(config.dataDir, DATABASE_FILE);
  const isEmptied = config.databaseUrl === null && statSync(path, { throwIfNoEntry: false })?.size === 0;
  if (isEmptied && !loaded.generated) log.warn("database_is_empty", { path });
  return loaded;
}

/** Whether there is no database yet, so that opening it would create one. */
export const lacksDatabase = ({ databaseUrl, dataDir }: DataLocation): boolean =>
  databaseUrl === null && !existsSync(join(dataDir, DATABASE_FILE));

/**
 * Makes sure that a first start can listen, before it makes a database and a key that a refused start would leave behind.
 * @param ports by their variables @throws StartupProblem when an address can't be listened on
 */
export function requirePorts(location: DataLocation, host: string, ports: Readonly<Record<string, number>>): void {
  if (!lacksDatabase(location)) return;
  for (const [variable, port] of Object.entries(ports)) {
    try {
      // Without reusePort, with which a port can be opened that another process uses.
      void Bun.serve({ hostname: host, port, reusePort: false, fetch: () => Response.error() }).stop(true);
    } catch (cause) {
      throw listenProblem(host, port, variable, cause);
    }
  }
}

export type Service = "gateway" | "facilitator";

/** Whose database the operator has to name, and how. */
function mustBeOf(whose: Service | "service", { databaseUrl }: DataLocation): string {
  return databaseUrl === null
    ? `--data-dir (or TOLLGATE_DATA_DIR) must be the ${whose}'s data directory`
    : `DATABASE_URL must be the ${whose}'s database`;
}

/** For commands that must not create a database, for example in a misspelt directory. @throws StartupProblem when there is none */
export function requireDatabase(location: DataLocation, whose: Service | "service"): void {
  if (!lacksDatabase(location)) return;
  throw new StartupProblem(`${mustBeOf(whose, location)}: ${location.dataDir} holds no ${DATABASE_FILE}`);
}

/** The services that have left something in a database: a gateway its keys, a facilitator its accounts and wallets. */
export async function servicesIn({ db, tables }: Reader): Promise<readonly Service[]> {
  const { signingKeys, facilitatorAccounts, facilitatorWallets } = tables;
  const [keys, accounts, wallets] = await Promise.all([
    db.select({ kid: signingKeys.kid }).from(signingKeys).limit(1),
    db.select({ name: facilitatorAccounts.name }).from(facilitatorAccounts).limit(1),
    db.select({ wallet: facilitatorWallets.wallet }).from(facilitatorWallets).limit(1),
  ]);
  const services = { gateway: keys.length > 0, facilitator: accounts.length + wallets.length > 0 };
  return (["gateway", "facilitator"] as const).filter((service) => services[service]);
}

/** @param what stands in the problem between the place and its owner, as in "the directory is a gateway's" */
function requireAmong(services: readonly Service[], service: Service, location: DataLocation, what = "is"): void {
  const [other] = services;
  if (other === undefined || services.includes(service)) return;
  const place = location.databaseUrl === null ? location.dataDir : "the one there";
  throw new StartupProblem(`${mustBeOf(service, location)}: ${place} ${what} a ${other}'s`);
}

/** The services that have used a database file, which may be missing. An unreadable file is reported later, by its opening. */
const servicesAt = (file: string) => servicesOf(attempt(() => inspectSqlite(file)) ?? null);

/** The services that have used a database, which is closed then. */
async function servicesOf(database: DatabaseInspection | null): Promise<readonly Service[]> {
  try {
    const fit = database === null ? "none" : fitOf(database.schema);
    return database === null || fit === "none" || fit === "too new" ? [] : await servicesIn(database.read);
  } finally {
    await database?.close();
  }
}

/**
 * Makes sure that a copy does not replace the other service's data. A copy that no service had used
 * may belong to either one, so it may replace only a database that no service has used. @throws StartupProblem when it would
 */
export async function requireOwnCopy(copy: string, location: DataLocation): Promise<void> {
  const services = await servicesAt(copy);
  for (const service of services) await requireOwnDataDir(service, location);
  const [used] = services.length > 0 ? [] : await servicesAt(join(location.dataDir, DATABASE_FILE));
  if (used === undefined) return;
  const why = "no service had used the database when it was copied";
  throw new StartupProblem(`FILE must be a copy of a ${used}'s database: ${why}`);
}

/** Changes nothing. @throws StartupProblem when the data directory is that of the other service alone */
export async function requireOwnDataDir(service: Service, location: DataLocation): Promise<void> {
  const { databaseUrl, dataDir } = location;
  if (databaseUrl !== null) return;
  const used = await servicesAt(join(dataDir, DATABASE_FILE));
  requireAmong(used, service, location);
  // Only a gateway makes a master key, and does so before its database.
  const isKeyed = used.length === 0 && existsSync(join(dataDir, MASTER_KEY_FILE));
  if (isKeyed) requireAmong(["gateway"], service, location, `holds a ${MASTER_KEY_FILE}, so it is`);
}

/** Opens the database of a service, which may be empty. @throws StartupProblem when it is that of the other service alone */
export async function openStoreOf(service: Service, location: DataLocation, log: Log): Promise<Store> {
  const { databaseUrl } = location;
  // Checked before the migration: if the database is the other service's, that service may be of an earlier version.
  await requireOwnDataDir(service, location);
  if (databaseUrl !== null) {
    const used = await within(MAX.storeMs, servicesOf(await inspectPostgres(databaseUrl)));
    requireAmong(used, service, location);
  }
  return openStore({ ...location, log, clock: systemClock });
}

/** For commands on keys and tokens, which only a gateway's database gives effect. @throws StartupProblem for any other */
export async function openGatewayStore(location: DataLocation, log: Log): Promise<Store> {
  requireDatabase(location, "gateway");
  const store = patient(await openStoreOf("gateway", location, log));
  if ((await servicesIn(store.read)).includes("gateway")) return store;
  await store.close();
  throw new StartupProblem(`${mustBeOf("gateway", location)}: no gateway has used the database there yet`);
}

/** Tells on standard error that the database has nothing of the tenant: the tenant is new, or its name is misspelt. */
export async function warnOfUnknownTenant({ read }: Store, tenant: string): Promise<void> {
  const { agents, credentials, invocations } = read.tables;
  const found = [agents, credentials, invocations].map((table) =>
    read.db.select({ id: table.id }).from(table).where(eq(table.tenant, tenant)).limit(1),
  );
  if ((await Promise.all(found)).some((rows) => rows.length > 0)) return;
  const nothing = "has no agent, credential or call here yet; check the spelling if it should";
  process.stderr.write(`the tenant ${tenant} ${nothing}\n`);
}

/** Makes sure that the place is a gateway's, before a command looks for the master key there. @throws StartupProblem */
export async function requireGatewayPlace(location: DataLocation): Promise<void> {
  requireDatabase(location, "gateway");
  await requireOwnDataDir("gateway", location);
}

/** The existing master key. @throws StartupProblem when there is none, or it can't be used */
export function requireMasterKeys(config: DataLocation & Pick<Config, "masterKeys">, log: Log): MasterKeys {
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys !== null) return masterKeys;
  const lacks = `${config.dataDir} holds no ${MASTER_KEY_FILE}, and TOLLGATE_MASTER_KEY is not set`;
  throw new StartupProblem(`there is no master key: ${lacks}`);
}

export async function withStore<T>(opening: Promise<Store>, work: (store: Store) => Promise<T>): Promise<T> {
  const store = await opening;
  try {
    return await work(store);
  } finally {
    await store.close();
  }
}

/** A store that retries its writes for a minute, since beside a busy gateway they may time out. A write may happen twice. */
function patient(store: Store): Store {
  return {
    ...store,
    write(work, bytes) {
      const until = performance.now() + 60_000;
      const isOver = () => performance.now() > until;
      return untilStored(() => store.write(work, bytes), isOver, 500);
    },
  };
}
