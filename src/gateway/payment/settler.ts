// Which recorded payment is attempted when: each once before its call is answered, and those whose outcome nobody
// knows again and again in the background, until it is certain. The database holds what is owed; a payment is leased
// for each attempt, so that after a crash, or on another replica, it comes up again.

import { endsWithin } from "../../concurrency/deadline.ts";
import { every } from "../../concurrency/every.ts";
import { type AttemptOptions, attemptSettlement, shown } from "./attempt.ts";
import { PAUSE_MS_MOST } from "./outcome.ts";
import { dueOf, makeDue, nextTenantDue, type OpenPayment } from "./rows.ts";
import { createSettlementLimits } from "./settlement-limits.ts";
import { leaseUnlessOver } from "./unsent.ts";

const TICK_MS = 250;
/** Beyond the time of an attempt, for what is recorded after it. */
const LEASE_MARGIN_MS = 5_000;
const LAST_RECORDS_MS = 5_000;
/** Looks between two searches for payments that a clock which went back has put far off. */
const TICKS_PER_SEARCH = 8;
const FAR_OFF_MARGIN_MS = 5_000;

export interface SettlerOptions extends AttemptOptions {
  /** One attempt, at most. */
  readonly settleWaitMs: number;
}

export interface Settler {
  /** When the lease of a payment that is attempted now runs out. */
  leaseUntil(): number;
  /** The first attempt, right after the record. Resolves when its outcome is recorded; never rejects. */
  attempt(open: OpenPayment): Promise<void>;
  /** Whether so many payments are under way that another of the tenant would be at the cost of everybody else. */
  isCrowded(tenant: string): boolean;
  /** The attempt that is under way for this invocation in this process. */
  underWay(invocationId: string): Promise<void> | undefined;
  /** To be called before any payment is taken. */
  recover(): Promise<void>;
  start(): void;
  /** Aborted when nothing that is under way is waited for any more. */
  readonly stopped: AbortSignal;
  /** Starts nothing more, lets what is under way end for `ms`, then breaks it off: those payments stay open. */
  stop(ms: number): Promise<void>;
}

export function createSettler(options: SettlerOptions): Settler {
  const { store, clock, log, settleWaitMs } = options;
  const flights = new Map<string, Promise<void>>();
  const room = createSettlementLimits();
  const stopped = new AbortController();
  let stopping = false;
  let stopTicking = () => {};
  let lastTenant = "";

  const leaseUntil = () => clock.now() + settleWaitMs + LEASE_MARGIN_MS;

  function attempt(open: OpenPayment): Promise<void> {
    const startedAt = performance.now();
    const place = room.enter(open.tenant);
    const flight = attemptSettlement(options, open, stopped.signal)
      .catch((error) => log.error("settlement_left_open", { ...shown(open), error }))
      .finally(() => {
        flights.delete(open.invocation_id);
        place.release();
        room.learn(open.facilitator_url, performance.now() - startedAt < settleWaitMs);
      });
    flights.set(open.invocation_id, flight);
    return flight;
  }

  /** Begins after the tenant that was served last, so that each gets its turn. */
  async function takeUpDue(): Promise<void> {
    const last = lastTenant;
    await takeUpBetween(last, null);
    await takeUpBetween("", last);
  }

  async function takeUpBetween(after: string, upTo: string | null): Promise<void> {
    const now = clock.now();
    for (let tenant = await nextTenantDue(store.read, after, upTo, now); tenant !== null; ) {
      if (stopping || room.full()) return;
      const wanted = room.ofTenant(tenant);
      if (wanted > 0) await Promise.all((await dueOf(store.read, tenant, now, wanted)).map(tryAgain));
      lastTenant = tenant;
      tenant = await nextTenantDue(store.read, tenant, upTo, now);
    }
  }

  /** Resolves when the payment is leased; its attempt goes on. */
  async function tryAgain(seen: OpenPayment): Promise<void> {
    if (stopping || flights.has(seen.invocation_id)) return;
    const place = room.take(seen.tenant, seen.facilitator_url);
    if (place === null) return;
    let leased: OpenPayment | null = null;
    try {
      leased = await store.write((tx) => leaseUnlessOver(tx, seen, clock.now(), leaseUntil()));
    } finally {
      if (leased === null) place.release();
      else void attempt(leased).then(place.release);
    }
  }

  async function searchFarOff(): Promise<void> {
    const now = clock.now();
    const latest = Math.max(leaseUntil(), now + PAUSE_MS_MOST) + FAR_OFF_MARGIN_MS;
    await makeDue(store, now, latest);
  }

  let ticks = 0;
  async function tick(): Promise<void> {
    const isSearch = ++ticks % TICKS_PER_SEARCH === 0;
    await (isSearch ? searchFarOff().then(takeUpDue) : takeUpDue()).catch((error) =>
      log.warn("open_settlements_not_read", { error }),
    );
  }

  async function idle(): Promise<void> {
    while (flights.size > 0) await Promise.all(flights.values());
  }

  return {
    stopped: stopped.signal,
    leaseUntil,
    attempt,
    isCrowded: room.isCrowded,
    underWay: (invocationId) => flights.get(invocationId),
    async recover() {
      // On SQLite this process is the only one, so what the last one had under way is nobody's.
      if (store.dialect === "sqlite") await makeDue(store, clock.now(), clock.now());
    },
    start() {
      stopTicking = every(TICK_MS, tick);
    },
    async stop(ms) {
      stopping = true;
      stopTicking();
      // Not as soon as nothing is under way: whoever has waited for that is about to read what came of it.
      setTimeout(() => stopped.abort(), ms).unref();
      await endsWithin(ms + LAST_RECORDS_MS, idle());
    },
  };
}
