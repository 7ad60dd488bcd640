// `tollgate keys rotate`: every key anew, beside gateways that run. Whatever is killed or fails in the middle, the next run
// goes on.
import type { Config } from "../config.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { secretIdentity } from "../gateway/credentials/service.ts";
import { newKey } from "../keys/envelope.ts";
import { HOLDER_LEASE_MS, type Lacking } from "../keys/holders.ts";
import { openKeyring } from "../keys/keyring.ts";
import {
  findMasterKeys,
  MASTER_KEY_FILE,
  masterKeyFile,
  nextKeyFile,
  promoteMasterKey,
  stageMasterKey,
} from "../keys/master-key.ts";
import { type MasterKeys, masterKeyId } from "../keys/master-keys.ts";
import {
  activate,
  announce,
  announceTenantKeys,
  finish,
  isAnyLeft,
  lacking,
  type RotationCounts,
  type RotationOptions,
  reseal,
  rewrap,
} from "../keys/rotation.ts";
import { readState } from "../keys/state.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";

/** A gateway that was killed counts until its lease has run out. */
const GATEWAYS_MS_MAX = HOLDER_LEASE_MS + 5_000;
const LOOK_MS = 100;

interface RotationVerdict {
  readonly holds: boolean;
  /** For the terminal. */
  readonly text: string;
}

/** What the settings alone forbid. */
export function rotationProblems(config: Config | null): string[] {
  if (config === null) return [];
  const { own, file, next } = config.masterKeys;
  if (own === null || file !== null || next !== null) return [];
  return [
    "TOLLGATE_NEW_MASTER_KEY must be set when TOLLGATE_MASTER_KEY is, here and at the gateways: see tollgate help operations",
  ];
}

/** @throws StartupProblem */
export async function rotateKeys(config: Config, log: Log): Promise<RotationVerdict> {
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys === null) {
    throw new StartupProblem(
      `there is no master key: TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} be in the data directory`,
    );
  }
  const { databaseUrl, dataDir } = config;
  // The machine's clock, as the store's own is on SQLite.
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  try {
    await openKeyring(store, masterKeys, store.clock);
    const { is_rotating, master_key_id } = await readState(store.read);
    const options = { store, masterKeys, clock: store.clock, secretIdentity };
    if (is_rotating && master_key_id !== null) return await goOn(options, master_key_id, config);
    const id = stageNext(config, masterKeys, log);
    if (id === master_key_id) return { holds: true, text: `${alreadyText(config)}\n` };
    const refused = await begin(options, id);
    return refused === null ? await goOn(options, id, config) : { holds: false, text: `${refused}\n` };
  } finally {
    await store.close();
  }
}

/**
 * The master key that comes next, durable where the gateways find it.
 *
 * @returns its ID
 */
function stageNext(config: Config, masterKeys: MasterKeys, log: Log): string {
  const { next, own } = config.masterKeys;
  const file = masterKeyFile(config.masterKeys, config.dataDir);
  // What is configured beside a configured key is configured at the gateways too.
  if (next !== null && (own !== null || file === null)) return masterKeyId(next);
  if (file === null) throw new StartupProblem("TOLLGATE_NEW_MASTER_KEY must be set");
  const id = masterKeys.add(stageMasterKey(file, next ?? newKey(), log));
  if (next !== null && masterKeyId(next) !== id) {
    throw new StartupProblem(
      `${nextKeyFile(file)} must hold the key of TOLLGATE_NEW_MASTER_KEY, or be removed: no rotation to it has begun`,
    );
  }
  return id;
}

/** Null when the rotation has begun, else why not. */
async function begin(options: RotationOptions, id: string): Promise<string | null> {
  const { store } = options;
  await announce(store, id);
  const lacks = await gatewaysWithout(store, id, 0);
  const outcome = lacks.length > 0 ? lacks : await activate(options, id);
  if (outcome === "active") return null;
  if (outcome === "superseded") return "another command rotates the keys to another master key; nothing was done";
  return lackingText(outcome);
}

/** The gateways that run and are not as they should be after the time in which they can be. */
async function gatewaysWithout(store: Store, id: string, version: number): Promise<readonly Lacking[]> {
  const until = performance.now() + GATEWAYS_MS_MAX;
  for (;;) {
    const lacks = await lacking(store, id, version);
    if (lacks.length === 0 || performance.now() > until) return lacks;
    await Bun.sleep(LOOK_MS);
  }
}

function lackingText(lacks: readonly Lacking[]): string {
  const names = (isOlder: boolean) =>
    lacks
      .filter((one) => one.isOlder === isOlder)
      .map(({ replica }) => replica)
      .join(", ");
  const [without, older] = [names(false), names(true)];
  return [
    "nothing is rotated yet",
    ...(without === "" ? [] : [`these gateways run without the new master key: ${without}`]),
    ...(older === "" ? [] : [`these gateways run in a version that can't rotate keys: ${older}`]),
    "see tollgate help operations, and run this again",
  ].join("; ");
}

/** From the moment that the new master key is in force to the end. */
async function goOn(options: RotationOptions, id: string, config: Config): Promise<RotationVerdict> {
  const { store } = options;
  const counts: RotationCounts = { tenantKeys: 0, secrets: 0 };
  do {
    counts.tenantKeys += await rewrap(options, id);
  } while (await isAnyLeft(options, id));
  // One that does not listen any more seals with an older key of a tenant, which opens as well and is wrapped anew.
  await gatewaysWithout(store, id, await announceTenantKeys(store));
  for (let changed = -1; changed !== 0; counts.secrets += changed) changed = await reseal(options);
  const file = masterKeyFile(config.masterKeys, config.dataDir);
  const isInPlace = file !== null && promoteMasterKey(file, id);
  await finish(store, id);
  return { holds: true, text: `${doneText(counts)}\n${whereText(file, isInPlace)}\n` };
}

function doneText({ tenantKeys, secrets }: RotationCounts): string {
  return `the keys are rotated: new keys for ${tenantKeys} tenants, ${secrets} secrets under them, and new signing keys`;
}

function whereText(file: string | null, isInPlace: boolean): string {
  if (file !== null && isInPlace) {
    return `the master key is another one now: ${file} (keep a copy; backups from before need the one before)`;
  }
  if (file !== null) {
    return `the new master key must replace the one in ${file} before the next start; the one before opens nothing any more`;
  }
  return "the new master key must be TOLLGATE_MASTER_KEY at the next start; the one before opens nothing any more";
}

function alreadyText({ masterKeys, dataDir }: Config): string {
  const file = masterKeyFile(masterKeys, dataDir);
  const place = file === null ? "TOLLGATE_MASTER_KEY" : `the one in ${file}`;
  return `the keys are rotated to that master key already; nothing was done. It must replace ${place} before the next rotation`;
}
