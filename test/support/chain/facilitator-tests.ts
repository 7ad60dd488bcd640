// A facilitator for the tests of a file, on a chain of its own, with a relay before the node that can be told to fail.
import { afterAll, beforeAll } from "bun:test";
import { startChain, type TestChain } from "./chain.ts";
import { type Facilitator, type FacilitatorOptions, startFacilitator } from "./facilitator.ts";
import { type RpcRelay, startRpcRelay } from "./rpc-relay.ts";

interface Running {
  readonly chain: TestChain;
  readonly relay: RpcRelay;
  readonly facilitator: Facilitator;
}

interface Options extends Omit<FacilitatorOptions, "rpcUrls"> {
  /** Blocks come by themselves. */
  readonly blockTimeSeconds?: number;
  /** Sees the relay before the facilitator starts. */
  readonly prepare?: (relay: RpcRelay) => void;
}

/** Hands all of them to `set` before the first test, and ends them after the last. */
export function useFacilitator(set: (running: Running) => void, options: Options = {}): void {
  const { blockTimeSeconds, prepare, ...own } = options;
  let running: Partial<Running> = {};
  beforeAll(async () => {
    const chain = await startChain(blockTimeSeconds === undefined ? {} : { blockTimeSeconds });
    running = { chain };
    const relay = await startRpcRelay(chain.url);
    running = { chain, relay };
    prepare?.(relay);
    const facilitator = await startFacilitator(chain, { rpcUrls: [relay.url], ...own });
    running = { chain, relay, facilitator };
    set({ chain, relay, facilitator });
  });
  afterAll(async () => {
    await running.facilitator?.[Symbol.asyncDispose]();
    await running.relay?.stop();
    await running.chain?.stop();
  });
}
