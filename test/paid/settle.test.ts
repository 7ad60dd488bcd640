// Many settlements at once at one facilitator, as its clients see them over mutual TLS: all collected, each once, for
// those it is meant for, and within the limits of their accounts.
import { describe, expect, test } from "bun:test";
import type { Hex } from "viem";
import type { TestChain } from "../support/chain/chain.ts";
import type { Client, Facilitator, SettleAnswer } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, type PaymentOptions, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import type { RpcRelay } from "../support/chain/rpc-relay.ts";

const SEND = "eth_sendRawTransaction";
const VALUE = 10_000n;
const AT_ONCE = 300;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;

useFacilitator((running) => {
  ({ chain, relay, facilitator } = running);
});

/** Signed by a payer with money for `count` such payments. */
async function payments(
  count: number,
  options: Partial<PaymentOptions> = {},
  payer = newPayer(),
): Promise<SignedPayment[]> {
  const words = { to: newPayer().address, value: VALUE, ...options };
  await chain.fundUsdc(payer.address, words.value * BigInt(count));
  return Promise.all(Array.from({ length: count }, () => signPayment(payer, words)));
}

async function payment(options: Partial<PaymentOptions> = {}, payer = newPayer()): Promise<SignedPayment> {
  const [signed] = await payments(1, options, payer);
  if (signed === undefined) throw new Error("no payment");
  return signed;
}

const settle = ({ settleRequest }: SignedPayment, client?: Client) => facilitator.settle(settleRequest, client);

const outcome = ({ status, body }: SettleAnswer) => [status, body.success];
const COLLECTED = [200, true];
const FAILED = [200, false];
const OVER_LIMIT = [429, undefined];

/** The raw transactions that the node was given since, each counted once, however often it was given it. */
const sentSince = (before: number) =>
  new Set(
    relay
      .params(SEND)
      .slice(before)
      .map(([raw]) => raw),
  );

/** The nonces of one wallet, without those of replacements. */
function walletNonces(wallet: string): number[] {
  const rows = facilitator.transactions().filter((row) => row["wallet"] === wallet.toLowerCase());
  return rows.filter((row) => row["replacement"] === 0).map((row) => Number(row["wallet_nonce"]));
}

test(`${AT_ONCE} payments at once by one key are all collected, within three blocks of the first, with no nonce left out`, async () => {
  // One after the other: each is funded by the token's admin, whose transactions the node numbers as they come.
  const groups: Awaited<ReturnType<typeof payments>>[] = [];
  for (let group = 0; group < 3; group++) groups.push(await payments(AT_ONCE / 3));
  const connections = await Promise.all(Array.from({ length: AT_ONCE }, () => facilitator.connect()));
  const [wallet = "0x"] = facilitator.signers;
  await chain.pauseMining();
  try {
    const all = groups.flat().map(({ settleRequest }, index) => connections[index]?.settle(settleRequest));
    const [answers] = await Promise.all([Promise.all(all), chain.mineBySent(wallet, AT_ONCE, 3)]);
    const collected = answers.filter((answer) => answer?.status === 200 && answer.body.success);
    expect(collected).toHaveLength(AT_ONCE);
    const hashes = new Set(collected.map((answer) => answer?.body.transaction));
    expect(hashes.size).toBe(AT_ONCE);
    const transfers = (
      await Promise.all(
        groups.map(([first]) => chain.transfers({ ...(first !== undefined && { from: first.authorization.from }) })),
      )
    ).flat();
    expect(new Set(transfers.map((each) => each.nonce)).size).toBe(AT_ONCE);
    expect(transfers).toHaveLength(AT_ONCE);
    const blocks = transfers.map((each) => each.block_number);
    expect(new Set(blocks).size).toBeLessThanOrEqual(3);
    const nonces = walletNonces(wallet);
    expect(nonces).toEqual(nonces.map((_, index) => index));
    expect(Number(await chain.rpc("eth_getTransactionCount", [wallet, "latest"]))).toBe(nonces.length);
  } finally {
    await chain.resumeMining();
    for (const connection of connections) connection.close();
  }
});

describe("one authorization", () => {
  test("is broadcast once for 20 identical requests, and all of them learn its hash", async () => {
    const signed = await payment();
    const before = relay.count(SEND);
    await chain.pauseMining();
    const asking = Array.from({ length: 20 }, () => settle(signed));
    await relay.passed(SEND, before + 1);
    // The others have had their answers by now, but for those that wait for the block.
    const later = await settle(signed);
    expect([later.status, Number(later.retryAfter) > 0]).toEqual([503, true]);
    await chain.resumeMining();
    const answers = await Promise.all(asking);
    const collected = answers.filter(({ status }) => status === 200);
    expect(collected.length).toBeGreaterThan(0);
    for (const answer of collected) expect(outcome(answer)).toEqual(COLLECTED);
    for (const { status, retryAfter } of answers.filter((answer) => !collected.includes(answer))) {
      expect([status, Number(retryAfter) > 0]).toEqual([503, true]);
    }
    const again = await Promise.all(Array.from({ length: 20 }, () => settle(signed)));
    const hashes = new Set([...collected, ...again].map(({ body }) => body.transaction));
    expect(again.map(outcome)).toEqual(Array(20).fill(COLLECTED));
    expect(hashes.size).toBe(1);
    expect(sentSince(before).size).toBe(1);
    const transfers = await chain.transfers({ nonce: signed.authorization.nonce });
    expect(transfers.map((each) => each.transaction_hash)).toEqual([...hashes]);
  });

  /** The same payment asked for otherwise, or another one with its nonce; each signed where it has to be. */
  async function variants(payer: ReturnType<typeof newPayer>, first: SignedPayment) {
    const { nonce, to, validAfter, validBefore } = first.authorization;
    const same = {
      nonce,
      to,
      value: VALUE,
      validAfter: BigInt(validAfter),
      validBefore: BigInt(validBefore),
    };
    const sign = async (options: Partial<PaymentOptions>) =>
      (await signPayment(payer, { ...same, ...options })).settleRequest;
    return {
      "another resource": await sign({ requirements: { resource: "https://gateway.test/elsewhere" } }),
      "a higher price": await sign({ requirements: { maxAmountRequired: `${VALUE + 1n}` } }),
      "another time limit": await sign({ requirements: { maxTimeoutSeconds: 1 } }),
      "another payee": await sign({ to: newPayer().address }),
      "another value": await sign({ value: VALUE - 1n }),
      "another end": await sign({ validBefore: BigInt(validBefore) + 1n }),
      "another beginning": await sign({ validAfter: BigInt(validAfter) - 1n }),
    };
  }

  test("is never a success for other requirements or for another account, which learn of its transaction", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    await chain.fundUsdc(payer.address, 10n * VALUE);
    const others = await variants(payer, signed);
    const stranger = await facilitator.addAccount("stranger");
    const ask = async () => {
      const answers = await Promise.all([
        ...Object.entries(others).map(async ([name, request]) => [name, await facilitator.settle(request)] as const),
        settle(signed, stranger).then((answer) => ["another account", answer] as const),
      ]);
      return answers.map(([name, answer]) => [name, ...outcome(answer), answer.body.transaction]);
    };
    const before = relay.count(SEND);
    await chain.pauseMining();
    const asking = settle(signed);
    await relay.passed(SEND, before + 1);
    const hash = facilitator.payment(signed.authorization.nonce)?.["transaction_hash"];
    expect(hash).toStartWith("0x");
    const nobody = [...Object.keys(others), "another account"].map((name) => [name, ...FAILED, hash]);
    expect(await ask()).toEqual(nobody);
    // Whoever only knows payer and nonce has nothing to show for it.
    const { paymentPayload } = signed.settleRequest;
    const payload = { ...paymentPayload.payload, signature: `0x${"11".repeat(65)}` };
    const forged = { ...signed.settleRequest, paymentPayload: { ...paymentPayload, payload } };
    expect((await facilitator.settle(forged, stranger)).body).toMatchObject({ transaction: "" });
    await chain.resumeMining();
    const first = await asking;
    expect(outcome(first)).toEqual(COLLECTED);
    expect(first.body.transaction).toBe(hash);
    expect(await ask()).toEqual(nobody);
    expect(sentSince(before).size).toBe(1);
    expect(await chain.transfers({ from: payer.address })).toHaveLength(1);
  });

  test("of which several forms come at once is collected in one of them", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    await chain.fundUsdc(payer.address, 10n * VALUE);
    const stranger = await facilitator.addAccount("rival");
    const requests = Object.values(await variants(payer, signed));
    const answers = await Promise.all([
      ...requests.map((request) => facilitator.settle(request)),
      settle(signed),
      settle(signed, stranger),
    ]);
    expect(answers.filter(({ body }) => body.success === true)).toHaveLength(1);
    expect(await chain.transfers({ from: payer.address })).toHaveLength(1);
  });

  test("is the same in upper and lower case", async () => {
    const signed = await payment();
    const first = await settle(signed);
    expect(outcome(first)).toEqual(COLLECTED);
    const shout = (hex: string) => `0x${hex.slice(2).toUpperCase()}` as Hex;
    const { settleRequest } = signed;
    const { payload } = settleRequest.paymentPayload;
    const { from, to, nonce } = payload.authorization;
    const again = await facilitator.settle({
      ...settleRequest,
      paymentPayload: {
        ...settleRequest.paymentPayload,
        payload: {
          signature: shout(payload.signature),
          authorization: { ...payload.authorization, from: shout(from), to: shout(to), nonce: shout(nonce) },
        },
      },
      paymentRequirements: { ...settleRequest.paymentRequirements, payTo: shout(to) },
    });
    expect(again.body).toEqual(first.body);
  });
});

describe("an account's limits", () => {
  test("hold to the unit: one transaction, and the whole day", async () => {
    const limited = await facilitator.addAccount("limited", {
      maxPerTransaction: VALUE,
      dailyCeiling: 2n * VALUE,
    });
    const ask = async (value: bigint) => outcome(await settle(await payment({ value }), limited));
    expect(await ask(VALUE + 1n)).toEqual(OVER_LIMIT);
    expect(await ask(VALUE)).toEqual(COLLECTED);
    expect(await ask(VALUE - 100n)).toEqual(COLLECTED);
    expect(await ask(101n)).toEqual(OVER_LIMIT);
    expect(await ask(100n)).toEqual(COLLECTED);
    expect(await ask(100n)).toEqual(OVER_LIMIT);
    expect(facilitator.reserved("limited")).toBe(2n * VALUE);
  });

  test("are the deployment's where it has none of its own", async () => {
    const most = 10_000_000n;
    expect(outcome(await settle(await payment({ value: most + 1n })))).toEqual(OVER_LIMIT);
    expect(outcome(await settle(await payment({ value: most })))).toEqual(COLLECTED);
  });

  test("are not for another network or asset", async () => {
    const asset = newPayer().address;
    for (const options of [{ requirements: { asset } }, { network: "base-sepolia" }] as const) {
      expect(outcome(await settle(await payment(options)))).toEqual(OVER_LIMIT);
    }
  });

  test("are not exceeded by 50 requests at once", async () => {
    const raced = await facilitator.addAccount("raced", { dailyCeiling: 10n * VALUE });
    const before = relay.count(SEND);
    const all = await payments(50);
    const answers = await Promise.all(all.map((each) => settle(each, raced)));
    const count = (wanted: unknown[]) => answers.filter((answer) => Bun.deepEquals(outcome(answer), wanted)).length;
    expect([count(COLLECTED), count(OVER_LIMIT)]).toEqual([10, 40]);
    expect(facilitator.reserved("raced")).toBe(10n * VALUE);
    expect(sentSince(before).size).toBe(10);
    const [first] = all;
    expect(await chain.transfers({ from: first?.authorization.from ?? "0x" })).toHaveLength(10);
  });

  test("get back what was declined before the broadcast, and not what reverted on chain", async () => {
    const narrow = await facilitator.addAccount("narrow", { dailyCeiling: VALUE });
    const [early, late, good] = [await payment(), await payment(), await payment()];
    await chain.blacklist(early.authorization.from);
    expect(outcome(await settle(early, narrow))).toEqual(FAILED);
    expect(facilitator.reserved("narrow")).toBe(0n);

    const before = relay.count(SEND);
    await chain.pauseMining();
    const losing = settle(late, narrow);
    await relay.passed(SEND, before + 1);
    expect(facilitator.reserved("narrow")).toBe(VALUE);
    expect(outcome(await settle(good, narrow))).toEqual(OVER_LIMIT);
    await chain.blacklist(late.authorization.from);
    await chain.resumeMining();
    expect(outcome(await losing)).toEqual(FAILED);
    expect(facilitator.reserved("narrow")).toBe(VALUE);
    expect(outcome(await settle(good, narrow))).toEqual(OVER_LIMIT);
  });
});

describe("an account", () => {
  test("that is disabled is refused at once, on the connection that it has open", async () => {
    const client = await facilitator.addAccount("dismissed");
    const connection = await facilitator.connect(client);
    const [first, second] = await payments(2);
    expect(outcome(await connection.settle(first?.settleRequest))).toEqual(COLLECTED);
    expect((await facilitator.run("account", "disable", "dismissed")).code).toBe(0);
    // What it has settled it learns no more either.
    expect((await connection.settle(first?.settleRequest)).status).toBe(403);
    expect((await connection.settle(second?.settleRequest)).status).toBe(403);
    expect((await facilitator.settle(second?.settleRequest, client)).status).toBe(403);
    expect((await facilitator.run("account", "enable", "dismissed")).code).toBe(0);
    expect(outcome(await connection.settle(second?.settleRequest))).toEqual(COLLECTED);
    connection.close();
  });

  test("that hangs up is settled for all the same, once", async () => {
    const signed = await payment();
    const before = relay.count(SEND);
    await chain.pauseMining();
    const connection = await facilitator.connect();
    const broken = connection.settle(signed.settleRequest).catch(() => "broken off");
    await relay.passed(SEND, before + 1);
    connection.close();
    expect(await broken).toBe("broken off");
    await chain.resumeMining();
    // The next request waits for the block with whoever is still there, or is told to come again.
    let answer = await settle(signed);
    while (answer.status === 503) answer = await settle(signed);
    expect(outcome(answer)).toEqual(COLLECTED);
    expect(sentSince(before).size).toBe(1);
    expect(await chain.transfers({ nonce: signed.authorization.nonce })).toHaveLength(1);
  });
});
