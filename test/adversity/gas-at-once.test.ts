// The gas that an account's reverted transactions may burn on a day is a bound for what comes at once, too.

import { Database } from "bun:sqlite";
import { expect, test } from "bun:test";
import { join } from "node:path";
import type { TestChain } from "../support/chain/chain.ts";
import type { Facilitator } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { until } from "../support/until.ts";

const VALUE = 10_000n;
const AT_ONCE = 24;
const GAS_WEI = 10n ** 14n;

let chain: TestChain;
let facilitator: Facilitator;

useFacilitator(
  (running) => {
    ({ chain, facilitator } = running);
  },
  { env: { TOLLGATE_DAILY_GAS_WEI: `${GAS_WEI}` } },
);

test("contract wallets that change their mind together burn no more than the account's gas of the day", async () => {
  const owner = newPayer();
  const wallets = await Promise.all(Array.from({ length: AT_ONCE }, () => chain.contractWallet(owner.address)));
  for (const wallet of wallets) await chain.fundUsdc(wallet, VALUE);
  const to = newPayer().address;
  const payments = await Promise.all(wallets.map((from) => signPayment(owner, { from, to, value: VALUE })));
  await chain.setBaseFee(10n ** 9n);
  await chain.mine();
  await chain.pauseMining();
  const answers = payments.map(({ settleRequest }) => facilitator.settle(settleRequest));
  let refused = 0;
  for (const answer of answers) {
    void answer.then(({ status }) => {
      if (status !== 200) refused++;
    });
  }
  await until(() => facilitator.transactions().length + refused >= AT_ONCE);
  // One switch that all of them look at.
  await Promise.all(wallets.map((wallet) => chain.rpc("anvil_setCode", [wallet, "0x00"])));
  await chain.resumeMining();
  await chain.mine();
  await Promise.all(answers);
  using database = new Database(join(facilitator.dataDir, "tollgate.db"), { readonly: true });
  const [day] = database.query<{ gas_burned: string }, []>("select gas_burned from facilitator_days").all();
  const burned = BigInt(day?.gas_burned ?? 0);
  // One that begins below the bound may end above it.
  expect(burned).toBeLessThanOrEqual(2n * GAS_WEI);
});
