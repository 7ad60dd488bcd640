// Rotates all keys while gateways run. If the command is killed at any point, the next one goes on from there: every step can be
// repeated, and at every moment the durable keys open every row.
//
//   announce   names the next master key in the database, when the key is durable; nothing is wrapped with it yet
//   activate   when every running gateway has the key: from now on it alone wraps new keys, first of all new signing keys
//   rewrap     wraps the keys under other master keys with the new one, in small writes, and gives each tenant a new key
//   reseal     wraps the data keys of secrets with the newest keys of their tenants
//   finish     when nothing is wrapped with another master key any more: only now the earlier master key is removed
import { and, asc, eq, isNotNull, isNull, lt, max, ne, sql } from "drizzle-orm";
import { PROCESS_LEASES } from "../storage/leases.ts";
import type { Store, StoreTools } from "../storage/store.ts";
import { newKey, resealDataKey, unwrap, wrap } from "./envelope.ts";
import type { MasterKeys } from "./master-keys.ts";
import { newSigningKeys, signingKeyIdentity, storeSigningKeys } from "./signing-keys.ts";
import { changeState, isWrappedByOthers, lackingHolders, lockState, readState, requireMasterKey } from "./state.ts";
import { createTenantKeys, DEPLOYMENT, tenantKeyIdentity } from "./tenant-keys.ts";

const GATEWAYS_MS_MAX = PROCESS_LEASES.gateway.leaseMs + 5_000;

interface NextMasterKey {
  /** Makes the next master key durable where the gateways find it. @returns the key's ID */
  stage(): string;
  /** Replaces the current master key with the next one. @returns false if the operator has to do so */
  promote(id: string): boolean;
}

export async function rotate(options: RotationOptions, next: NextMasterKey, gatewaysMs = GATEWAYS_MS_MAX) {
  const { store } = options;
  const { is_rotating, master_key_id } = await readState(store.read);
  if (is_rotating && master_key_id !== null) return resume(options, master_key_id, next, gatewaysMs);
  const id = next.stage();
  // An earlier run may not have been able to replace the old key in its file.
  if (id === master_key_id) return { outcome: "already" as const, isInPlace: next.promote(id) };
  await announce(store, id);
  const lacks = await gatewaysWithout(store, id, 0, gatewaysMs);
  const activation = lacks.length > 0 ? lacks : await activate(options, id);
  if (activation === "active") return resume(options, id, next, gatewaysMs);
  return activation === "superseded" ? { outcome: activation } : { outcome: "lacking" as const, lacks: activation };
}

/** Waits until every running gateway has the key and has read that version. Returns the gateways that have not after `ms`. */
async function gatewaysWithout(store: Store, id: string, version: number, ms: number): Promise<readonly string[]> {
  const until = performance.now() + ms;
  for (;;) {
    const lacks = await store.write((tx) => lackingHolders(tx, id, version));
    if (lacks.length === 0 || performance.now() > until) return lacks;
    await Bun.sleep(100);
  }
}

/** The rest of a rotation whose new master key is active. The counts are those of this run; earlier runs may have renewed others. */
async function resume(options: RotationOptions, id: string, next: NextMasterKey, waitMs: number) {
  const { store } = options;
  let [tenantKeys, secrets] = [0, 0];
  do {
    await rewrapSigningKeys(options, id);
    tenantKeys += await inPausedSteps("", (after) => rewrapSomeTenantKeys(options, id, after));
  } while (await isWrappedByOthers(store.read, [id]));
  // Makes the gateways read the tenants' new keys. A gateway that does not will seal with older keys, which open as well.
  const { version } = await store.write(async (tx) => changeState(tx, await lockState(tx), {}));
  await gatewaysWithout(store, id, version, waitMs);
  for (let changed = -1; changed !== 0; secrets += changed) {
    const keys = createTenantKeys(options);
    changed = await inPausedSteps({ tenant: "", id: "" }, (after) => resealSome(options, keys, after));
  }
  const isInPlace = next.promote(id);
  await finish(store, id);
  return { outcome: "done" as const, isInPlace, tenantKeys, secrets };
}

/** Keys that are wrapped in one write, with the new keys of their tenants: 2 to 17 ms of SQLite on a busy machine (measured). */
const KEYS_AT_ONCE = 20;
/** Secrets that are resealed in one write; each has up to 64 KiB. */
const SECRETS_AT_ONCE = 16;

interface RotationOptions extends Pick<StoreTools, "store" | "clock"> {
  readonly masterKeys: MasterKeys;
  readonly secretIdentity: (tenant: string, id: string, version: number) => string;
}

/** Names the next master key in the database, in place of another one that was announced but not activated. */
async function announce(store: Store, id: string): Promise<void> {
  await store.write(async (tx) => {
    const state = await lockState(tx);
    const isKnown = state.is_rotating || state.next_master_key_id === id;
    if (!isKnown) await changeState(tx, state, { next_master_key_id: id });
  });
}

/** From the commit on, every new key is wrapped with the announced master key. @returns the gateways that lack it, where any do */
async function activate({ store, masterKeys, clock }: RotationOptions, id: string) {
  const made = await newSigningKeys();
  return store.write(async (tx): Promise<"active" | "superseded" | readonly string[]> => {
    const state = await lockState(tx);
    if (state.master_key_id === id) return "active";
    if (state.is_rotating || state.next_master_key_id !== id) return "superseded";
    // A gateway that starts later enters under the same lock, and finds the new key active.
    const lacks = await lackingHolders(tx, id, 0);
    if (lacks.length > 0) return lacks;
    await changeState(tx, state, { master_key_id: id, next_master_key_id: null, is_rotating: true });
    const { signingKeys: t } = tx.tables;
    const now = clock.now();
    await tx.db.update(t).set({ retired_at: now }).where(isNull(t.retired_at));
    await storeSigningKeys(tx, made, masterKeys, id, now);
    return "active";
  });
}

/** How many rows one step along a table has changed, and where the next step begins; null at the end. */
type RotationStep<A> = Readonly<{ count: number; last: A | null }>;

/** Repeats a step to the end of its table, with a pause as long as the step after each. @returns how many rows were changed */
async function inPausedSteps<A>(first: A, step: (after: A) => Promise<RotationStep<A>>): Promise<number> {
  let changed = 0;
  for (let after: A | null = first; after !== null; ) {
    const startedAt = performance.now();
    const { count, last }: RotationStep<A> = await step(after);
    changed += count;
    after = last;
    await Bun.sleep(performance.now() - startedAt);
  }
  return changed;
}

/** Wraps all signing keys in one write. Retired ones are included, but each rotation adds only two, so they stay few. */
async function rewrapSigningKeys({ store, masterKeys }: RotationOptions, id: string): Promise<void> {
  const masterKey = requireMasterKey(masterKeys, id);
  await store.write(async ({ db, tables: { signingKeys: t } }) => {
    for (const row of await db.select().from(t).where(ne(t.master_key_id, id))) {
      const identity = signingKeyIdentity(row.purpose, row.kid);
      const key = unwrap(requireMasterKey(masterKeys, row.master_key_id), row.wrapped_private_key, identity);
      const set = { wrapped_private_key: wrap(masterKey, key, identity), master_key_id: id };
      await db.update(t).set(set).where(eq(t.kid, row.kid));
    }
  });
}

/** One step, from the tenant `from` on. If it ends in the middle of a tenant's rows, the next step does the others. */
async function rewrapSomeTenantKeys(options: RotationOptions, id: string, from: string): Promise<RotationStep<string>> {
  const { store, masterKeys, clock } = options;
  const masterKey = requireMasterKey(masterKeys, id);
  const { tenantKeys } = store.read.tables;
  const rows = await store.read.db
    .select()
    .from(tenantKeys)
    .where(and(ne(tenantKeys.master_key_id, id), sql`${tenantKeys.tenant} >= ${from}`))
    .orderBy(asc(tenantKeys.tenant), asc(tenantKeys.number))
    .limit(KEYS_AT_ONCE);
  const rewrapped = rows.map(({ tenant, number, wrapped_key, master_key_id }) => {
    const identity = tenantKeyIdentity(tenant, number);
    const key = unwrap(requireMasterKey(masterKeys, master_key_id), wrapped_key, identity);
    return { tenant, number, master_key_id, wrapped_key: wrap(masterKey, key, identity) };
  });
  const changed = await store.write(async (tx) => {
    const { tenantKeys: t } = tx.tables;
    let count = 0;
    for (const { tenant, number, master_key_id, wrapped_key } of rewrapped) {
      const unchanged = and(eq(t.tenant, tenant), eq(t.number, number), eq(t.master_key_id, master_key_id));
      const set = { wrapped_key, master_key_id: id };
      const changed = await tx.db.update(t).set(set).where(unchanged).returning({ number: t.number });
      // Another run has wrapped this key, and has given the tenant a new one.
      if (changed.length === 0) continue;
      const [newest] = await tx.db
        .select({ number: max(t.number) })
        .from(t)
        .where(eq(t.tenant, tenant));
      if (newest?.number !== number || tenant === DEPLOYMENT) continue;
      count += 1;
      const wrapped = wrap(masterKey, newKey(), tenantKeyIdentity(tenant, number + 1));
      const next = { tenant, number: number + 1, wrapped_key: wrapped, master_key_id: id, created_at: clock.now() };
      await tx.db.insert(t).values(next);
    }
    return count;
  });
  return { count: changed, last: rows.length < KEYS_AT_ONCE ? null : (rows.at(-1)?.tenant ?? null) };
}

/** Wraps the data keys of secrets with the newest keys of their tenants. The secrets stay as they are. */
async function resealSome(
  { store, secretIdentity }: RotationOptions,
  keys: ReturnType<typeof createTenantKeys>,
  after: { readonly tenant: string; readonly id: string },
) {
  const { credentials: c, tenantKeys: k } = store.read.tables;
  const newest = store.read.db
    .select({ number: max(k.number) })
    .from(k)
    .where(eq(k.tenant, c.tenant));
  const isAfter = sql`(${c.tenant}, ${c.id}) > (${after.tenant}, ${after.id})`;
  const rows = await store.read.db
    .select({ tenant: c.tenant, id: c.id, version: c.version, sealed: c.sealed, key_number: c.key_number })
    .from(c)
    .where(and(isNotNull(c.sealed), isAfter, lt(c.key_number, sql`(${newest})`)))
    .orderBy(asc(c.tenant), asc(c.id))
    .limit(SECRETS_AT_ONCE);
  const resealed = await Promise.all(
    rows.map(async ({ tenant, id, version, sealed, key_number }) => {
      const number = await keys.newest(tenant);
      const [old, next] = [await keys.numbered(tenant, key_number), await keys.numbered(tenant, number)];
      const identity = secretIdentity(tenant, id, version);
      const changed = resealDataKey(old, next, sealed ?? Buffer.alloc(0), identity);
      return { tenant, id, version, key_number, set: { sealed: changed, key_number: number } };
    }),
  );
  const count = await store.write(async ({ db, tables: { credentials: t } }) => {
    let changes = 0;
    for (const { tenant, id, version, key_number, set } of resealed) {
      // A secret that was replaced meanwhile is under the newest key already, or the next pass finds it.
      const same = and(eq(t.tenant, tenant), eq(t.id, id), eq(t.version, version), eq(t.key_number, key_number));
      changes += (await db.update(t).set(set).where(same).returning({ id: t.id })).length;
    }
    return changes;
  });
  return { count, last: rows.length < SECRETS_AT_ONCE ? null : (rows.at(-1) ?? null) };
}

async function finish(store: Store, id: string): Promise<void> {
  await store.write(async (tx) => {
    const state = await lockState(tx);
    if (state.is_rotating && state.master_key_id === id) await changeState(tx, state, { is_rotating: false });
  });
}
