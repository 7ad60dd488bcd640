// Who works for which wallet, as far as this process knows, and how a wallet changes hands: by a write of its own, beside
// the renewals, since it may have to wait for a process that was stopped in the middle of a write.
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { changeHolder, type Leases, livingOf, removeGone, type WalletRow } from "./lease-rows.ts";
import { changesOf } from "./lease-shares.ts";
import { openWallets } from "./transactions.ts";

export interface HoldersOptions {
  /** Of this process. */
  readonly id: string;
  readonly store: Store;
  readonly log: Log;
  /** It can sign for these. */
  readonly wallets: readonly Hex[];
  /** Whether no other facilitator can run on this database. */
  readonly isOnly: boolean;
}

export function createHolders({ id, store, log, wallets, isOnly }: HoldersOptions) {
  const known = new Map<Hex, WalletRow>();
  /** When this process has last changed a holder (performance.now). */
  const changedAt = new Map<Hex, number>();

  /**
   * What was read is true, also where its token is lower than the one known here: a failover may have lost commits. Only what
   * this process has changed since is newer.
   *
   * @param rows all of the database, asked for at `askedAt` (performance.now)
   */
  function learn(rows: readonly WalletRow[], askedAt: number): void {
    const read = new Map(rows.map((row) => [row.wallet, row]));
    for (const wallet of new Set([...known.keys(), ...read.keys()])) {
      if ((changedAt.get(wallet) ?? Number.NEGATIVE_INFINITY) >= askedAt) continue;
      const row = read.get(wallet);
      if (row === undefined) known.delete(wallet);
      else known.set(wallet, row);
    }
  }

  async function change(wallet: Hex, holder: string): Promise<boolean> {
    const token = await store.write((tx) => changeHolder(tx, wallet, holder, known.get(wallet)?.token ?? 0));
    if (token === null) return false;
    changedAt.set(wallet, performance.now());
    known.set(wallet, { wallet, holder, token });
    return true;
  }

  /** Those that have not changed hands elsewhere meanwhile. */
  async function changeAll(those: readonly Hex[], holder: string): Promise<Hex[]> {
    const changed: Hex[] = [];
    for (const wallet of those) if (await change(wallet, holder)) changed.push(wallet);
    return changed;
  }

  /** By wallet; null when no living facilitator has it. */
  async function holdersAmong(alive: ReadonlySet<string>): Promise<Map<Hex, string | null>> {
    const all = new Set([...known.keys(), ...wallets, ...(await openWallets(store.read))]);
    return new Map(
      [...all].sort().map((wallet) => {
        const holder = known.get(wallet)?.holder ?? "";
        return [wallet, alive.has(holder) ? holder : null];
      }),
    );
  }

  return {
    learn,
    /** The token under which this process holds the wallet; null when it does not. */
    tokenOf(wallet: Hex): number | null {
      const row = known.get(wallet);
      return row?.holder === id ? row.token : null;
    },
    held: (): Hex[] => [...known.values()].filter(({ holder }) => holder === id).map(({ wallet }) => wallet),
    clear: (): void => known.clear(),
    /**
     * Takes and gives up what the shares say, and removes rows of facilitators that have been gone for long.
     *
     * @param mayJudge whether all live facilitators have had time to renew
     * @returns what changed
     */
    async shareOut(leases: Leases, mayJudge: boolean): Promise<{ taken: Hex[]; givenUp: Hex[] }> {
      const living = livingOf(leases, mayJudge).filter((each) => !isOnly || each.id === id);
      const { take, giveUp } = changesOf(id, living, await holdersAmong(new Set(living.map((each) => each.id))));
      const givenUp = await changeAll(giveUp, "");
      for (const wallet of givenUp) log.info("wallet_handed_over", { wallet, facilitator: id });
      const taken = await changeAll(take, id);
      for (const wallet of taken) log.info("wallet_taken", { wallet, facilitator: id });
      if (mayJudge && living.length < leases.facilitators.length) {
        await store.write((tx) => removeGone(tx, id, isOnly ? "all" : leases.now));
      }
      return { taken, givenUp };
    },
  };
}
