// What the chain says of a payment that a facilitator leaves open. It is final, so no node is believed against another: that
// nothing was collected, all that answer must show, each at a block of its own after that time, or in a receipt of its own;
// that it was collected, one must show, and none that knows as much may deny it.

import type { Chain, NodeView } from "../../chain/chain.ts";
import { useBy } from "../../chain/find-use.ts";
import type { Receipt } from "../../chain/json-rpc.ts";
import { isEndOf, isPaidBy } from "../../chain/token.ts";
import type { Log } from "../../core/log.ts";
import type { TimeBounds } from "../../core/time.ts";
import { withDeadline } from "../../kernel/wait.ts";
import type { Network } from "../../x402/network.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { SettleOutcome } from "./outcome.ts";

/** Of one look, which a caller may be waiting for. */
const LOOK_MS = 6_000;
/** In a block so long after its time an unused authorization proves that nothing was collected: there the chain's clock is past it. */
export const PROOF_SECONDS = 60;
/** A newest block of this age is one of now. */
const FRESH_SECONDS = 30;

/**
 * Null when the chain does not tell yet, or no node answers.
 *
 * @param known the transaction that is said to have collected it: nothing is searched for while it is on the chain
 */
export type ChainLook = (authorization: Authorization, known?: Hex) => Promise<SettleOutcome | null>;

/** @param time of which a clock that was set ahead is no part */
export function createChainLook({ network, views }: Chain, time: Pick<TimeBounds, "earliest">, log: Log): ChainLook {
  const over = (why: string): SettleOutcome => ({ kind: "declined", definite: true, isFinal: true, why });
  const secondsSince = (second: bigint | number) => time.earliest() / 1000 - Number(second);

  async function look(authorization: Authorization, known: Hex | undefined): Promise<SettleOutcome | null> {
    const witnesses = (await views(authorization)).map((view) => witness(authorization, view));
    const kept = known === undefined ? null : await meaningOf(authorization, witnesses, known);
    if (kept?.kind === "collected") return kept;
    // A slow node holds up no other: what one has found is judged at once.
    const found = witnesses.map(async ({ foundBy }) => {
      const hash = await foundBy();
      const meaning = hash === null ? null : await meaningOf(authorization, witnesses, hash);
      return meaning ?? Promise.reject(new Error("no node tells by what it was used"));
    });
    const first = await Promise.any(found).catch(() => null);
    if (first !== null) return first;
    return (await isUnusedAfter(authorization, witnesses)) ? over("unused on the chain after its time") : null;
  }

  /** What a transaction that is said to have used or cancelled the authorization means, by the receipts of all nodes. */
  async function meaningOf(
    authorization: Authorization,
    witnesses: readonly Witness[],
    hash: Hex,
  ): Promise<SettleOutcome | null> {
    const receipts = await Promise.all(witnesses.map((each) => each.receipt(hash).catch(() => null)));
    const paid = receipts.find((receipt) => receipt !== null && isPaidBy(network, authorization, receipt)) ?? null;
    if (paid === null) {
      const isAll = receipts.length > 0 && receipts.every((receipt) => isOtherEnd(network, authorization, receipt));
      return isAll ? over("cancelled on the chain, or used for something else") : null;
    }
    const denials = witnesses.map((each, at) => denies(authorization, each, receipts[at] ?? null, paid));
    if ((await Promise.all(denials)).includes(true)) return null;
    return { kind: "collected", transaction: hash, fee: null };
  }

  /** Whether a node of our chain that knows as much as the receipt that shows the payment says otherwise. */
  async function denies(authorization: Authorization, node: Witness, own: Receipt | null, paid: Receipt) {
    if (own !== null && isPaidBy(network, authorization, own)) return false;
    const { number, timestamp } = node.head;
    const isAsNew = number >= paid.blockNumber || secondsSince(timestamp) <= FRESH_SECONDS;
    if (isOtherEnd(network, authorization, own)) return node.test();
    if (!isAsNew) return false;
    if ((await node.isUsed) === false) return node.test();
    // One that lacks the receipt may only be without it, or know of another transaction.
    const other = own === null ? await node.foundBy().catch(() => null) : null;
    return other !== null && other !== paid.hash && node.test();
  }

  async function isUnusedAfter({ validBefore }: Authorization, views: readonly Witness[]): Promise<boolean> {
    if (views.length === 0 || secondsSince(validBefore) <= PROOF_SECONDS) return false;
    if (!views.every(({ head }) => BigInt(head.timestamp - PROOF_SECONDS) > validBefore)) return false;
    return (await Promise.all(views.map(({ isUsed }) => isUsed))).every((isUsed) => isUsed === false);
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

interface Witness extends NodeView {
  /** The transaction by which the node shows the authorization as used or cancelled; searched for once. */
  foundBy(): Promise<Hex | null>;
}

function witness(authorization: Authorization, view: NodeView): Witness {
  let search: Promise<Hex | null> | undefined;
  const begin = async () =>
    (await view.isUsed) === false ? null : ((await useBy(view, authorization, view.head))?.hash ?? null);
  return { ...view, foundBy: () => (search ??= begin()) };
}

/** Of a receipt without the authorization's end nobody knows what it lacks. */
function isOtherEnd(network: Network, authorization: Authorization, receipt: Receipt | null): boolean {
  if (receipt?.succeeded !== true || isPaidBy(network, authorization, receipt)) return false;
  return receipt.logs.some((each) => isEndOf(network, authorization, each));
}
