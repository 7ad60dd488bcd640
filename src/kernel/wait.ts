// Waiting: for a time, for a signal, for the last of what is under way, and for the end of something. Where a wait ends
// first, the work goes on, and its outcome is ignored.
import { AsyncLocalStorage } from "node:async_hooks";
import { MAX } from "./limits.ts";

/** The outcome of `work`, unless `ms` pass first: then rejects with what `late` gives. */
export async function withDeadline<T>(ms: number, work: Promise<T>, late: () => unknown): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  // The runtime would warn on standard error of a negative time, which is one that has passed.
  const timer = setTimeout(() => reject(late()), Math.max(ms, 0));
  try {
    return await Promise.race([work, promise]);
  } finally {
    clearTimeout(timer);
  }
}

/** Whether `work` ends within `ms`. Rejects if it does so first. Each piece of an event stream asks: a race would cost more. */
export function endsWithin(ms: number, work: Promise<unknown>): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, Math.max(ms, 0), false);
    const settle = (how: () => void) => {
      clearTimeout(timer);
      how();
    };
    work.then(
      () => settle(() => resolve(true)),
      (error) => settle(() => reject(error)),
    );
  });
}

/** The outcome of `work`; rejects with the signal's reason as soon as that is aborted. */
export async function unlessAborted<T>(signal: StopSignal, work: Promise<T>): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  const onAbort = () => reject(signal.reason);
  signal.addEventListener("abort", onAbort, { once: true });
  if (signal.aborted) onAbort();
  try {
    return await Promise.race([work, promise]);
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}

// For whom work is done: it follows the work through all its waits. A request also knows how long it has waited for the
// database, so that its caller learns within ten seconds that this is away, also where it comes and goes.

/** What takes less says nothing of a database that is away, so a request with many short questions has the time it needs. */
export const LONG_WAIT_MS = 100;

/** A request that is not answered yet. Times are of performance.now(). */
export class ActingRequest {
  readonly tenant: string;
  readonly #waitMsMax: number;
  /** Waits at the same time: their time counts once. */
  #waits = 0;
  #since = 0;
  #waitedMs = 0;

  /** @param waitMsMax of all its waits together */
  constructor(tenant: string, waitMsMax: number = MAX.storeMs) {
    this.tenant = tenant;
    this.#waitMsMax = waitMsMax;
  }

  /** Begins a wait, which `endWait` must end. Returns until when it may last. */
  beginWait(now: number): number {
    if (this.#waits++ === 0) this.#since = now;
    return this.#since - this.#waitedMs + this.#waitMsMax;
  }

  endWait(now: number): void {
    if (--this.#waits > 0) return;
    const waitedMs = this.#waitedMs + now - this.#since;
    if (now - this.#since >= LONG_WAIT_MS || waitedMs >= this.#waitMsMax) this.#waitedMs = waitedMs;
  }

  /** Whether none of its time is left. */
  isOverdue(): boolean {
    const running = this.#waits > 0 ? performance.now() - this.#since : 0;
    return this.#waitedMs + running >= this.#waitMsMax;
  }

  /** From now on the bound fails nothing: the request is answered, or has to be served since it is paid for. */
  liftBound(): void {
    this.#waitedMs = Number.NEGATIVE_INFINITY;
  }
}

/** A request; or the tenant for whom work is done that no request waits for; null for the process's own work. */
const acting = new AsyncLocalStorage<ActingRequest | string | null>();

/** The request that the calling code serves; null for other work. */
export function actingRequest(): ActingRequest | null {
  const now = acting.getStore();
  return now instanceof ActingRequest ? now : null;
}

/** The tenant for whom the calling code works; null for the process's own work. The store shares its turns by it. */
export function actingTenant(): string | null {
  const now = acting.getStore() ?? null;
  return now instanceof ActingRequest ? now.tenant : now;
}

/** Runs `work`, with all that follows from it, for this request or tenant; null for work that a request only starts. */
export const actFor = <T>(whom: ActingRequest | string | null, work: () => T): T => acting.run(whom, work);

/** Runs work of the tenant's that goes on whatever becomes of the request, or that other requests wait for too. */
export const outlastRequest = <T>(work: () => T): T => acting.run(actingTenant(), work);

/**
 * Counts a wait of the request, if any, as one for the database: a question to it, or a wait in line before one. `wait` is given
 * until when it may last by the request's bound (of performance.now()), which it need not keep.
 */
export async function countWait<T>(wait: (until: number) => Promise<T>): Promise<T> {
  const request = actingRequest();
  if (request === null) return wait(Number.POSITIVE_INFINITY);
  const until = request.beginWait(performance.now());
  try {
    return await wait(until);
  } finally {
    request.endWait(performance.now());
  }
}

// A signal that something is to stop, of the form of the runtime's AbortSignal. That one is an event target, which costs
// each small call 2 of its 27 µs on the thread, with one listener that comes and goes (measured on Bun 1.4.5).

/** What those need of a signal who wait for something. An AbortSignal has it. */
export interface StopSignal {
  readonly aborted: boolean;
  readonly reason: unknown;
  /** @throws the reason */
  throwIfAborted(): void;
  addEventListener(type: "abort", listener: () => void, options?: { readonly once: true }): void;
  removeEventListener(type: "abort", listener: () => void): void;
}

/** What can be stopped. An AbortController has it. */
export type Stoppable = Pick<Stop, "signal" | "abort">;

export class Stop implements StopSignal {
  aborted = false;
  reason: unknown = undefined;
  /** Few at a time. */
  readonly #listeners: (() => void)[] = [];

  get signal(): StopSignal {
    return this;
  }

  /** Only the first reason counts. */
  abort(reason: unknown): void {
    if (this.aborted) return;
    [this.aborted, this.reason] = [true, reason];
    // One may remove another.
    for (let next = this.#listeners.shift(); next !== undefined; next = this.#listeners.shift()) next();
  }

  throwIfAborted(): void {
    if (this.aborted) throw this.reason;
  }

  addEventListener(_: "abort", listener: () => void): void {
    if (!this.aborted && !this.#listeners.includes(listener)) this.#listeners.push(listener);
  }

  removeEventListener(_: "abort", listener: () => void): void {
    const at = this.#listeners.indexOf(listener);
    if (at >= 0) this.#listeners.splice(at, 1);
  }
}

/** One for all waits, since an error of its own would be most of what the end of a wait costs. */
const TOO_LATE = new DOMException("the wait took too long", "TimeoutError");

/**
 * Does work that the first of the signals stops, or the end of `ms`. No listener is left at any of them, which would keep a timeout
 * for its whole time. By a timeout signal of the runtime the end of `ms` would cost three times as much: 60 ms where 6,500 waits end
 * together (measured on Bun 1.4.5).
 */
export async function untilFirst<T>(
  signals: readonly StopSignal[],
  work: (first: StopSignal) => Promise<T>,
  ms?: number,
): Promise<T> {
  const first = new Stop();
  const timer = ms === undefined ? undefined : setTimeout(() => first.abort(TOO_LATE), ms);
  const listening = signals.map((signal) => ({ signal, tell: () => first.abort(signal.reason) }));
  for (const { signal, tell } of listening) {
    if (signal.aborted) tell();
    else signal.addEventListener("abort", tell, { once: true });
  }
  try {
    return await work(first);
  } finally {
    clearTimeout(timer);
    for (const { signal, tell } of listening) signal.removeEventListener("abort", tell);
  }
}

export type InFlight = ReturnType<typeof createInFlight>;

/** Counts what is under way, for those who wait until nothing is. */
export function createInFlight() {
  let count = 0;
  let idle = Promise.withResolvers<void>();
  return {
    /** Something is under way until the returned function is called. Calling that again does nothing. */
    enter(): () => void {
      count++;
      let isIn = true;
      return () => {
        if (!isIn) return;
        isIn = false;
        count--;
        if (count > 0) return;
        idle.resolve();
        idle = Promise.withResolvers<void>();
      };
    },
    /** Resolves when nothing is under way. */
    async idle(): Promise<void> {
      while (count > 0) await idle.promise;
    },
  };
}

// Many who wait until something ends, such as a call or a payment. An end that is decided in this process is announced and
// wakes them at once. One that another process decides is found by looking: one question now and then for all who wait.

const LOOKED_FOR_MAX = 500;

interface EndWaitersOptions<K> {
  nameOf(key: K): string;
  readonly lookAgainMs: number;
  /** The names of those that have ended, or are gone. */
  endedAmong(keys: readonly K[]): Promise<readonly string[]>;
  /** Lets one who waits go on; at once where it is left out. */
  wake?(key: K, goOn: () => void): void;
}

interface Wait<K, T> {
  readonly key: K;
  readonly ms: number;
  readonly signal?: AbortSignal;
  /** Undefined when nobody can say, and another look is to be taken. @param isLast whether what is found is taken, ended or not */
  look(isLast: () => boolean): Promise<T | undefined>;
  isEnded(found: T): boolean;
}

export function createEndWaiters<K>(options: EndWaitersOptions<K>) {
  const { nameOf, lookAgainMs, endedAmong, wake = (_, goOn) => goOn() } = options;
  const waiting = new Map<string, { readonly key: K; readonly wakes: Set<() => void> }>();
  let isReleased = false;
  let isLooking = false;

  function announce(name: string): void {
    for (const goOn of waiting.get(name)?.wakes ?? []) goOn();
  }

  async function lookForAll(): Promise<void> {
    const keys = [...waiting.values()].map(({ key }) => key);
    for (let at = 0; at < keys.length; at += LOOKED_FOR_MAX) {
      for (const name of await endedAmong(keys.slice(at, at + LOOKED_FOR_MAX))) announce(name);
    }
  }

  function scheduleLook(): void {
    if (isLooking || waiting.size === 0) return;
    isLooking = true;
    setTimeout(async () => {
      // If the store is away, the next question is the same.
      await actFor(null, lookForAll).catch(() => {});
      isLooking = false;
      scheduleLook();
    }, lookAgainMs).unref();
  }

  /** Resolves at the next announcement, after `ms`, or when the signal aborts. */
  function nextChance(key: K, ms: number, signal?: AbortSignal): { passed: Promise<void>; forget(): void } {
    const name = nameOf(key);
    const { promise, resolve } = Promise.withResolvers<void>();
    const goOn = () => wake(key, resolve);
    const { wakes } = waiting.getOrInsertComputed(name, () => ({ key, wakes: new Set() }));
    wakes.add(goOn);
    const timer = setTimeout(goOn, ms);
    signal?.addEventListener("abort", goOn);
    function forget() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", goOn);
      wakes.delete(goOn);
      if (wakes.size === 0) waiting.delete(name);
    }
    return { passed: promise, forget };
  }

  return {
    /** After the write that ended it is durable. */
    announce,
    /** Ends all waits, now and from now on, since the process is about to end: each gets what is known. */
    release(): void {
      isReleased = true;
      for (const { wakes } of waiting.values()) for (const goOn of wakes) goOn();
    },
    /** What `look` finds once it has ended; or as it is after `ms`, when the signal aborts, or at the release. */
    async wait<T>({ key, ms, signal, look, isEnded }: Wait<K, T>): Promise<T> {
      const until = performance.now() + ms;
      for (;;) {
        const left = until - performance.now();
        const isLast = () => left <= 0 || isReleased || signal?.aborted === true;
        // Listening starts before looking, so that an end in between is not missed.
        const chance = nextChance(key, Math.max(0, left), signal);
        scheduleLook();
        try {
          const found = await look(isLast);
          if (found !== undefined && (isEnded(found) || isLast())) return found;
          await chance.passed;
        } finally {
          chance.forget();
        }
      }
    },
  };
}
