// Nodes that do wrong and wallets that run dry, under a paid call through both wings: its caller gets the call or a
// pending one, never a refusal, and in the end one transfer has paid for one call.
import { afterAll, afterEach, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { type PaidCall, startWings, type Wings } from "../support/paying.ts";
import type { RpcFault } from "../support/rpc-relay.ts";

setDefaultTimeout(60_000);

const ESTIMATE = "eth_estimateGas";
const SEND = "eth_sendRawTransaction";
const RECEIPT = "eth_getTransactionReceipt";
const GWEI = 10n ** 9n;

let wings: Wings;
beforeAll(async () => {
  wings = await startWings({ facilitatorEnv: { TOLLGATE_INCLUSION_TIMEOUT_MS: "2500" } });
});
afterEach(() => wings?.relay.heal());
afterAll(() => wings?.stop());

async function accepted(call: PaidCall): Promise<string> {
  const answer = await call.send();
  expect([answer.status, answer.text]).toEqual([202, expect.any(String)]);
  return answer.body.invocation_id;
}

/** The call ends as it should, and so does the money. */
async function expectServedOnce(call: PaidCall, id: string): Promise<void> {
  const view = await call.until(id, ({ status }) => status === "succeeded" || status === "failed");
  expect(view).toMatchObject({ status: "succeeded", settlement: { status: "settled" } });
  const transfers = await wings.chain.transfers({ from: call.payment.authorization.from });
  expect(transfers).toMatchObject([{ transaction_hash: view.settlement.tx_hash }]);
  expect(call.arrivals()).toBe(1);
}

/** What a caller of the facilitator is told while it can do nothing. */
async function expectUnavailable(reason: string): Promise<void> {
  const { facilitator, paidCall } = wings;
  const health = await fetch(`${facilitator.openUrl}/healthz`);
  expect([health.status, await health.json()]).toEqual([503, { status: "unavailable", reason }]);
  const { payment } = await paidCall();
  const answer = await facilitator.settle(payment.settleRequest);
  expect([answer.status, Number(answer.retryAfter) > 0, Object.keys(answer.body)]).toEqual([
    503,
    true,
    ["error"],
  ]);
  expect(facilitator.payment(payment.authorization.nonce)).toBeNull();
}

/** Readiness is looked at about once a second. */
async function untilReady(ready: boolean): Promise<void> {
  const end = performance.now() + 10_000;
  while ((await fetch(`${wings.facilitator.openUrl}/healthz`)).ok !== ready) {
    if (performance.now() > end) throw new Error(`never ${ready ? "ready" : "unready"}`);
    await Bun.sleep(50);
  }
}

describe("a node that", () => {
  const CASES: readonly (readonly [name: string, method: string, fault: RpcFault, times: number])[] = [
    ["takes a transaction and then errors", SEND, { kind: "error", after: true }, 1],
    ["takes a transaction and then breaks off", SEND, { kind: "break", after: true }, 1],
    ["takes a transaction and then falls silent", SEND, { kind: "hang", after: true }, 1],
    ["errors instead of taking a transaction", SEND, { kind: "error" }, 1],
    ["says that it knows it already", SEND, { kind: "error", after: true, message: "already known" }, 1],
    [
      "says nonce too low of one that it took",
      SEND,
      { kind: "error", after: true, message: "nonce too low" },
      1,
    ],
    [
      "says replacement underpriced of one that it took",
      SEND,
      { kind: "error", after: true, message: "replacement transaction underpriced" },
      1,
    ],
    ["answers with a page to a simulation", ESTIMATE, { kind: "page", status: 200 }, 1],
    ["answers with garbage to a simulation", ESTIMATE, { kind: "garbage", text: "{]" }, 1],
    ["errors for a while on receipts", RECEIPT, { kind: "error" }, 2],
    ["answers with the receipt of another", RECEIPT, { kind: "result", result: {} }, 2],
    ["limits the rate", "*", { kind: "page", status: 429 }, 3],
  ];

  test.each(CASES)("%s: collected once, called once", async (_name, method, fault, times) => {
    const call = await wings.paidCall();
    wings.relay.on(method, fault, times);
    await expectServedOnce(call, await accepted(call));
  });

  test("lies behind by blocks: collected once, called once", async () => {
    const call = await wings.paidCall();
    await wings.chain.mine(3);
    wings.relay.behind(3);
    const answering = accepted(call);
    const mining = setInterval(() => void wings.chain.mine(), 200);
    try {
      await expectServedOnce(call, await answering);
    } finally {
      clearInterval(mining);
    }
  });

  test("is away: unavailable, then the call that came meanwhile is paid for and served", async () => {
    const call = await wings.paidCall();
    await wings.relay.refuse();
    await untilReady(false);
    await expectUnavailable("rpc unreachable");
    const id = await accepted(call);
    expect(await call.view(id)).toMatchObject({ status: "pending", settlement: { status: "pending" } });
    expect(call.arrivals()).toBe(0);
    await wings.relay.restore();
    await expectServedOnce(call, id);
  });
});

test("an empty gas wallet: unavailable, then the call that came meanwhile is paid for and served", async () => {
  const { chain, facilitator } = wings;
  const [wallet = "0x"] = facilitator.signers;
  const call = await wings.paidCall();
  await chain.fundEth(wallet, 0n);
  await untilReady(false);
  await expectUnavailable("gas wallet low");
  const id = await accepted(call);
  expect((await call.view(id)).settlement).toMatchObject({ status: "pending" });
  await chain.fundEth(wallet, 10n ** 18n);
  await expectServedOnce(call, id);
});

test("a base fee above the cap: the call waits and costs one transfer when the fee has come down", async () => {
  const { chain } = wings;
  const call = await wings.paidCall();
  await chain.pauseMining();
  await chain.setBaseFee(50n * GWEI);
  await chain.mine();
  const id = await accepted(call);
  expect((await call.view(id)).settlement).toMatchObject({ status: "pending" });
  expect(call.arrivals()).toBe(0);
  await chain.setBaseFee(GWEI / 100n);
  await chain.mine();
  await chain.resumeMining();
  const mining = setInterval(() => void chain.mine(), 200);
  try {
    await expectServedOnce(call, id);
  } finally {
    clearInterval(mining);
  }
});
