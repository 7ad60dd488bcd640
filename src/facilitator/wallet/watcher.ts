// When the chain is looked at: on each new block while anything is open, found by polling; and when what is due is
// broadcast. With nothing open nothing is asked.
import type { Log } from "../../core/log.ts";
import type { Chain } from "../chain/chain.ts";
import type { Block } from "../chain/rpc-types.ts";
import { createReconcile, type ReconcileOptions } from "./reconcile.ts";

/** While a transaction or a payment waits for a block. */
const POLL_MS = 150;
/** While there is nothing but blocks to count until an inclusion is final. */
const CALM_POLL_MS = 1000;
/** A failed step, or a node's answer, has the chain looked at again although there is no new block. */
const LOOK_AGAIN_MS = 1000;

export interface Watcher {
  /** There is something to broadcast, or to watch. */
  wake(): void;
  /** The chain is to be looked at soon, even if there is no new block. */
  lookAgain(): void;
  stop(): Promise<void>;
}

export interface WatcherOptions extends Omit<ReconcileOptions, "attempt"> {
  readonly chain: Chain;
  readonly log: Log;
  /** Begins to broadcast what is due. Nobody waits for it, so a node that hangs does not hold up the look. */
  readonly broadcast: () => void;
  /** Takes in what other processes have stored. */
  readonly refresh: () => Promise<void>;
}

export function createWatcher(options: WatcherOptions): Watcher {
  const { chain, log, pendingNonces, broadcast, refresh } = options;
  const look = createReconcile({ ...options, attempt });
  let seen: Block | null = null;
  /** When the chain is looked at although there is no new block (performance.now). */
  let lookAt = Number.POSITIVE_INFINITY;
  /** When the next round begins (performance.now). */
  let nextAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let round: Promise<void> | null = null;
  let stopped = false;

  function lookAgain(): void {
    lookAt = Math.min(lookAt, performance.now() + LOOK_AGAIN_MS);
  }

  async function attempt(step: string, work: () => Promise<void>): Promise<void> {
    if (stopped) return;
    try {
      await work();
    } catch (error) {
      log.debug("chain_watcher_failed", { step, error });
      lookAgain();
    }
  }

  async function turn(): Promise<void> {
    const at = await chain.newest();
    if (at.hash !== seen?.hash || performance.now() >= lookAt) {
      lookAt = Number.POSITIVE_INFINITY;
      await refresh();
      await look(at);
      seen = at;
    }
    broadcast();
  }

  function isWaiting(): boolean {
    for (const pendingNonce of pendingNonces.all())
      if (pendingNonce.inclusion === null && pendingNonces.isInReach(pendingNonce)) return true;
    for (const { status } of pendingNonces.payments()) if (status === "sent") return true;
    return false;
  }

  async function run(): Promise<void> {
    await attempt("turn", turn);
    round = null;
    if (stopped || (pendingNonces.wallets().size === 0 && !isWaiting())) return;
    schedule(isWaiting() ? POLL_MS : CALM_POLL_MS);
  }

  /** The next round begins after this time, or earlier when that was arranged before. */
  function schedule(ms: number): void {
    const at = performance.now() + ms;
    if (at >= nextAt) return;
    clearTimeout(timer);
    nextAt = at;
    timer = setTimeout(() => {
      nextAt = Number.POSITIVE_INFINITY;
      round ??= run();
    }, ms);
  }

  return {
    lookAgain,
    wake() {
      if (stopped) return;
      broadcast();
      // A round under way schedules the next one itself.
      if (round === null) schedule(POLL_MS);
    },
    async stop() {
      stopped = true;
      clearTimeout(timer);
      await round;
    },
  };
}
