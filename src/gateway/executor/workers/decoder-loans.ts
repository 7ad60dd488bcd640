// The memory of decoders is shared out in one place, on the main thread: a part for each thread would be too small for a
// fair share where there are many. Workers borrow it by messages, and messages tell them what to give back. When a worker
// dies, its loans end.
import type { DecoderShare } from "../../../http/client/decode.ts";

interface Loan {
  readonly id: number;
  readonly tenant: string;
  readonly agent: string;
  readonly bytes: number;
}

/** What a worker wants, or the ID of what it no longer needs, whether granted or not. */
export type LoanRequest = Loan | number;

/** For a worker: what it has now, or has to give back because others need it. */
export interface LoanNews {
  readonly id: number;
  readonly isGranted: boolean;
}

/** Sends all of one turn of the event loop together, since the cost is per message. */
function perTurn<T>(send: (all: readonly T[]) => void): (one: T) => void {
  let all: T[] = [];
  return (one) => {
    if (all.push(one) > 1) return;
    setImmediate(() => {
      const sent = all;
      all = [];
      send(sent);
    });
  };
}

/** @param tell sends the worker its news */
export function createLender(share: DecoderShare, tell: (news: readonly LoanNews[]) => void) {
  const loans = new Map<number, AbortController>();
  const tellSoon = perTurn(tell);

  function lend({ id, tenant, agent, bytes }: Loan): void {
    const over = new AbortController();
    loans.set(id, over);
    share
      .take(tenant, agent, bytes, over.signal, () => tellSoon({ id, isGranted: false }))
      .then(
        (giveBack) => {
          if (over.signal.aborted) return giveBack();
          over.signal.addEventListener("abort", giveBack, { once: true });
          tellSoon({ id, isGranted: true });
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
    asked(requests: readonly LoanRequest[]) {
      for (const request of requests) {
        if (typeof request === "number") end(request);
        else lend(request);
      }
    },
    /** The worker has died. */
    clear() {
      for (const id of [...loans.keys()]) end(id);
    },
  };
}

/** The share as a worker sees it. */
export interface Borrower extends DecoderShare {
  receive(news: readonly LoanNews[]): void;
}

/** @param ask sends the main thread the requests */
export function createBorrower(ask: (requests: readonly LoanRequest[]) => void): Borrower {
  /** What is wanted or held. */
  const loans = new Map<number, { granted(): void; giveWay(): void }>();
  const askSoon = perTurn(ask);
  let lastId = 0;

  return {
    async take(tenant, agent, bytes, signal, giveWay) {
      signal.throwIfAborted();
      const id = ++lastId;
      const { promise, resolve, reject } = Promise.withResolvers<() => void>();
      const giveBack = () => {
        if (loans.delete(id)) askSoon(id);
      };
      const giveUp = () => {
        giveBack();
        reject(signal.reason);
      };
      const granted = () => {
        signal.removeEventListener("abort", giveUp);
        resolve(giveBack);
      };
      loans.set(id, { granted, giveWay });
      signal.addEventListener("abort", giveUp, { once: true });
      askSoon({ id, tenant, agent, bytes });
      return promise;
    },
    receive(news) {
      for (const { id, isGranted } of news) {
        if (isGranted) loans.get(id)?.granted();
        else loans.get(id)?.giveWay();
      }
    },
  };
}
