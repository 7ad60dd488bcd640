// Schedules the attempts to settle recorded payments: one before the call is answered, then retries in the background until
// the outcome is certain. The database holds the open payments, and each attempt leases its payment, so that after a crash
// it is retried, here or on another replica. attempt.ts makes one attempt.
import { MAX } from "../../kernel/limits.ts";
import { type Poll, poll } from "../../kernel/loop.ts";
import { createFairShare, type FairShare } from "../../kernel/share.ts";
import { endsWithin, outlastRequest } from "../../kernel/wait.ts";
import { type AttemptOptions, attemptSettlement, paymentLogFields } from "./attempt.ts";
import { PAUSE_MS_MAX } from "./outcome.ts";
import type { RestoreGuard } from "./restored.ts";
import {
  confirmingOf,
  dueOf,
  facilitatorNameOf,
  facilitatorsWithOpen,
  isConfirming,
  leaseUnlessOver,
  makeDue,
  type OpenFacilitator,
  type OpenPayment,
  postpone,
  tenantsWithOpen,
} from "./store.ts";

export interface SettlerOptions extends AttemptOptions {
  /** The longest that one attempt may take. */
  readonly settleWaitMs: number;
  readonly guard: RestoreGuard;
}

export function createSettler(options: SettlerOptions) {
  const { store, clock, log, settleWaitMs } = options;
  const flights = new Map<string, Promise<void>>();
  const limits = createSettlementLimits();
  const stopped = new AbortController();
  let stopping = false;
  let polling: Poll | undefined;

  /** When the lease of an attempt that begins now runs out: five seconds after its time limit, to record the outcome. */
  const leaseUntil = () => clock.now() + settleWaitMs + 5_000;
  const isOver = () => stopping;
  const retryDue = createDueSearch(options, { limits, retry, isOver, leaseUntil });

  function attempt(open: OpenPayment): Promise<void> {
    const slot = limits.enter(open.tenant);
    const flight = outlastRequest(() => attemptSettlement(options, open, stopped.signal))
      .then((wasHeard) => limits.learn(facilitatorNameOf(open), wasHeard))
      .catch((error) => log.error("settlement_left_open", { ...paymentLogFields(open), error }))
      .finally(() => {
        flights.delete(open.invocation_id);
        slot.release();
        polling?.soon();
      });
    flights.set(open.invocation_id, flight);
    return flight;
  }

  /** Resolves when the payment is leased, while its attempt goes on, or when it has no slot or is not to be tried now. */
  async function retry(seen: OpenPayment): Promise<void> {
    if (stopping || flights.has(seen.invocation_id) || (await postponeRestored(options, seen))) return;
    const slot = limits.take(seen.tenant, facilitatorNameOf(seen));
    if (slot === null) return;
    let attempting = Promise.resolve();
    try {
      const leased = await store.write((tx) => leaseUnlessOver(tx, seen, clock.now(), leaseUntil()));
      if (leased !== null) attempting = attempt(leased);
    } finally {
      void attempting.then(slot.release);
    }
  }

  const pollOnce = () =>
    retryDue().catch((error): false => {
      log.warn("open_settlements_not_read", { error });
      return false;
    });

  return {
    /** Aborted when callers must stop waiting for attempts in flight. */
    stopped: stopped.signal,
    leaseUntil,
    /** The first attempt, right after the payment was recorded. Resolves when its outcome is recorded; never rejects. */
    attempt,
    isCrowded: limits.isCrowded,
    inUse: limits.inUse,
    inFlight: (invocationId: string) => flights.get(invocationId),
    /**
     * Confirms collected payments of ended calls whose receipts wait for that: some of the tenant's, or that of one call.
     * Resolves when each has been tried, with whether there were any.
     */
    async confirm(tenant: string, invocationId: string | null): Promise<boolean> {
      const confirming = await confirmingOf(store.read, tenant, invocationId, MAX.confirmationsAtOnce);
      await Promise.all(confirming.map((seen) => retry(seen).then(() => flights.get(seen.invocation_id))));
      return confirming.length > 0;
    },
    /** Call this before any payment is accepted: on SQLite the attempts of the previous process have ended, so they are due. */
    async recover() {
      if (!store.isShared) await makeDue(store, clock.now(), clock.now());
    },
    start() {
      // Payments that another process left become due without notice, so the database is polled.
      polling = poll({ leastMs: 250, mostMs: 2_000 }, pollOnce);
    },
    /** Starts nothing more, gives attempts `ms` to end, then aborts them. Their payments stay open. */
    async stop(ms: number) {
      stopping = true;
      polling?.stop();
      // Not earlier, even if nothing is in flight: callers that waited are still reading the outcome.
      setTimeout(() => stopped.abort(), ms).unref();
      await endsWithin(ms + 5_000, ended(flights));
    },
  };
}

export type Settler = ReturnType<typeof createSettler>;

async function ended(flights: ReadonlyMap<string, Promise<void>>): Promise<void> {
  while (flights.size > 0) await Promise.all(flights.values());
}

/**
 * Postpones a payment from before a restore: its call has ended, and the payment may have been sent. The facilitator is
 * asked for the outcome only after the expiry, when it can't collect the payment any more.
 */
async function postponeRestored({ store, clock, guard }: SettlerOptions, seen: OpenPayment): Promise<boolean> {
  const now = clock.now();
  // The chain's time may be behind ours.
  const end = seen.valid_before * 1000 + 10_000;
  if (isConfirming(seen) || !guard.mayBeOlder(seen.valid_before) || now > end) return false;
  const at = Math.min(end, now + PAUSE_MS_MAX);
  await store.write((tx) => postpone(tx, seen, { at, now, outcome: "unknown" }));
  return true;
}

interface DueSearch {
  readonly limits: ReturnType<typeof createSettlementLimits>;
  retry(seen: OpenPayment): Promise<void>;
  isOver(): boolean;
  leaseUntil(): number;
}

/** Of two tenants, whether `a` comes first when they are served by name, from the one after `last` on. */
const isNext = (a: string, b: string, last: string): boolean => (a > last === b > last ? a < b : a > last);

/** Finds due payments, round-robin: tenant by tenant, and those of a tenant facilitator by facilitator. */
function createDueSearch({ store, clock }: SettlerOptions, { limits, retry, isOver, leaseUntil }: DueSearch) {
  let lastTenant = "";
  /** By tenant: the facilitator at which the last look for due payments stopped, if that was before the end. */
  const lastFacilitators = new Map<string, string>();
  /** By facilitator whose slots are all taken: whose turn it was there, and who is next. Tenants elsewhere change nothing of that. */
  const turns = new Map<string, { last: string; next: OpenFacilitator | null; search: number }>();
  let search = 0;
  let repairedAt = Number.NEGATIVE_INFINITY;

  function noteTurn(at: OpenFacilitator): void {
    const turn = turns.getOrInsertComputed(at.facilitator, () => ({ last: "", next: null, search }));
    turn.search = search;
    if (turn.next === null || isNext(at.tenant, turn.next.tenant, turn.last)) turn.next = at;
  }

  /** Gives the facilitator's free slots to the tenant who is next there. */
  async function takeTurn(facilitator: string, now: number): Promise<void> {
    const turn = turns.get(facilitator);
    if (!turn?.next || limits.isFullAt(facilitator)) return;
    const { next } = turn;
    turn.last = next.tenant;
    turn.next = null;
    await retryAt(next, now);
  }

  /** Forgets the facilitators for which this search, which has seen all tenants, has found nobody who waits. */
  function forgetTurns(): void {
    for (const [facilitator, turn] of turns) if (turn.search !== search) turns.delete(facilitator);
  }

  async function retryAt(at: OpenFacilitator, now: number): Promise<void> {
    const room = Math.min(limits.ofTenant(at.tenant), MAX.facilitatorAttempts);
    await Promise.all((await dueOf(store.read, at, now, room)).map(retry));
  }

  async function retryOf(tenant: string, found: readonly OpenFacilitator[], now: number): Promise<void> {
    for (const at of found) {
      if (isOver() || limits.ofTenant(tenant) === 0) return;
      lastFacilitators.set(tenant, at.facilitator);
      if ((at.due_at ?? 0) > now) continue;
      await takeTurn(at.facilitator, now);
      // Payments that wait for a slot at one facilitator hold up none at another.
      if (limits.isFullAt(at.facilitator)) noteTurn(at);
      else await retryAt(at, now);
    }
    if (found.length < MAX.backgroundAttempts) lastFacilitators.delete(tenant);
  }

  /** Makes payments due whose next attempt is later than any lease or backoff allows, as after the clock was set back. */
  async function repair(found: readonly OpenFacilitator[], now: number): Promise<void> {
    const after = Math.max(leaseUntil(), now + PAUSE_MS_MAX) + 5_000;
    for (const at of found) await makeDue(store, now, after, at);
  }

  /** Starts attempts for due payments. Returns in how many milliseconds the next one is due; infinity when none is open. */
  return async (): Promise<number> => {
    const now = clock.now();
    const isRepair = performance.now() - repairedAt > 10_000;
    if (isRepair) repairedAt = performance.now();
    search++;
    let next = Number.POSITIVE_INFINITY;
    for await (const { tenant } of tenantsWithOpen(store.read, lastTenant)) {
      if (isOver() || limits.full()) return 0;
      lastTenant = tenant;
      const last = lastFacilitators.get(tenant) ?? "";
      const found = await facilitatorsWithOpen(store.read, tenant, last, MAX.backgroundAttempts);
      next = Math.min(next, ...found.map(({ due_at }) => Math.max((due_at ?? 0) - now, 0)));
      if (isRepair) await repair(found, now);
      await retryOf(tenant, found, now);
    }
    if (next === Number.POSITIVE_INFINITY) lastFacilitators.clear();
    forgetTurns();
    return next;
  };
}

// Limits of settlements in flight, shared fairly by tenant: in all, in the background, and in the background per facilitator.
// A facilitator whose last attempt timed out gets few slots, so that it can't hold up the others.

export function createSettlementLimits() {
  const inFlight = createFairShare({ size: MAX.firstAttempts });
  const background = createFairShare({ size: MAX.backgroundAttempts });
  /** Slots per facilitator: many tenants share one, and no tenant's payments may keep the others' out. */
  const byFacilitator = new Map<string, FairShare>();
  const troubled = new Set<string>();

  function isFullAt(facilitator: string): boolean {
    const free = byFacilitator.get(facilitator)?.free ?? MAX.facilitatorAttempts;
    const most = troubled.has(facilitator) ? MAX.troubledAttempts : MAX.facilitatorAttempts;
    return MAX.facilitatorAttempts - free >= most;
  }

  function takeAt(facilitator: string, tenant: string): FairShare | null {
    const slots = byFacilitator.get(facilitator) ?? createFairShare({ size: MAX.facilitatorAttempts });
    if (isFullAt(facilitator) || slots.take(tenant) !== null) return null;
    byFacilitator.set(facilitator, slots);
    return slots;
  }

  return {
    /** Counts a settlement of the tenant, whether in the background or not. */
    enter(tenant: string) {
      // An accepted payment is attempted even when the limit is reached.
      const isCounted = inFlight.take(tenant) === null;
      return { release: () => isCounted && inFlight.giveBack(tenant) };
    },
    /** Whether the tenant has reached its limit of settlements in flight. */
    isCrowded: (tenant: string) => inFlight.roomOf(tenant) === 0,
    full: () => background.free === 0,
    isFullAt,
    /** Slots in use, by the names in kernel/limits.ts. */
    inUse: () => ({ firstAttempts: inFlight.inUse, backgroundAttempts: background.inUse }),
    /** Background slots that the tenant may still take. */
    ofTenant: (tenant: string) => background.roomOf(tenant),
    /** Takes a background slot, at the facilitator too; null when there is none. */
    take(tenant: string, facilitator: string): { release(): void } | null {
      const slots = takeAt(facilitator, tenant);
      if (slots === null) return null;
      const giveBack = () => {
        slots.giveBack(tenant);
        if (slots.free === MAX.facilitatorAttempts) byFacilitator.delete(facilitator);
      };
      if (background.take(tenant) !== null) {
        giveBack();
        return null;
      }
      return {
        release() {
          background.giveBack(tenant);
          giveBack();
        },
      };
    },
    /** Notes whether the facilitator answered in time; null leaves what is known. */
    learn(facilitator: string, wasHeard: boolean | null) {
      if (wasHeard === null) return;
      troubled.delete(facilitator);
      if (wasHeard) return;
      troubled.add(facilitator);
      const [oldest] = troubled;
      if (troubled.size > MAX.troubledFacilitators && oldest !== undefined) troubled.delete(oldest);
    },
  };
}
