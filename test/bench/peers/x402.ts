// The official library (x402 1.2.0, which the tests have as a client) as a facilitator: its verify beside ours by one
// core, and its settle with one wallet beside ours on the same chain. It keeps nothing: a settlement that it has sent and
// lost sight of is unknown to it, whereas ours is on the disk before it is sent.
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { startChain, type TestChain } from "../../support/chain/chain.ts";
import { perSecond, type Report } from "../report.ts";
import { BATCH, BLOCK_SECONDS, type Collected, collect, collectPayments, payments, strands } from "../settlements.ts";
import { type Contender, compare, OURS, type Sample, samples } from "../verify.ts";
import {
  type OfficialPayment,
  officialPayment,
  officialSettle,
  officialVerify,
  officialVerifyAlone,
} from "./official.ts";

/** Questions to the node at a time. */
const PARALLEL = 16;

const AT_ONCE = 52;
const IN_TURN = 4;
/** Of a settlement by the library, which itself would wait for three minutes. */
const SETTLE_MS_MAX = 20_000;

/** @param seconds that each contender takes, about */
export async function verification(seconds: number, report: Report): Promise<void> {
  const all = await samples();
  const official = new Map<Sample, OfficialPayment>(all.map((each) => [each, officialPayment(each.signed)]));
  const judgedBy = (verify: (payment: OfficialPayment) => Promise<boolean>) => (sample: Sample) => {
    const payment = official.get(sample);
    return payment !== undefined && verify(payment);
  };
  const chain = await startChain();
  try {
    for (const from of new Set(all.map(({ signed }) => signed.authorization.from))) {
      await chain.fundUsdc(from, 1_000_000n);
    }
    const alone: Contender = {
      name: "x402 verify, the chain's answers at hand",
      judge: judgedBy(officialVerifyAlone()),
      parallel: 1,
    };
    const asking: Contender = {
      name: "x402 verify as it is, with what anvil does for it",
      judge: judgedBy(officialVerify(chain.url)),
      parallel: PARALLEL,
      helpersIn: chain.home,
    };
    const [theirs = {}, whole = {}, ours = {}] = await compare([alone, asking, OURS], all, 3 * seconds);
    const floor = report.add(alone.name, theirs, { note: "by one core" });
    report.add(asking.name, whole, { floor: [floor, "rate"] });
    report.add(OURS.name, ours, { floor: [floor, "rate"] });
  } finally {
    await chain.stop();
  }
}

/** @param atOnce how many at a time */
async function officialCollects(chain: TestChain, count: number, atOnce: number): Promise<Collected> {
  const key = generatePrivateKey();
  await chain.fundEth(privateKeyToAccount(key).address, 10n ** 19n);
  const settle = officialSettle(chain.url, key);
  const all = await payments(chain, count);
  return collect(chain, all, () =>
    strands(all.map(officialPayment), Array.from({ length: atOnce }), async (payment) => {
      const { promise: late, resolve } = Promise.withResolvers<void>();
      const timer = setTimeout(resolve, SETTLE_MS_MAX);
      // It throws where it fails.
      await Promise.race([settle(payment).catch(() => false), late]);
      clearTimeout(timer);
    }),
  );
}

export async function settlements(_seconds: number, report: Report): Promise<void> {
  const chain = await startChain({ blockTimeSeconds: BLOCK_SECONDS });
  try {
    const rows = [];
    for (const [name, count, atOnce] of [
      [`x402 settle, ${AT_ONCE} at once`, AT_ONCE, AT_ONCE],
      ["x402 settle, one after the other", IN_TURN, 1],
    ] as const) {
      const collected = await officialCollects(chain, count, atOnce);
      const note = `${collected.count} of ${count} collected in ${collected.blocks.length} blocks`;
      rows.push(report.add(name, { rate: perSecond(collected) }, { note }));
    }
    // The better one of theirs.
    const floor = rows.toSorted((a, b) => (b.figures.rate ?? 0) - (a.figures.rate ?? 0))[0];
    await collectPayments(chain, report, { batch: BATCH, ...(floor !== undefined && { floor }) });
  } finally {
    await chain.stop();
  }
}
