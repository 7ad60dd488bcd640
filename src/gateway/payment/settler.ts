// Decides when a recorded payment is attempted: once before its call is answered, and while the outcome is unknown,
// again in the background until it is certain. The database holds the open payments. Each attempt leases its payment,
// so that after a crash it is tried again, here or on another replica.

import { MAX } from "../../kernel/limits.ts";
import { type Poll, poll } from "../../kernel/loop.ts";
import { createFairShare, type FairShare } from "../../kernel/share.ts";
import { endsWithin } from "../../kernel/wait.ts";
import { type AttemptOptions, attemptSettlement, shown } from "./attempt.ts";
import { PAUSE_MS_MOST } from "./outcome.ts";
import type { RestoreGuard } from "./restored.ts";
import {
  confirmingOf,
  dueOf,
  isConfirming,
  leaseUnlessOver,
  makeDue,
  type OpenPayment,
  postpone,
  tenantsWithOpen,
} from "./store.ts";

export interface SettlerOptions extends AttemptOptions {
  /** One attempt, at most. */
  readonly settleWaitMs: number;
  readonly guard: RestoreGuard;
}

export function createSettler(options: SettlerOptions) {
  const { store, clock, log, settleWaitMs } = options;
  const flights = new Map<string, Promise<void>>();
  const limits = createSettlementLimits();
  const stopped = new AbortController();
  let stopping = false;
  let looking: Poll | undefined;
  let lastTenant = "";

  /** When the lease of an attempt that begins now runs out; five seconds are for recording its outcome. */
  const leaseUntil = () => clock.now() + settleWaitMs + 5_000;
  const searchFarOff = createFarOffSearch(options, leaseUntil);

  function attempt(open: OpenPayment): Promise<void> {
    const startedAt = performance.now();
    const slot = limits.enter(open.tenant);
    const flight = attemptSettlement(options, open, stopped.signal)
      .catch((error) => log.error("settlement_left_open", { ...shown(open), error }))
      .finally(() => {
        flights.delete(open.invocation_id);
        slot.release();
        limits.learn(open.facilitator_url, performance.now() - startedAt < settleWaitMs);
        looking?.soon();
      });
    flights.set(open.invocation_id, flight);
    return flight;
  }

  /**
   * Begins after the tenant that was served last, so that all get their turn. Gives in how many milliseconds the next
   * payment is due, or null when none is open.
   */
  async function takeUpDue(): Promise<number | null> {
    const now = clock.now();
    let next: number | null = null;
    for await (const { tenant, due_at } of tenantsWithOpen(store.read, lastTenant)) {
      next = Math.min(next ?? Number.POSITIVE_INFINITY, Math.max(due_at - now, 0));
      if (due_at > now) continue;
      if (stopping || limits.full()) break;
      const room = () => limits.ofTenant(tenant);
      await takeUpOf(room, (most, full) => dueOf(store.read, tenant, now, most, full), tryAgain);
      lastTenant = tenant;
    }
    if (next === null) lastTenant = "";
    return next;
  }

  /** Resolves when the payment is leased; its attempt goes on. Gives the facilitator when that has no slot left. */
  async function tryAgain(seen: OpenPayment): Promise<string | null> {
    if (stopping || flights.has(seen.invocation_id) || (await isPutOff(options, seen))) return null;
    const slot = limits.take(seen.tenant, seen.facilitator_url);
    if (slot === null) return seen.facilitator_url;
    let attempting = Promise.resolve();
    try {
      const leased = await store.write((tx) => leaseUnlessOver(tx, seen, clock.now(), leaseUntil()));
      if (leased !== null) attempting = attempt(leased);
    } finally {
      void attempting.then(slot.release);
    }
    return null;
  }

  async function look(): Promise<number | false> {
    try {
      const next = await takeUpDue();
      if (next !== null) await searchFarOff();
      return next ?? false;
    } catch (error) {
      log.warn("open_settlements_not_read", { error });
      return false;
    }
  }

  return {
    /** Aborted when callers stop waiting for attempts under way. */
    stopped: stopped.signal,
    leaseUntil,
    /** The first attempt, right after the record. Resolves when its outcome is recorded; never rejects. */
    attempt,
    isCrowded: limits.isCrowded,
    inUse: limits.inUse,
    inFlight: (invocationId: string) => flights.get(invocationId),
    /**
     * Confirms the collected payments of ended calls whose receipts wait for that: some of a tenant, or that of one call.
     * Resolves when each has been tried, with whether there were any.
     */
    async confirm(tenant: string, invocationId: string | null): Promise<boolean> {
      const confirming = await confirmingOf(store.read, tenant, invocationId, MAX.confirmationsAtOnce);
      await Promise.all(confirming.map((seen) => tryAgain(seen).then(() => flights.get(seen.invocation_id))));
      return confirming.length > 0;
    },
    /** To be called before any payment is taken: on SQLite nothing works on the attempts of the process before, so they are due. */
    async recover() {
      if (!store.isShared) await makeDue(store, clock.now(), clock.now());
    },
    start() {
      // What another process has left becomes due when nobody here knows.
      looking = poll({ leastMs: 250, mostMs: 2_000 }, look);
    },
    /** Starts nothing more and lets attempts end for `ms`, then breaks them off. Their payments stay open. */
    async stop(ms: number) {
      stopping = true;
      looking?.stop();
      // Not earlier, even if nothing is under way: callers that waited are still reading the outcome.
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
 * Takes up what is due of a tenant. Payments at a facilitator that has no slot left are passed over, so that they hold up
 * none at another one.
 *
 * @param tryAgain gives the facilitator when that has no slot left
 */
async function takeUpOf(
  room: () => number,
  due: (most: number, full: readonly string[]) => Promise<OpenPayment[]>,
  tryAgain: (seen: OpenPayment) => Promise<string | null>,
): Promise<void> {
  const full = new Set<string>();
  // A few full facilitators of one tenant are passed over in one look.
  for (let wanted = room(); wanted > 0 && full.size < 16; wanted = room()) {
    const tried = await Promise.all((await due(wanted, [...full])).map(tryAgain));
    const found = tried.filter((facilitator) => facilitator !== null);
    if (found.length === 0) return;
    for (const facilitator of found) full.add(facilitator);
  }
}

/**
 * Of a payment from before a restore nobody knows whether it was ever sent, and its call has ended: so the facilitator is
 * asked what became of it when it can't collect it any more.
 */
async function isPutOff({ store, clock, guard }: SettlerOptions, seen: OpenPayment): Promise<boolean> {
  const now = clock.now();
  // The chain's time may lie behind ours.
  const end = seen.valid_before * 1000 + 10_000;
  if (isConfirming(seen) || !guard.mayBeOlder(seen.valid_before) || now > end) return false;
  const at = Math.min(end, now + PAUSE_MS_MOST);
  await store.write((tx) => postpone(tx, seen, { at, now, outcome: "unknown" }));
  return true;
}

/** Makes payments due that are farther off than any lease or pause, as a clock that was set back leaves them. */
function createFarOffSearch({ store, clock }: Pick<SettlerOptions, "store" | "clock">, leaseUntil: () => number) {
  let searchedAt = performance.now();
  return async () => {
    if (performance.now() - searchedAt < 1_000) return;
    searchedAt = performance.now();
    const now = clock.now();
    await makeDue(store, now, Math.max(leaseUntil(), now + PAUSE_MS_MOST) + 5_000);
  };
}

// Limits of settlements under way, shared fairly by tenant: in all, in the background, and in the background at one
// facilitator. A facilitator that let its last attempt time out gets few slots, so that it can't hold up the others.

export function createSettlementLimits() {
  const inFlight = createFairShare({ size: MAX.firstAttempts });
  const background = createFairShare({ size: MAX.backgroundAttempts });
  /** Many tenants share a facilitator, and one tenant's waiting payments must not keep the others out. */
  const byFacilitator = new Map<string, FairShare>();
  const troubled = new Set<string>();

  function takeAt(facilitator: string, tenant: string): FairShare | null {
    const slots = byFacilitator.get(facilitator) ?? createFairShare({ size: MAX.facilitatorAttempts });
    const isTried = troubled.has(facilitator) && MAX.facilitatorAttempts - slots.free >= MAX.troubledAttempts;
    if (isTried || slots.take(tenant) !== null) return null;
    byFacilitator.set(facilitator, slots);
    return slots;
  }

  return {
    /** Counts a settlement of the tenant, in the background or not. */
    enter(tenant: string) {
      // What was accepted is attempted, whether or not there is room for more.
      const isCounted = inFlight.take(tenant) === null;
      return { release: () => isCounted && inFlight.giveBack(tenant) };
    },
    /** Whether the tenant has as many settlements under way as it may have. */
    isCrowded: (tenant: string) => inFlight.roomOf(tenant) === 0,
    full: () => background.free === 0,
    /** Of the rows of kernel/limits.ts. */
    inUse: () => ({ firstAttempts: inFlight.inUse, backgroundAttempts: background.inUse }),
    /** Places in the background that a tenant may still take. */
    ofTenant: (tenant: string) => background.roomOf(tenant),
    /** A slot in the background, or null when there is none. */
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
    /** Whether the facilitator's last attempt ended before its time was over. */
    learn(facilitator: string, inTime: boolean) {
      troubled.delete(facilitator);
      if (inTime) return;
      troubled.add(facilitator);
      const [oldest] = troubled;
      if (troubled.size > MAX.troubledFacilitators && oldest !== undefined) troubled.delete(oldest);
    },
  };
}
