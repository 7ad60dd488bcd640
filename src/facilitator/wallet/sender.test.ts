import { expect, test } from "bun:test";
import { generatePrivateKey } from "viem/accounts";
import { NO_LEASES } from "../../../test/support/chain/wallet.ts";
import { BASE } from "../../../test/support/network.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import type { Chain } from "../../chain/chain.ts";
import { silentLog } from "../../core/log.ts";
import { createSender, type SendJob } from "./sender.ts";
import { createLocalSigner } from "./signer.ts";

const JOB = {
  payment: {
    key: {},
    claim: "c",
    authorization: {
      from: `0x${"11".repeat(20)}`,
      to: `0x${"22".repeat(20)}`,
      value: 1n,
      validAfter: 0n,
      validBefore: 9n,
      nonce: `0x${"44".repeat(32)}`,
    },
    signature: `0x${"33".repeat(64)}1b`,
  },
  gas: 1n,
  again: false,
  mayShare: false,
} as unknown as SendJob;

test("a next nonce that is doubted while a sender looks at the fees is not believed after its batch", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const tipped = Promise.withResolvers<void>();
  let looks = () => {};
  const chain = {
    network: BASE,
    newest: async () => ({ number: 1, baseFee: 1n }),
    async tip() {
      looks();
      return { suggested: 1n, least: 1n, most: 1n };
    },
    transactionCount: async () => 0,
  } as unknown as Chain;
  const sender = createSender({
    signer: createLocalSigner(BASE, generatePrivateKey()),
    chain,
    // The batch counts as stored.
    store: { ...store, write: async () => undefined as never },
    clock: { now: () => 1 },
    log: silentLog,
    limits: { maxFee: 10n ** 12n, batch: 0 },
    leases: NO_LEASES,
    pendingNonces: { add: () => undefined as never, of: () => undefined, reach: () => 9 },
    wake() {},
  });
  try {
    await sender.send(JOB);
    expect(sender.next()).toBe(1);
    looks = () => {
      sender.resynchronise();
      tipped.resolve();
    };
    await Promise.all([sender.send(JOB), tipped.promise]);
    expect(sender.next()).toBeNull();
  } finally {
    await store.close();
    place.remove();
  }
});
