// Makes the receipts that are owed. The database holds the debts, so a crash between an end and its receipt loses
// none. A batch is signed outside of any write, each receipt naming the one before it. It is stored only if the chain
// still ends where the batch begins. Of several replicas one makes them all, so that they don't sign the same ones in vain;
// another one only does when it is asked for a receipt that is not made yet.

import { CompactSign } from "jose";
import { type Poll, poll } from "../../concurrency/poll.ts";
import type { Clock } from "../../core/clock.ts";
import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { SIGNING_ALGORITHM, type SigningKey } from "../../keys/signing-keys.ts";
import { steadyJobLease } from "../../storage/leases.ts";
import type { Store } from "../../storage/store.ts";
import type { InvocationRow } from "../invocations/service.ts";
import { claimsOf, linkOf, RECEIPT_TYPE } from "./claims.ts";
import { append, type ChainHead, dueOf, headOf, type ReceiptRow, tenantsDue } from "./store.ts";

/** After the end of a call in this process; and for what another one owes, or while the store is away. */
const [LOOK_MS, LOOK_MS_MOST] = [250, 2_000];
/** Receipts of one tenant in one write. */
const RECEIPTS_AT_ONCE = 64;
/** So long after it was last heard of another replica takes the work over from the one that makes them. */
const LEASE_MS = 9_000;
/** Tenants whose receipts are made in parallel. */
const TENANTS_AT_ONCE = 16;

const BEFORE_THE_FIRST: { sequence: number; sha256: string | null } = { sequence: 0, sha256: null };

const encoder = new TextEncoder();

export interface EmitterOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This process's ID. */
  readonly replica: string;
  /** The current key, which changes with a rotation. */
  signingKey(): SigningKey;
}

export function createReceiptEmitter(options: EmitterOptions) {
  const { store, log, replica } = options;
  const lease = steadyJobLease(store, "receipts", LEASE_MS, replica);
  /** Under way, by tenant. */
  const batches = new Map<string, Promise<boolean>>();
  /** No round goes on after this time of the monotonic clock. */
  let until = Number.POSITIVE_INFINITY;
  let looking: Poll | undefined;
  let round: Promise<boolean> = Promise.resolve(false);

  /** One batch of a tenant; false when nothing was owed. Two at a time would only undo each other's work. */
  function emitBatch(tenant: string): Promise<boolean> {
    const known = batches.get(tenant);
    if (known !== undefined) return known;
    const begun = emitSome(options, tenant).finally(() => batches.delete(tenant));
    batches.set(tenant, begun);
    return begun;
  }

  /** None while another replica has the lease. */
  async function ownDue(after: string): Promise<string[]> {
    const tenants = await tenantsDue(store.read, after, TENANTS_AT_ONCE);
    return tenants.length === 0 || (await lease.isMine()) ? tenants : [];
  }

  /**
   * One batch per tenant and round, so that a tenant with many owed receipts does not hold up the others. False when
   * nothing was owed, or another replica has the lease.
   */
  async function emitAll(): Promise<boolean> {
    let isAny = false;
    for (let busy = true, after = ""; busy || after !== ""; ) {
      if (after === "") busy = false;
      const tenants = await ownDue(after);
      const made = await Promise.all(tenants.map((tenant) => emitBatch(tenant).catch(delayed)));
      busy ||= made.includes(true);
      isAny ||= made.includes(true);
      after = tenants.length < TENANTS_AT_ONCE ? "" : (tenants.at(-1) ?? "");
      if (performance.now() > until) break;
    }
    return isAny;
  }

  /** False when there was nothing to do, or the store is away. */
  function startRound(): Promise<boolean> {
    round = emitAll().catch(delayed);
    return round;
  }

  function delayed(error: unknown): false {
    log.warn("receipts_delayed", { error });
    return false;
  }

  return {
    /** Resolves when all receipts are made that the tenant was owed when this was called. */
    async settle(tenant: string) {
      // A batch under way may have read the owed receipts too early, so wait for it and start another.
      await batches.get(tenant);
      while (await emitBatch(tenant));
    },
    start() {
      looking = poll({ leastMs: LOOK_MS, mostMs: LOOK_MS_MOST }, startRound);
      store.onCallEnded(looking.soon);
    },
    /** Makes owed receipts for at most `ms`, then ends. The rest stays owed. */
    async stop(ms: number) {
      until = performance.now() + ms;
      looking?.stop();
      await round;
      await startRound();
      await lease.end();
    },
  };
}

async function emitSome({ store, clock, signingKey }: EmitterOptions, tenant: string): Promise<boolean> {
  // Read the head first: if it is still the head at the write, no other replica has made these receipts.
  const after = await headOf(store.read, tenant);
  const rows = await dueOf(store.read, tenant, RECEIPTS_AT_ONCE);
  if (rows.length === 0) return false;
  const receipts = await signAll(rows, after, signingKey(), clock);
  await store.write((tx) => append(tx, { tenant, after, receipts }));
  return true;
}

async function signAll(rows: readonly InvocationRow[], after: ChainHead, key: SigningKey, clock: Clock) {
  let { sequence, sha256: previous } = after ?? BEFORE_THE_FIRST;
  const receipts: ReceiptRow[] = [];
  for (const row of rows) {
    const id = newId("rcpt", clock.now());
    const jws = await sign(claimsOf(row, id, previous), key);
    previous = linkOf(jws);
    sequence += 1;
    receipts.push({ tenant: row.tenant, sequence, id, invocation_id: row.id, jws });
  }
  return receipts;
}

function sign(claims: object, { kid, privateKey }: SigningKey): Promise<string> {
  return new CompactSign(encoder.encode(JSON.stringify(claims)))
    .setProtectedHeader({ alg: SIGNING_ALGORITHM, kid, typ: RECEIPT_TYPE })
    .sign(privateKey);
}
