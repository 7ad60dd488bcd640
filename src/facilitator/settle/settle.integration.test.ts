import { afterAll, beforeAll, expect, test } from "bun:test";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { startChain, type TestChain } from "../../../test/support/chain/chain.ts";
import { newPayer, type PaymentOptions, signPayment, verifiedAtOnce } from "../../../test/support/chain/payments.ts";
import {
  account,
  allPayments,
  answered,
  ending,
  keyOfRequest,
  parsed,
  reservedOn,
} from "../../../test/support/chain/settling.ts";
import { NO_LEASES } from "../../../test/support/chain/wallet.ts";
import { BASE } from "../../../test/support/network.ts";
import { type Place, places } from "../../../test/support/stores/stores.ts";
import { createChain } from "../../chain/chain.ts";
import { createChainTime } from "../../chain/newest-block.ts";
import { silentLog } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import { systemClock } from "../../core/time.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import type { Store } from "../../storage/store.ts";
import { utcDay } from "../payments/guardrails.ts";
import { createPaymentSpans } from "../payments/payment-spans.ts";
import { createLocalSigner } from "../wallet/signer.ts";
import { createWallet, type Wallet } from "../wallet/wallet.ts";
import { createSettle, createSettlementWaiters, type SettlementWaiters } from "./settle.ts";

let node: TestChain;
let place: Place;
let store: Store;
let wallet: Wallet;
let outcomes: SettlementWaiters;
let settle: ReturnType<typeof answered>;
/** The same, for callers that do not wait long. */
let settleSoon: ReturnType<typeof answered>;

beforeAll(async () => {
  node = await startChain();
  place = await places.sqlite();
  store = await place.open();
  const key = generatePrivateKey();
  await node.fundEth(privateKeyToAccount(key).address, 10n ** 18n);
  await node.mine();
  const outbound = createOutbound({ rules: null, extraCa: null });
  const chain = createChain({ network: BASE, urls: [node.url], outbound, log: silentLog });
  outcomes = createSettlementWaiters(store);
  const [meters, spans] = [silentMeters, createPaymentSpans(null)];
  const common = { network: BASE, store, clock: systemClock, log: silentLog, meters, spans, outcomes };
  wallet = createWallet({
    ...common,
    chain,
    signers: [createLocalSigner(BASE, key)],
    leases: NO_LEASES,
    limits: { gasLowWaterWei: 1n, maxFee: 5n * 10n ** 9n, confirmations: 2, batch: 0, dailyGasAllWei: 0n },
  });
  await wallet.start();
  const limits = {
    maxPerTransaction: 10_000n,
    dailyCeiling: 10n ** 9n,
    dailyGasWei: 0n,
    dailyGasAllWei: 0n,
    minValue: 0n,
    inclusionTimeoutMs: 10_000,
  };
  const time = createChainTime({ ...common, chain });
  const parts = {
    wallet,
    verifier: verifiedAtOnce,
    findOwnTransfer: async () => null,
    chain: {
      simulate: wallet.simulate,
      time,
      isSignedByContract: chain.isSignedByContract,
      balanceOf: chain.balanceOf,
      hasCode: chain.hasCode,
      isUsed: chain.isUsed,
    },
  };
  settle = answered(createSettle({ ...common, ...parts, limits }));
  const soon = createSettle({ ...common, ...parts, limits: { ...limits, inclusionTimeoutMs: 250 } });
  settleSoon = answered(soon);
});
afterAll(async () => {
  await wallet.stop();
  await store.close();
  place.remove();
  await node.stop();
});

async function asked(options: Partial<PaymentOptions> & { payer?: ReturnType<typeof newPayer>; usdc?: bigint } = {}) {
  const { payer = newPayer(), usdc = 1_000n, ...rest } = options;
  await node.fundUsdc(options.from ?? payer.address, usdc);
  const signed = await signPayment(payer, { to: newPayer().address, value: 1_000n, ...rest });
  return { payer, signed, request: parsed(signed.settleRequest) };
}

/** What the operator reads: of the claim, or of the refusal before it. */
async function reasonOf(nonce: string): Promise<string | null | undefined> {
  const { db, tables } = store.read;
  const rows = [...(await allPayments(store)), ...(await db.select().from(tables.facilitatorRefusals))];
  return rows.find((row) => row.nonce === nonce)?.reason;
}

test("each payer's payment is judged as the token does: collected, or declined with the reason kept inside", async () => {
  const owner = newPayer();
  const contract = await node.contractWallet(owner.address);
  const cancelled = await asked();
  await node.cancelAuthorization(cancelled.payer, cancelled.signed.authorization.nonce);
  const blacklisted = await asked();
  await node.blacklist(blacklisted.payer.address);
  const delegated = await asked();
  await node.delegate(delegated.payer);
  const stolen = await asked();
  await node.collectAsStranger(stolen.signed);
  const cases = {
    "a plain account": [await asked(), "settled"],
    "v 0 or 1": [await asked({ form: "zero" }), "settled"],
    "a contract wallet": [await asked({ payer: owner, from: contract }), "settled"],
    "high s": [await asked({ form: "high-s" }), "declined"],
    "another's signature": [await asked({ from: newPayer().address }), "declined"],
    "an empty account": [await asked({ usdc: 999n }), "declined"],
    "a cancelled authorization": [cancelled, "declined"],
    "a blacklisted payer": [blacklisted, "declined"],
    "a delegated account": [delegated, "declined"],
    "collected by a stranger": [stolen, "declined"],
  } as const;
  for (const [what, [{ request, signed }, expected]] of Object.entries(cases)) {
    const { nonce } = signed.authorization;
    expect([what, await ending(settle(account(), request))]).toEqual([what, expected]);
    const ours = (await node.transfers({ nonce })).length;
    expect([what, ours]).toEqual([what, expected === "settled" || what === "collected by a stranger" ? 1 : 0]);
    const reason = await reasonOf(nonce);
    expect([what, typeof reason]).toEqual([what, expected === "settled" ? "object" : "string"]);
  }
});

test("twenty equal requests make one transfer, and a retry names the same transaction", async () => {
  const { request, signed } = await asked();
  const answers = await Promise.all(Array.from({ length: 20 }, () => ending(settle(account(), request))));
  expect(answers.filter((answer) => answer !== "unavailable")).toContain("settled");
  const [transfer, ...others] = await node.transfers({ nonce: signed.authorization.nonce });
  expect(others).toEqual([]);
  expect(await settle(account(), request)).toMatchObject({
    success: true,
    transaction: transfer!.transaction_hash,
  });
});

test("without blocks for longer than the inclusion timeout, the answer has the hash that may land, and a later one says that it did", async () => {
  const { request, signed } = await asked();
  await node.pauseMining();
  const first = await ending(settleSoon(account(), request));
  expect(first).toStartWith("unknown 0x");
  expect(await ending(settleSoon(account(), request))).toBe(first);
  const later = ending(outcomes.wait(keyOfRequest(request), 10_000).then(() => settleSoon(account(), request)));
  await node.resumeMining();
  await node.mine();
  expect(await later).toBe("settled");
  const transfers = await node.transfers({ nonce: signed.authorization.nonce });
  expect(transfers.map((each) => `unknown ${each.transaction_hash}`)).toEqual([first]);
});

test("a payment that the chain refuses after all is declined, and keeps its reservation for the day", async () => {
  const { request, signed, payer } = await asked();
  const reserved = () => reservedOn(store.read, "alpha", utcDay(systemClock.now()));
  const before = await reserved();
  await node.pauseMining();
  expect(await ending(settleSoon(account(), request))).toStartWith("unknown");
  expect(await reserved()).toBe(before + 1_000n);
  // It overtakes the payment in the next block.
  await node.blacklist(payer.address);
  const over = outcomes.wait(keyOfRequest(request), 10_000);
  await node.resumeMining();
  await node.mine();
  await over;
  expect(await ending(settle(account(), request))).toBe("declined");
  expect(await reserved()).toBe(before + 1_000n);
  expect(await reasonOf(signed.authorization.nonce)).toContain("blacklisted");
  expect(await node.transfers({ nonce: signed.authorization.nonce })).toEqual([]);
});
