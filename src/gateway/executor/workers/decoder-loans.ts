// The memory of decoders is shared out in one place, on the main thread. Workers borrow it by messages, and messages
// tell them what to give back. When a worker dies, its loans end.
import type { DecoderShare } from "../../../http/decoder-share.ts";

/** A worker's request for memory. */
export interface Loan {
  readonly id: number;
  readonly tenant: string;
  readonly agent: string;
  readonly bytes: number;
}

/** What a worker wants, and what it no longer needs, whether granted or not. */
export interface LoanRequests {
  readonly wanted: readonly Loan[];
  readonly done: readonly number[];
}

/** For a worker: which loans it has now, and which of them others need back. */
export interface LoanNews {
  readonly granted: readonly number[];
  readonly recalled: readonly number[];
}

/** @param tell sends the worker the news of one turn of the event loop */
export function createLender(share: DecoderShare, tell: (news: LoanNews) => void) {
  const loans = new Map<number, AbortController>();
  let granted: number[] = [];
  let recalled: number[] = [];

  function tellSoon(): void {
    if (granted.length + recalled.length > 1) return;
    setImmediate(() => {
      tell({ granted, recalled });
      [granted, recalled] = [[], []];
    });
  }

  function lend({ id, tenant, agent, bytes }: Loan): void {
    const over = new AbortController();
    loans.set(id, over);
    const recall = () => {
      recalled.push(id);
      tellSoon();
    };
    share.take(tenant, agent, bytes, over.signal, recall).then(
      (giveBack) => {
        if (over.signal.aborted) return giveBack();
        over.signal.addEventListener("abort", giveBack, { once: true });
        granted.push(id);
        tellSoon();
      },
      // Nobody waits for it any more.
      () => {},
    );
  }

  function end(id: number): void {
    loans.get(id)?.abort();
    loans.delete(id);
  }

  return {
    asked({ wanted, done }: LoanRequests) {
      for (const loan of wanted) lend(loan);
      for (const id of done) end(id);
    },
    /** The worker has died. */
    clear() {
      for (const id of [...loans.keys()]) end(id);
    },
  };
}

/** The share as a worker sees it. */
export interface Borrower extends DecoderShare {
  receive(news: LoanNews): void;
}

/** @param ask sends the main thread the requests of one turn of the event loop */
export function createBorrower(ask: (requests: LoanRequests) => void): Borrower {
  const waiting = new Map<number, () => void>();
  /** Called when others need the memory, by loan: held or still wanted. */
  const givers = new Map<number, () => void>();
  let wanted: Loan[] = [];
  let done: number[] = [];
  let isFlushing = false;
  let lastId = 0;

  function flushSoon(): void {
    if (isFlushing) return;
    isFlushing = true;
    setImmediate(() => {
      isFlushing = false;
      ask({ wanted, done });
      [wanted, done] = [[], []];
    });
  }

  function giveBack(id: number): void {
    if (!givers.delete(id)) return;
    done.push(id);
    flushSoon();
  }

  return {
    async take(tenant, agent, bytes, signal, giveWay) {
      signal.throwIfAborted();
      const id = ++lastId;
      wanted.push({ id, tenant, agent, bytes });
      flushSoon();
      const { promise, resolve, reject } = Promise.withResolvers<void>();
      waiting.set(id, resolve);
      givers.set(id, giveWay);
      const giveUp = () => {
        if (waiting.delete(id)) giveBack(id);
        reject(signal.reason);
      };
      signal.addEventListener("abort", giveUp, { once: true });
      await promise;
      signal.removeEventListener("abort", giveUp);
      return () => giveBack(id);
    },
    receive({ granted, recalled }) {
      for (const id of granted) {
        waiting.get(id)?.();
        waiting.delete(id);
      }
      for (const id of recalled) givers.get(id)?.();
    },
  };
}
