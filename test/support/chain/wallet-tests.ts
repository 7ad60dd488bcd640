// What the tests of wallets stand on: for each test a chain of its own, with a relay before its node that can be told
// to fail or to lie, and wallets that stop after the test.

import { afterAll, afterEach, beforeEach, expect } from "bun:test";
import { until } from "../until.ts";
import { startChain, type TestChain } from "./chain.ts";
import { type RpcRelay, startRpcRelay } from "./rpc-relay.ts";
import { type newPayment, removeWallets, startWallet, type TestWallet, type WalletOptions } from "./wallet.ts";

interface Nodes {
  readonly chain: TestChain;
  readonly relay: RpcRelay;
}

/** Hands both to `set` before each test. `prepare` sees the chain before the relay is there. */
export function useChain(
  set: (nodes: Nodes) => void,
  prepare: (chain: TestChain) => Promise<unknown> = async () => {},
) {
  let nodes: Nodes;
  let open: TestWallet[] = [];

  beforeEach(async () => {
    const chain = await startChain();
    await prepare(chain);
    nodes = { chain, relay: await startRpcRelay(chain.url) };
    set(nodes);
  });
  afterEach(async () => {
    await Promise.all(open.map((each) => each.stop()));
    open = [];
    await nodes.relay.stop();
    await nodes.chain.stop();
  });
  afterAll(removeWallets);

  async function start(options: WalletOptions = {}): Promise<TestWallet> {
    const wallet = await startWallet(nodes.chain, options);
    open.push(wallet);
    return wallet;
  }

  return {
    start,
    /** A wallet whose first node is the relay, and these are the next ones. */
    startBehind: (options: WalletOptions = {}, others: readonly string[] = []) =>
      start({ urls: [nodes.relay.url, ...others], timeoutMs: 700, ...options }),
    /** Resolves when so many transactions wait in the pool. */
    untilPending: (count: number) =>
      until(async () => {
        const { pending } = (await nodes.chain.rpc("txpool_status")) as { pending: string };
        return Number(pending) === count;
      }),
    transfersOf: ({ key }: Payment) => nodes.chain.transfers({ nonce: key.nonce }),
    async expectCollected(wallet: TestWallet, payment: Payment): Promise<void> {
      expect(await wallet.ended(payment)).toMatchObject({ status: "settled" });
      expect(await nodes.chain.transfers({ nonce: payment.key.nonce })).toHaveLength(1);
    },
  };
}

export type Payment = Awaited<ReturnType<typeof newPayment>>;
