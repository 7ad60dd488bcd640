// Which of the living facilitators works for which wallet. Each decides for itself alone, from the same rows and one after
// another: it takes wallets that nobody works for, and gives up what another one should have. Pure.
import type { Hex } from "../../x402/types.ts";

export interface LivingFacilitator {
  readonly id: string;
  /** It can sign for these. */
  readonly wallets: readonly Hex[];
  /** Whether its nodes and its signer answer. */
  readonly isAble: boolean;
}

export interface LeaseChanges {
  readonly take: readonly Hex[];
  readonly giveUp: readonly Hex[];
}

/**
 * Wallets go to those that can sign for them and are able to, evenly. A wallet for which nobody can sign any more is watched
 * by any of them. When none is able, nothing would be gained by a change.
 *
 * @param holders of every wallet; null when no living facilitator has it
 */
export function changesOf(
  me: string,
  living: readonly LivingFacilitator[],
  holders: ReadonlyMap<Hex, string | null>,
): LeaseChanges {
  const counts = new Map(living.map(({ id }) => [id, 0]));
  for (const holder of holders.values()) if (holder !== null) counts.set(holder, (counts.get(holder) ?? 0) + 1);
  const countOf = (id: string) => counts.get(id) ?? 0;
  const candidatesOf = createCandidates(living);

  const free = walletsOf(holders, null);
  const take: Hex[] = [];
  for (const wallet of free) {
    const candidates = candidatesOf(wallet);
    if (!candidates.includes(me) || candidates.some((id) => countOf(id) < countOf(me))) continue;
    take.push(wallet);
    counts.set(me, countOf(me) + 1);
  }

  const own = walletsOf(holders, me);
  const giveUp = own.filter((wallet) => !candidatesOf(wallet).includes(me));
  // One at a time, and only when every wallet has a holder: else too many would go.
  if (giveUp.length === 0 && free.length === 0) {
    const isUneven = (wallet: Hex) => candidatesOf(wallet).some((id) => countOf(id) <= countOf(me) - 2);
    const spare = own.find(isUneven);
    if (spare !== undefined) giveUp.push(spare);
  }
  return { take, giveUp };
}

function walletsOf(holders: ReadonlyMap<Hex, string | null>, holder: string | null): Hex[] {
  return [...holders].filter(([, each]) => each === holder).map(([wallet]) => wallet);
}

function createCandidates(living: readonly LivingFacilitator[]) {
  return (wallet: Hex): string[] => {
    const signing = living.filter(({ wallets }) => wallets.includes(wallet));
    const known = signing.length > 0 ? signing : living;
    const able = known.filter(({ isAble }) => isAble);
    return (able.length > 0 ? able : known).map(({ id }) => id);
  };
}
