// Makes trust receipts and serves them to the API. The write that ends a call also records that a receipt is due
// (invocations/commands/end.ts), so a crash before the receipt is made loses none. A batch is signed outside of any
// write, each receipt with the hash of the one before it, and is stored only if the chain still ends where the batch
// begins. One replica, by lease, makes the receipts for all, but one that is requested is made at once.
import { CompactSign } from "jose";
import type { Caller } from "../../core/call.ts";
import { Fault, noSuch } from "../../core/fault.ts";
import { isId, newId } from "../../core/id.ts";
import { isEnded } from "../../core/states.ts";
import type { Clock } from "../../core/time.ts";
import { type Poll, poll } from "../../kernel/loop.ts";
import { SIGNING_ALGORITHM, type SigningKey } from "../../keys/signing-keys.ts";
import { within } from "../../storage/failures.ts";
import { steadyJobLease } from "../../storage/leases.ts";
import type { Store, StoreTools } from "../../storage/store.ts";
import { findAgent } from "../agents/store.ts";
import { type InvocationRow, invocationByKey } from "../invocations/service.ts";
import { claimsOf, linkOf, RECEIPT_TYPE } from "./claims.ts";
import type { ChainHead, ReceiptRow } from "./store.ts";
import { append, chainHeadOf, findReceipt, isDue, receiptPage, receiptsDueOf, tenantsDue } from "./store.ts";

const DUE_WAIT_MS_MAX = 5_000;
const STOP_MS_MAX = 5_000;

export function createReceipts(options: EmitterOptions) {
  const { store } = options;
  const emitter = createReceiptEmitter(options);
  // A receipt that can't be made in time stays due.
  const makeDue = (tenant: string) => within(DUE_WAIT_MS_MAX, emitter.makeDue(tenant)).catch(() => {});
  const confirmed = (tenant: string, id: string | null) =>
    within(DUE_WAIT_MS_MAX, options.confirm(tenant, id)).catch(() => id !== null);

  return {
    start: emitter.start,
    /** @throws Fault `not_found`; `unavailable` when the receipt is due but not made yet */
    async find({ tenant }: Caller, id: string): Promise<string> {
      const isOwed = isId("inv", id) && ((await isDue(store.read, tenant, id)) || (await confirmed(tenant, id)));
      if (isOwed) await makeDue(tenant);
      const receipt = isId("inv", id) ? await findReceipt(store.read, { tenant, id }) : null;
      if (receipt !== null) return receipt.jws;
      if (!isOwed) throw await whyNone(store, tenant, id);
      throw new Fault("unavailable", "the receipt is not made yet; retry", { retryAfterSeconds: 1 });
    },
    /** Oldest first. */
    async page({ tenant }: Caller, page: { readonly limit: number; readonly offset: number }) {
      await confirmed(tenant, null);
      await makeDue(tenant);
      return receiptPage(store.read, tenant, page);
    },
    /** Makes the last due receipts. To be called after the last invocation has ended and before the store is closed. */
    async stop() {
      await within(STOP_MS_MAX, emitter.stop(STOP_MS_MAX)).catch(() => {});
    },
  };
}

async function whyNone(store: Store, tenant: string, id: string): Promise<Fault> {
  const call = isId("inv", id) ? await invocationByKey(store.read, { tenant, id }) : null;
  if (call === null) return noSuch("inv", id);
  const agent = await findAgent(store, tenant, call.agent_id);
  const atAcceptance = isEnded(call.status) ? "was off when the call was accepted" : "counts once the call has ended";
  const state = agent?.emit_receipts === false ? "is off" : atAcceptance;
  return new Fault("not_found", `no receipt for this invocation: emit_receipts of its agent ${state}`);
}

export type Receipts = ReturnType<typeof createReceipts>;

/** The pause between rounds: after the end of a call in this process, and otherwise (calls of other replicas, store failures). */
const [ROUND_MS, ROUND_MS_MAX] = [250, 2_000];
/** Receipts of one tenant in one write. */
const RECEIPTS_AT_ONCE = 64;
const TENANTS_AT_ONCE = 16;

interface EmitterOptions extends StoreTools {
  readonly replica: string;
  /** Confirms payments of ended calls whose receipts wait for it. False when there is no such payment. */
  confirm(tenant: string, invocationId: string | null): Promise<boolean>;
  /** The current signing key, which changes with a rotation. */
  signingKey(): SigningKey;
}

function createReceiptEmitter(options: EmitterOptions) {
  const { store, log, replica } = options;
  // A replica that has not renewed its lease for nine seconds loses the work to another one.
  const lease = steadyJobLease(store, "receipts", 9_000, replica);
  const batches = new Map<string, Promise<boolean>>();
  /** Rounds end at this time of the monotonic clock. */
  let until = Number.POSITIVE_INFINITY;
  let poller: Poll | undefined;
  let round: Promise<boolean> = Promise.resolve(false);

  /** Makes one batch of a tenant; false when nothing was due. Concurrent calls share it, since two batches would conflict. */
  function emitBatch(tenant: string): Promise<boolean> {
    const inFlight = batches.get(tenant);
    if (inFlight !== undefined) return inFlight;
    const own = emitSome(options, tenant).finally(() => batches.delete(tenant));
    batches.set(tenant, own);
    return own;
  }

  /** The next tenants with due receipts; none while another replica has the lease. */
  async function nextTenantsDue(after: string): Promise<string[]> {
    const tenants = await tenantsDue(store.read, after, TENANTS_AT_ONCE);
    return tenants.length === 0 || (await lease.isMine()) ? tenants : [];
  }

  /** Makes all due receipts, a batch per tenant and pass, so that no tenant holds up others. False if none was made. */
  async function emitAll(): Promise<boolean> {
    let isAny = false;
    for (let busy = true, after = ""; busy || after !== ""; ) {
      if (after === "") busy = false;
      const tenants = await nextTenantsDue(after);
      const made = await Promise.all(tenants.map((tenant) => emitBatch(tenant).catch(delayed)));
      busy ||= made.includes(true);
      isAny ||= made.includes(true);
      after = tenants.length < TENANTS_AT_ONCE ? "" : (tenants.at(-1) ?? "");
      if (performance.now() > until) break;
    }
    return isAny;
  }

  /** False when there was nothing to do, or the store failed. */
  function startRound(): Promise<boolean> {
    round = emitAll().catch(delayed);
    return round;
  }

  function delayed(error: unknown): false {
    log.warn("receipts_delayed", { error });
    return false;
  }

  return {
    /** Resolves when all receipts are made that were due for the tenant at the time of the call. */
    async makeDue(tenant: string) {
      // A batch in flight may have read the due receipts too early, so wait for it and start another.
      await batches.get(tenant);
      while (await emitBatch(tenant));
    },
    start() {
      poller = poll({ leastMs: ROUND_MS, mostMs: ROUND_MS_MAX }, startRound);
      store.onCallEnded(poller.soon);
    },
    /** Makes due receipts for at most `ms`, then stops. The rest stay due. */
    async stop(ms: number) {
      until = performance.now() + ms;
      poller?.stop();
      await round;
      await startRound();
      await lease.end();
    },
  };
}

async function emitSome({ store, clock, signingKey }: EmitterOptions, tenant: string): Promise<boolean> {
  // Read the head first: if it is still the head at the write, no other replica has made these receipts meanwhile.
  const after = await chainHeadOf(store.read, { tenant });
  const rows = await receiptsDueOf(store.read, tenant, RECEIPTS_AT_ONCE);
  if (rows.length === 0) return false;
  const receipts = await signAll(rows, after, signingKey(), clock);
  await store.write((tx) => append(tx, tenant, after, receipts));
  return true;
}

async function signAll(rows: readonly InvocationRow[], after: ChainHead, key: SigningKey, clock: Clock) {
  let sequence = after?.sequence ?? 0;
  let previous = after?.sha256 ?? null;
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
  return new CompactSign(Buffer.from(JSON.stringify(claims)))
    .setProtectedHeader({ alg: SIGNING_ALGORITHM, kid, typ: RECEIPT_TYPE })
    .sign(privateKey);
}
