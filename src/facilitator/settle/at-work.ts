// The payments that this process is at work on, with a share of them for each account. Collecting enters them here, and
// resuming leaves them alone, so neither has to ask the other.
import { createReservedShare } from "../../concurrency/reserved-share.ts";
import type { SettlementRequest } from "./request.ts";

type Named = SettlementRequest["named"];

/** @param max payments of all accounts together */
export function createAtWork(max: number) {
  /** By account: each payment at work holds a place, however slow it is. */
  const shares = createReservedShare(max);
  /** Requests between the simulation and their answer. */
  const collecting = new Set<string>();
  /** From before the claim until the wallet has stored or refused it: a database that is away may hold that up. */
  const sending = new Set<string>();

  function isBusy(name: string): boolean {
    return collecting.has(name) || sending.has(name);
  }

  function leave(set: Set<string>, named: Named): void {
    const name = nameOf(named);
    if (set.delete(name) && !isBusy(name)) shares.giveBack(named.account);
  }

  return {
    /** Whether this process has it between the simulation and its transaction, or waits for its block. */
    has: (named: Named): boolean => isBusy(nameOf(named)),
    /**
     * Tells which payments are being claimed, or are with the wallet of this process, or were when this was asked for: what
     * was read since may be older than their transaction.
     */
    sendingSince(): (named: Named) => boolean {
      const before = new Set(sending);
      return (named) => before.has(nameOf(named)) || sending.has(nameOf(named));
    },
    /** False when the account has too many at work: then it is not begun. */
    begin(named: Named): boolean {
      if (!shares.take(named.account)) return false;
      collecting.add(nameOf(named));
      return true;
    },
    end: (named: Named): void => leave(collecting, named),
    beginSending: (named: Named): void => void sending.add(nameOf(named)),
    endSending: (named: Named): void => leave(sending, named),
  };
}

export type AtWork = ReturnType<typeof createAtWork>;

/** Per account: one must not hold up another's payment by presenting it with a wrong signature. */
function nameOf({ account, payer, nonce }: Named): string {
  return `${payer}:${nonce}:${account}`;
}
