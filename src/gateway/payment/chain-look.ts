// What the chain says of a payment that a facilitator leaves open. The gateway only reads, and believes nodes as the
// facilitator does: that something did not happen is read at the hash of a block.

import type { Chain } from "../../chain/chain.ts";
import { useBy } from "../../chain/find-use.ts";
import { isPaidBy } from "../../chain/token.ts";
import { withDeadline } from "../../concurrency/deadline.ts";
import type { Log } from "../../core/log.ts";
import type { Authorization } from "../../x402/types.ts";
import type { SettleOutcome } from "./outcome.ts";

/** Of one look, which a caller may be waiting for. */
const LOOK_MS = 6_000;
/** After its time an unused authorization proves that nothing was collected, with some room for the chain's clock. */
const OVER_SECONDS = 60n;

/** Null when the chain does not tell yet, or no node answers. */
export type ChainLook = (authorization: Authorization) => Promise<SettleOutcome | null>;

export function createChainLook(chain: Pick<Chain, "newest" | "isUsed" | "findUse" | "receipt">, log: Log): ChainLook {
  const over = (why: string): SettleOutcome => ({ kind: "declined", definite: true, isFinal: true, why });

  async function look(authorization: Authorization): Promise<SettleOutcome | null> {
    const head = await chain.newest();
    if (!(await chain.isUsed(authorization, head))) {
      const isOver = BigInt(head.timestamp) > authorization.validBefore + OVER_SECONDS;
      return isOver ? over("unused on the chain after its time") : null;
    }
    const use = await useBy(chain, authorization, head);
    if (use === null) return null;
    if (use.cancelled) return over("cancelled on the chain");
    const receipt = await chain.receipt(use.hash);
    if (receipt === null) return null;
    if (!isPaidBy(authorization, receipt)) return over("used on the chain for something else");
    return { kind: "collected", transaction: receipt.hash, fee: null };
  }

  return async (authorization) => {
    try {
      return await withDeadline(LOOK_MS, look(authorization), () => new Error(`no answer within ${LOOK_MS} ms`));
    } catch (error) {
      log.warn("chain_not_read", { error });
      return null;
    }
  };
}
