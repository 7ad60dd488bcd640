// Whether the facilitator can take payments: a node answers, and a wallet has gas. It is asked before every settlement,
// so the answer is kept for a second.

import type { Chain } from "../../chain/chain.ts";
import type { Log } from "../../core/log.ts";
import type { Hex } from "../../x402/types.ts";
import type { Sender } from "./sender.ts";

const FRESH_MS = 1000;

export type Readiness =
  | { readonly ready: true }
  | { readonly ready: false; readonly reason: "rpc unreachable" | "no fresh block" | "gas wallet low" };

export type ReadinessCheck = ReturnType<typeof createReadinessCheck>;

export function createReadinessCheck(chain: Chain, senders: readonly Sender[], lowWaterWei: bigint, log: Log) {
  let able: readonly Sender[] = [];
  /** By address, of the last look; null when it failed. */
  let held: readonly (readonly [address: Hex, wei: bigint])[] | null = null;
  let known: { readonly readiness: Readiness; readonly at: number } | null = null;
  let asking: Promise<Readiness> | null = null;

  async function look(): Promise<Readiness> {
    try {
      await chain.newest();
      const balances = await Promise.all(senders.map((sender) => chain.balance(sender.signer.address)));
      able = senders.filter((_, index) => (balances[index] ?? 0n) >= lowWaterWei);
      held = senders.map(({ signer }, index) => [signer.address, balances[index] ?? 0n]);
      if (!chain.isFresh()) return { ready: false, reason: "no fresh block" };
      return able.length > 0 ? { ready: true } : { ready: false, reason: "gas wallet low" };
    } catch (error) {
      log.debug("readiness_unknown", { error });
      able = [];
      held = null;
      return { ready: false, reason: "rpc unreachable" };
    }
  }

  async function renew(): Promise<Readiness> {
    const readiness = await look();
    if (readiness.ready !== known?.readiness.ready) {
      if (readiness.ready) log.info("ready");
      else log.error("not_ready", { reason: readiness.reason });
    }
    known = { readiness, at: performance.now() };
    asking = null;
    return readiness;
  }

  async function readiness(): Promise<Readiness> {
    // The next block may come at any moment.
    const freshMs = known?.readiness.ready === false && known.readiness.reason === "no fresh block" ? 100 : FRESH_MS;
    if (known !== null && performance.now() - known.at < freshMs) return known.readiness;
    asking ??= renew();
    return asking;
  }

  return {
    readiness,
    /** What the wallets hold, by address. Rejects when no node tells. */
    async balances() {
      await readiness();
      if (held === null) throw new Error("no node tells what the wallets hold");
      return held;
    },
    /** The senders that had enough gas at the last look. */
    able: (): readonly Sender[] => able,
  };
}
