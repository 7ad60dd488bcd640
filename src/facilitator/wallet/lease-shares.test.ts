// Facilitators that each decide for themselves, in any order, and what comes of it.
import { expect, test } from "bun:test";
import fc from "fast-check";
import type { Hex } from "../../x402/types.ts";
import { changesOf, type LivingFacilitator } from "./leases.ts";

const WALLETS: readonly Hex[] = ["0x01", "0x02", "0x03", "0x04", "0x05", "0x06", "0x07"];
const IDS = ["a", "b", "c", "d"];
/** Each round may move one wallet of each. */
const ROUNDS_MAX = 40;

const facilitators = (wallets: fc.Arbitrary<Hex[]>) => {
  const written = wallets.map((all) => all.join(" "));
  return fc.uniqueArray(fc.record({ id: fc.constantFrom(...IDS), wallets: written, is_able: fc.boolean() }), {
    selector: ({ id }) => id,
    minLength: 1,
  });
};

/** What is held when nobody changes anything any more; the one of the turn decides from what all see. */
function settled(
  living: readonly LivingFacilitator[],
  from: ReadonlyMap<Hex, string | null>,
  order: readonly number[],
) {
  const holders = new Map(from);
  for (let round = 0; round < ROUNDS_MAX; round++) {
    let changes = 0;
    for (const turn of [...order, ...living.keys()]) {
      const { id } = living[turn % living.length]!;
      const { take, giveUp } = changesOf(id, living, holders);
      for (const wallet of take) expect(holders.get(wallet)).toBeNull();
      for (const wallet of giveUp) expect(holders.get(wallet)).toBe(id);
      for (const wallet of take) holders.set(wallet, id);
      for (const wallet of giveUp) holders.set(wallet, null);
      changes += take.length + giveUp.length;
    }
    if (changes === 0) return holders;
  }
  throw new Error("they never come to rest");
}

const start = (living: fc.Arbitrary<LivingFacilitator[]>) =>
  living.chain((those) =>
    fc.record({
      living: fc.constant(those),
      from: fc.tuple(...WALLETS.map(() => fc.constantFrom(null, ...those.map(({ id }) => id)))),
      order: fc.array(fc.nat({ max: 20 }), { maxLength: 8 }),
    }),
  );

const holdersFrom = (from: readonly (string | null)[]) =>
  new Map(WALLETS.map((wallet, index) => [wallet, from[index] ?? null]));

test("wallets that all can sign for come to rest in equal shares, and only with those that are able", () => {
  const all = start(facilitators(fc.constant([...WALLETS])));
  fc.assert(
    fc.property(all, ({ living, from, order }) => {
      const holders = settled(living, holdersFrom(from), order);
      const able = living.filter(({ is_able }) => is_able);
      if (able.length === 0) return;
      const counts = able.map(({ id }) => [...holders.values()].filter((holder) => holder === id).length);
      expect(counts.reduce((sum, count) => sum + count, 0)).toBe(WALLETS.length);
      expect(Math.max(...counts) - Math.min(...counts)).toBeLessThanOrEqual(1);
    }),
  );
});

test("every wallet comes to rest with one that can sign for it and is able to, if there is any", () => {
  const some = start(facilitators(fc.subarray([...WALLETS])));
  fc.assert(
    fc.property(some, ({ living, from, order }) => {
      for (const [wallet, holder] of settled(living, holdersFrom(from), order)) {
        const signing = living.filter(({ wallets }) => wallets?.split(" ").includes(wallet));
        const able = signing.filter(({ is_able }) => is_able);
        const best = able.length > 0 ? able : signing.length > 0 ? signing : living;
        expect(living.map(({ id }) => id)).toContain(holder!);
        if (signing.length > 0) expect(best.map(({ id }) => id)).toContain(holder!);
      }
    }),
  );
});
