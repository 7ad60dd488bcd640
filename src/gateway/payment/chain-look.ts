// Looks up on the chain what became of a payment that a facilitator leaves open. The result is final, so no node is believed
// against another. "Not collected" needs all nodes that answer, each by a block of its own after the expiry or by a receipt.
// "Collected" needs one node, and no node that knows as much may contradict it.
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

/** The time limit of one look, for which a caller may be waiting. */
const LOOK_MS = 6_000;
/** An authorization still unused in a block so long after its expiry can't be used any more, by the chain's own time. */
export const PROOF_SECONDS = 60;
/** A newest block of at most this age counts as current. */
const FRESH_SECONDS = 30;

/** Null without a result yet or an answering node. @param known the reported transaction: no search while it is on the chain */
export type ChainLook = (authorization: Authorization, known?: Hex) => Promise<SettleOutcome | null>;

/** @param time never ahead, even after the clock was set forward */
export function createChainLook({ network, views }: Chain, time: Pick<TimeBounds, "earliest">, log: Log): ChainLook {
  const notCollected = (why: string): SettleOutcome => ({ kind: "declined", definite: true, isFinal: true, why });
  const secondsSince = (second: bigint | number) => time.earliest() / 1000 - Number(second);

  async function look(authorization: Authorization, known: Hex | undefined): Promise<SettleOutcome | null> {
    const witnesses = (await views(authorization)).map((view) => witness(authorization, view));
    const kept = known === undefined ? null : await meaningOf(authorization, witnesses, known);
    if (kept?.kind === "collected") return kept;
    // Each node's finding is judged at once, so that a slow node delays none.
    const found = witnesses.map(async ({ foundBy }) => {
      const hash = await foundBy();
      const meaning = hash === null ? null : await meaningOf(authorization, witnesses, hash);
      return meaning ?? Promise.reject(new Error("no node shows by which transaction it was used"));
    });
    const first = await Promise.any(found).catch(() => null);
    if (first !== null) return first;
    return (await isUnusedAfter(authorization, witnesses)) ? notCollected("unused on the chain after its time") : null;
  }

  /** Judges, by all nodes' receipts, a transaction that is reported to have used or cancelled the authorization. */
  async function meaningOf(authorization: Authorization, witnesses: readonly Witness[], hash: Hex) {
    const receipts = await Promise.all(witnesses.map((each) => each.receipt(hash).catch(() => null)));
    const paid = receipts.find((receipt) => receipt !== null && isPaidBy(network, authorization, receipt)) ?? null;
    if (paid === null) {
      const isAgreed = receipts.length > 0 && receipts.every((receipt) => isOtherEnd(network, authorization, receipt));
      return isAgreed ? notCollected("cancelled on the chain, or used for something else") : null;
    }
    const denials = witnesses.map((each, at) => denies(authorization, each, receipts[at] ?? null, paid));
    if ((await Promise.all(denials)).includes(true)) return null;
    return { kind: "collected", transaction: hash, fee: null } as const;
  }

  /** Whether a node of our chain that is as far as the block of the `paid` receipt contradicts it. */
  async function denies(authorization: Authorization, node: Witness, own: Receipt | null, paid: Receipt) {
    if (own !== null && isPaidBy(network, authorization, own)) return false;
    const { number, timestamp } = node.head;
    const isAsRecent = number >= paid.blockNumber || secondsSince(timestamp) <= FRESH_SECONDS;
    if (isOtherEnd(network, authorization, own)) return node.test();
    if (!isAsRecent) return false;
    if ((await node.isUsed) === false) return node.test();
    // A node without the receipt may just lack it, or know of another transaction.
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
  /** The transaction that used or cancelled the authorization, as this node shows it; searched for once. */
  foundBy(): Promise<Hex | null>;
}

function witness(authorization: Authorization, view: NodeView): Witness {
  let search: Promise<Hex | null> | undefined;
  const begin = async () =>
    (await view.isUsed) === false ? null : ((await useBy(view, authorization, view.head))?.hash ?? null);
  return { ...view, foundBy: () => (search ??= begin()) };
}

/** Whether the receipt shows another end of the authorization. One that shows no end at all may be incomplete. */
function isOtherEnd(network: Network, authorization: Authorization, receipt: Receipt | null): boolean {
  if (receipt?.succeeded !== true || isPaidBy(network, authorization, receipt)) return false;
  return receipt.logs.some((each) => isEndOf(network, authorization, each));
}
