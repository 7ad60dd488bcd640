// When the chain is looked at, and when what is due is broadcast: on each new block, found by polling, while anything is
// open. With nothing open, no node is asked.
import type { Block } from "../../chain/rpc-types.ts";
import { createReconcile, type ReconcileOptions } from "./reconcile.ts";

/** While a transaction or a payment waits for a block. */
const POLL_MS = 150;
/** While there is nothing but blocks to count until an inclusion is final. */
const CALM_POLL_MS = 1000;

export interface WatcherOptions extends ReconcileOptions {
  /** Begins to broadcast what is due. Nobody waits for it, so a node that hangs does not hold up the next look. */
  readonly broadcast: () => void;
  /** Takes in what other processes have stored. */
  readonly refresh: () => Promise<void>;
}

export function createWatcher(options: WatcherOptions) {
  const { chain, pendingNonces, schedule, broadcast, refresh } = options;
  const reconcile = createReconcile(options);
  let seen: Block | null = null;
  /** When the next round begins (performance.now). */
  let nextAt = Number.POSITIVE_INFINITY;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let round: Promise<void> | null = null;

  async function turn(): Promise<void> {
    const at = await chain.newest();
    if (at.hash !== seen?.hash || schedule.isLookDue()) {
      schedule.looking();
      await refresh();
      await reconcile(at);
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
    await schedule.attempt("turn", turn);
    round = null;
    if (schedule.isStopped() || (pendingNonces.wallets().size === 0 && !isWaiting())) return;
    scheduleRound(isWaiting() ? POLL_MS : CALM_POLL_MS);
  }

  /** The next round begins after this time, or earlier if it was scheduled earlier already. */
  function scheduleRound(ms: number): void {
    const at = performance.now() + ms;
    if (at >= nextAt) return;
    clearTimeout(timer);
    nextAt = at;
    timer = setTimeout(() => {
      nextAt = Number.POSITIVE_INFINITY;
      round ??= run();
    }, ms);
  }

  schedule.onWake(() => {
    broadcast();
    // A round under way schedules the next one itself.
    if (round === null) scheduleRound(POLL_MS);
  });

  return {
    async stop(): Promise<void> {
      schedule.stop();
      clearTimeout(timer);
      await round;
    },
  };
}
