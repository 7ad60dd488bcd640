// A facilitator's wallet on a real chain with a database of its own, and payments that are claimed as the
// facilitator claims them. A crash leaves the wallet behind and opens a second one on the same database.

import type { Hex } from "viem";
import { generatePrivateKey } from "viem/accounts";
import { type Chain, createChain } from "../../../src/chain/chain.ts";
import { type Log, silentLog } from "../../../src/core/log.ts";
import { silentMeters } from "../../../src/core/meters.ts";
import { systemClock } from "../../../src/core/time.ts";
import { createPaymentSpans } from "../../../src/facilitator/payments/payment-spans.ts";
import { type ClaimedPayment, claimPayment, storedPayment } from "../../../src/facilitator/payments/payments.ts";
import { createSettlementWaiters } from "../../../src/facilitator/settle/settle.ts";
import type { WalletLeases } from "../../../src/facilitator/wallet/leases.ts";
import { createLocalSigner, type Signer } from "../../../src/facilitator/wallet/signer.ts";
import { createWallet, type WalletOptions as ProductOptions } from "../../../src/facilitator/wallet/wallet.ts";
import { createOutbound } from "../../../src/http/client/outbound.ts";
import type { Store } from "../../../src/storage/store.ts";
import { BASE } from "../network.ts";
import { sqlitePlace } from "../stores/stores.ts";
import type { TestChain } from "./chain.ts";
import { newPayer, signPayment } from "./payments.ts";
import { UNMEASURED } from "./settling.ts";

const lower = (text: string): Hex => `0x${text.slice(2).toLowerCase()}`;
const ETHER = 10n ** 18n;
export const outbound = createOutbound({ rules: null, extraCa: null });

export interface WalletOptions {
  readonly urls?: readonly string[];
  readonly signers?: readonly Signer[];
  readonly limits?: Partial<ProductOptions["limits"]>;
  readonly store?: Store;
  /** Without leases, as in versions that know of none: it works for all wallets, whoever else does. */
  readonly leases?: WalletLeases;
  readonly wrap?: (chain: Chain) => Chain;
  readonly log?: Log;
  readonly timeoutMs?: number;
}

export const NO_LEASES: WalletLeases = {
  start: async () => {},
  stop: async () => {},
  holds: () => true,
  fence: async () => {},
  isAlone: () => true,
};

const places = new Set<{ remove(): void }>();

/** Removes the databases of all wallets. */
export function removeWallets(): void {
  for (const place of places) place.remove();
  places.clear();
}

export async function fundedSigner(testChain: TestChain, wei = 10n * ETHER): Promise<Signer> {
  const signer = createLocalSigner(BASE, generatePrivateKey());
  await testChain.fundEth(signer.address, wei);
  return signer;
}

/** With one funded key, unless others are given. */
export async function startWallet(testChain: TestChain, options: WalletOptions = {}) {
  const place = sqlitePlace();
  if (options.store === undefined) places.add(place);
  const store = options.store ?? (await place.open());
  const { log = silentLog, urls = [testChain.url], timeoutMs = 5000 } = options;
  const signers = options.signers ?? [await fundedSigner(testChain)];
  const real = createChain({ network: BASE, urls, outbound, log, timeoutMs });
  const chain = options.wrap?.(real) ?? real;
  const outcomes = createSettlementWaiters(store);
  const wallet = createWallet({
    chain,
    store,
    clock: systemClock,
    log,
    signers,
    leases: options.leases ?? NO_LEASES,
    outcomes,
    meters: silentMeters,
    spans: createPaymentSpans(null),
    limits: {
      gasLowWaterWei: 10n ** 15n,
      dailyGasAllWei: 0n,
      maxFee: 50n * 10n ** 9n,
      confirmations: 12,
      batch: 0,
      ...options.limits,
    },
  });
  await wallet.start();
  const rows = async () => {
    const t = store.read.tables.facilitatorTransactions;
    const found = await store.read.db.select().from(t);
    return found.sort((a, b) => a.wallet_nonce - b.wallet_nonce || a.replacement - b.replacement);
  };
  return {
    wallet,
    chain,
    store,
    signers,
    rows,
    address: addressOf(signers),
    payment: (payment: ClaimedPayment) => storedPayment(store.read, payment.key),
    claim: (payment: ClaimedPayment) => store.write((tx) => claimPayment(tx, claimOf(payment), systemClock.now())),
    /** Without a simulation. */
    send: (payment: ClaimedPayment) =>
      wallet.send(payment, { limit: 120_000n, from: addressOf(signers), mayShare: true }),
    /** Simulates, claims and sends. */
    async collect(payment: ClaimedPayment) {
      const simulation = await wallet.simulate(payment.authorization, payment.signature);
      if (!simulation.ok) throw new Error(simulation.reason);
      await store.write((tx) => claimPayment(tx, claimOf(payment), systemClock.now()));
      await wallet.send(payment, simulation.gas);
    },
    /** The payment as it has ended, or as it is when the time is over. */
    ended: (payment: ClaimedPayment, ms = 40_000) => outcomes.wait(payment.key, ms),
    async stop() {
      await wallet.stop();
      if (options.store === undefined) await store.close();
    },
  };
}

function addressOf([first]: readonly Signer[]): Hex {
  if (first === undefined) throw new Error("a wallet without a key");
  return first.address;
}

export type TestWallet = Awaited<ReturnType<typeof startWallet>>;

function claimOf(payment: ClaimedPayment) {
  return { ...payment, account: "acme", requirements: "{}", ...UNMEASURED };
}

export interface PaymentWords {
  readonly payer?: ReturnType<typeof newPayer>;
  readonly from?: Hex;
  readonly to?: Hex;
  readonly value?: bigint;
  readonly validAfter?: bigint | number;
  readonly validBefore?: bigint | number;
  readonly form?: "plain" | "zero" | "high-s";
  readonly signature?: Hex;
}

/** A signed payment of a payer that has the money, unless another payer is given. */
export async function newPayment(testChain: TestChain, words: PaymentWords = {}) {
  const payer = words.payer ?? newPayer();
  const { to = newPayer().address, value = 1000n } = words;
  if (words.payer === undefined) await testChain.fundUsdc(words.from ?? payer.address, value);
  const { authorization, signature } = await signPayment(payer, { ...words, to, value });
  const nonce = lower(authorization.nonce);
  const from = lower(authorization.from);
  return {
    payer,
    claim: crypto.randomUUID(),
    key: { chain_id: BASE.chainId, token: BASE.token.key, payer: from, nonce },
    authorization: {
      from,
      to: lower(to),
      value,
      validAfter: BigInt(authorization.validAfter),
      validBefore: BigInt(authorization.validBefore),
      nonce,
    },
    signature: lower(words.signature ?? signature),
  };
}
