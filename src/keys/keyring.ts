// The keyring of a process: opens the keys that are in the database, and keeps up with their changes. A master key wraps the
// keys of each tenant and the private halves of the signing keys; only this directory sees any of them in the clear.
import { hkdfSync } from "node:crypto";
import type { KeyPurpose } from "../../db/schema.ts";
import { attempt } from "../core/fault.ts";
import { type Log, silentLog } from "../core/log.ts";
import { type Clock, systemClock } from "../core/time.ts";
import { type Poll, poll } from "../kernel/loop.ts";
import { endsWithin } from "../kernel/wait.ts";
import type { WrappedKeys } from "../storage/inspect.ts";
import type { Membership } from "../storage/leases.ts";
import type { Reader, Store } from "../storage/store.ts";
import { unwrap } from "./envelope.ts";
import type { MasterKeys } from "./master-keys.ts";
import {
  createRevocations,
  loadSigningKeys,
  makeFirstSigningKeys,
  type SigningKey,
  signingKeyIdentity,
} from "./signing-keys.ts";
import { anotherMasterKey, enterHolder, isWrappedByOthers, type KeyringState, keysHeld, readState } from "./state.ts";
import { createTenantKeys, DEPLOYMENT, tenantKeyIdentity } from "./tenant-keys.ts";

const DERIVED_KEY_BYTES = 32;

export type Keyring = Awaited<ReturnType<typeof openKeyring>>;

/** @throws StartupProblem when keys in the database are wrapped with another master key */
export async function openKeyring(store: Store, masterKeys: MasterKeys, clock: Clock, log: Log = silentLog) {
  // Reads the key files again, one of which may be new.
  masterKeys.find("");
  if (await isWrappedByOthers(store.read, masterKeys.ids())) throw anotherMasterKey(masterKeys);
  await makeFirstSigningKeys(store, masterKeys, clock);
  const { version } = await readState(store.read);
  const tenants = createTenantKeys({ store, masterKeys, clock });
  const revocations = createRevocations(store.read.urgent);
  await revocations.catchUp();
  const seen = { version, signing: await loadSigningKeys(store.read, masterKeys, clock, null) };
  const missing = new Set<string>();
  let isComplete = true;
  let member: Membership | null = null;

  async function reload(state: KeyringState): Promise<void> {
    // `state` was read before the keys, so the keys are at least as new as its version.
    seen.signing = await loadSigningKeys(store.read.urgent, masterKeys, clock, seen.signing);
    tenants.forget();
    seen.version = state.version;
    log.info("keys_changed", { version: state.version, master_key_id: state.master_key_id });
  }

  /** Whether this process lacks a master key that wraps keys now or will soon. Each missing key is logged once. */
  function lacks(id: string | null): boolean {
    if (id === null || masterKeys.find(id) !== null) return false;
    if (!missing.has(id)) log.error("master_key_missing", { master_key_id: id });
    missing.add(id);
    return true;
  }

  async function refresh(): Promise<void> {
    const state = await readState(store.read.urgent);
    lacks(state.next_master_key_id);
    if (state.revoked_at > revocations.newest()) await revocations.catchUp();
    isComplete = !lacks(state.master_key_id);
    if (isComplete && state.version !== seen.version) await reload(state);
    member?.tell(keysHeld(masterKeys, seen.version));
  }

  const watch = createWatch(refresh, (error) => log.warn("keys_not_read", { error }));
  return {
    /** @param identity names the record that the secret belongs to, and is needed to open it */
    sealSecret: tenants.seal,
    /** @throws Error when the secret was sealed for another tenant or identity, or was altered */
    openSecret: tenants.open,
    /** Derives a key from the tenant's (null: the deployment's) first key, which no rotation changes, so that sessions survive. */
    async deriveKey(tenant: string | null, purpose: string): Promise<Buffer> {
      const key = await tenants.first(tenant ?? DEPLOYMENT);
      return Buffer.from(hkdfSync("sha256", key, "", `tollgate:${purpose}`, DERIVED_KEY_BYTES));
    },
    signingKey: (purpose: KeyPurpose): SigningKey => seen.signing.signingKey(purpose),
    /** Gives the same object as long as the keys don't change. */
    issuerJwks: () => seen.signing.issuerJwks(),
    publicJwks: () => seen.signing.publicJwks(),
    revocations,
    /** Whether it has the master key of now, which it may lack after a rotation: then it opens no secret and takes no requests. */
    isComplete: () => isComplete,
    isFresh: () => isComplete && watch.isFresh(),
    isUsable: () => isComplete && watch.isUsable(),
    refreshed: watch.refreshed,
    renewed: watch.renewed,
    /** From now on changes of others are in force here within about a second. @throws StartupProblem when it lacks the master key */
    async watch(membership: Membership): Promise<void> {
      await enterHolder(store, masterKeys, membership);
      member = membership;
      watch.start();
    },
    stop: watch.stop,
  };
}

/** Opens sealed secrets and creates no keys: for checks that change nothing. */
export function openSealed(read: Reader, masterKeys: MasterKeys): Pick<Keyring, "openSecret"> {
  const write = () => Promise.reject(new Error("a check changes nothing"));
  const store = { read: { ...read, urgent: read }, write };
  const { open } = createTenantKeys({ store, masterKeys, clock: systemClock });
  return {
    // Without the cause in its message: the doctor's check of the keys reports a wrong master key.
    openSecret: (...secret) =>
      open(...secret).catch((cause) => {
        throw new Error("the secret does not open", { cause });
      }),
  };
}

/** The identities of the keys that none of the master keys opens, since another one wraps them or they were altered. */
export function keysThatDoNotOpen(masterKeys: readonly Uint8Array[], keys: WrappedKeys): string[] {
  const wrapped = [
    ...keys.tenantKeys.map(
      ({ tenant, number, wrapped_key }) => [tenantKeyIdentity(tenant, number), wrapped_key] as const,
    ),
    ...keys.signingKeys.map((row) => [signingKeyIdentity(row.purpose, row.kid), row.wrapped_private_key] as const),
  ];
  const opens = (masterKey: Uint8Array, key: Uint8Array, identity: string) =>
    attempt(() => unwrap(masterKey, key, identity)) !== undefined;
  const closed = wrapped.filter(([identity, key]) => !masterKeys.some((each) => opens(each, key, identity)));
  return closed.map(([identity]) => identity);
}

const REFRESH_MS = 1_000;
const FRESH_MS = 2_000;
/** While the database is away for less than this, no request is refused: a request may take this long to get its 503. */
const USABLE_MS = 10_000;
/** The longest wait for a refresh: a request is answered within ten seconds, nine of which a write may take. */
const WAIT_MS_MAX = 500;

/**
 * Calls `refresh` about every second, to see what other processes have changed in the database. If the last one is older than two
 * seconds, callers wait for the next refresh. Nothing older than ten is used, since a token may have been revoked since. Of several
 * failures in a row only the first is told. @param now of a clock that never goes back
 */
export function createWatch(
  refresh: () => Promise<void>,
  failed: (error: unknown) => void,
  now: () => number = () => performance.now(),
) {
  let watching: Poll | null = null;
  let startedAt = Number.NEGATIVE_INFINITY;
  let seenAt = now();
  let isFailing = false;
  let inFlight: Promise<void> | null = null;
  let next: Promise<void> | null = null;

  async function refreshOnce(): Promise<void> {
    startedAt = now();
    try {
      await refresh();
      seenAt = startedAt;
      isFailing = false;
    } catch (error) {
      if (!isFailing) failed(error);
      isFailing = true;
    } finally {
      inFlight = null;
    }
  }

  function refreshNow(): Promise<void> {
    inFlight ??= refreshOnce();
    return inFlight;
  }

  /** Waits for a refresh that begins after this call; all callers share it. */
  function refreshAgain(): Promise<void> {
    next ??= (async () => {
      await inFlight;
      // At least 100 ms are between the starts of two refreshes.
      const pause = startedAt + 100 - now();
      if (pause > 0) await Bun.sleep(pause);
      next = null;
      await refreshNow();
    })();
    return next;
  }

  const isSeenWithin = (ms: number) => watching === null || now() - seenAt < ms;

  return {
    /** Always true in a process that does not watch. */
    isFresh: () => isSeenWithin(FRESH_MS),
    isUsable: () => isSeenWithin(USABLE_MS),
    /** Waits until the keys are fresh, for half a second at most. */
    async refreshed(): Promise<void> {
      if (isSeenWithin(FRESH_MS)) return;
      const refreshing = refreshNow();
      const left = isSeenWithin(USABLE_MS) ? startedAt + WAIT_MS_MAX - now() : WAIT_MS_MAX;
      if (left > 0) await endsWithin(left, refreshing);
    },
    async renewed(): Promise<void> {
      await endsWithin(WAIT_MS_MAX, refreshAgain());
    },
    start() {
      seenAt = now();
      watching = poll({ leastMs: REFRESH_MS, mostMs: REFRESH_MS }, () => refreshNow().then(() => false));
    },
    async stop(): Promise<void> {
      watching?.stop();
      await inFlight;
    },
  };
}
