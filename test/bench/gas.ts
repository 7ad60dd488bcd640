// The gas of a settlement when many wait at once, beside the gas of one payment that is collected alone.
import { startChain } from "../support/chain/chain.ts";
import { startFacilitator } from "../support/chain/facilitator.ts";
import type { Report } from "./report.ts";
import { BATCH, BLOCK_SECONDS, gasOf, payments, settled } from "./settlements.ts";

export async function gas(_seconds: number, report: Report): Promise<void> {
  const chain = await startChain({ blockTimeSeconds: BLOCK_SECONDS });
  try {
    const [first, ...all] = await payments(chain, BATCH + 2);
    const [second, ...others] = all;
    if (first === undefined || second === undefined) throw new Error("there are no payments");
    // The first payment makes the receiver's balance, which none of those after it pays for again.
    await chain.collectAsStranger(first);
    const alone = await gasOf(chain, [await chain.collectAsStranger(second)]);
    const floor = report.add("one payment, collected alone", { gas: alone });

    await using facilitator = await startFacilitator(chain, { env: { TOLLGATE_BATCH: `${BATCH}` } });
    const open = await Promise.all(others.map(async (payment) => [await facilitator.connect(), payment] as const));
    await Promise.all(open.map(([connection, payment]) => settled(connection, payment)));
    for (const [connection] of open) connection.close();
    const from = others[0]?.authorization.from;
    const nonces = new Set(others.map(({ authorization }) => authorization.nonce.toLowerCase()));
    const transfers = (await chain.transfers(from === undefined ? {} : { from })).filter(
      ({ nonce }) => nonce !== null && nonces.has(nonce),
    );
    const hashes = new Set(transfers.map((each) => each.transaction_hash));
    const each = (await gasOf(chain, [...hashes])) / transfers.length;
    const note = `${transfers.length} of ${BATCH} collected in ${hashes.size} transactions`;
    report.add(`each of ${BATCH} that wait together`, { gas: each }, { floor: [floor, "gas"], note });
  } finally {
    await chain.stop();
  }
}
