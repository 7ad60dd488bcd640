// What the chain says of a payment that a facilitator leaves open. The gateway only reads. That nothing was collected is
// final, so no single node is believed: all that answer must say so, each at a block of its own after that time.

import type { AuthorizationState, Chain } from "../../chain/chain.ts";
import { type Use, useBy } from "../../chain/find-use.ts";
import { isPaidBy } from "../../chain/token.ts";
import type { Log } from "../../core/log.ts";
import { withDeadline } from "../../kernel/wait.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { SettleOutcome } from "./outcome.ts";

/** Of one look, which a caller may be waiting for. */
const LOOK_MS = 6_000;
/** After its time an unused authorization proves that nothing was collected, with some room for the chain's clock. */
const OVER_SECONDS = 60;

/**
 * Null when the chain does not tell yet, or no node answers.
 *
 * @param known the transaction that is said to have collected it: nothing is searched for while it is on the chain
 */
export type ChainLook = (authorization: Authorization, known?: Hex) => Promise<SettleOutcome | null>;

export function createChainLook(chain: Pick<Chain, "states" | "findUse" | "receipt">, log: Log): ChainLook {
  const over = (why: string): SettleOutcome => ({ kind: "declined", definite: true, isFinal: true, why });

  async function look(authorization: Authorization, known: Hex | undefined): Promise<SettleOutcome | null> {
    const kept = known === undefined ? null : await meaningOf(authorization, { hash: known, cancelled: false });
    if (kept?.kind === "collected") return kept;
    const states = await chain.states(authorization);
    const used = states.filter(({ isUsed }) => isUsed);
    if (used.length === 0) return isOver(authorization, states) ? over("unused on the chain after its time") : null;
    // A node that knows of a use may lie behind or ahead of the others, and it is found by one of these heads.
    for (const { head } of used) {
      const use = await useBy(chain, authorization, head);
      if (use !== null) return meaningOf(authorization, use);
    }
    return null;
  }

  async function meaningOf(authorization: Authorization, use: Use): Promise<SettleOutcome | null> {
    if (use.cancelled) return over("cancelled on the chain");
    const receipt = await chain.receipt(use.hash);
    if (receipt === null) return null;
    if (!isPaidBy(authorization, receipt)) return over("used on the chain for something else");
    return { kind: "collected", transaction: receipt.hash, fee: null };
  }

  return async (authorization, known) => {
    try {
      return await withDeadline(LOOK_MS, look(authorization, known), () => new Error(`no answer within ${LOOK_MS} ms`));
    } catch (error) {
      log.warn("chain_not_read", { error });
      return null;
    }
  };
}

/** Of an authorization that no node shows as used. */
function isOver({ validBefore }: Authorization, states: readonly AuthorizationState[]): boolean {
  return states.length > 0 && states.every(({ head }) => BigInt(head.timestamp - OVER_SECONDS) > validBefore);
}
