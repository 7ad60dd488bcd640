// Payers and payees who make it hard, on the real token: what each comes to at the facilitator, before the broadcast
// and after it. Outside every failure reads the same; the exact reason is in the log and in the store.
import { describe, expect, test } from "bun:test";
import type { PrivateKeyAccount } from "viem/accounts";
import type { TestChain } from "../support/chain/chain.ts";
import type { Facilitator, SettleAnswer } from "../support/chain/facilitator.ts";
import { useFacilitator } from "../support/chain/facilitator-tests.ts";
import { newPayer, type PaymentOptions, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import type { RpcRelay } from "../support/chain/rpc-relay.ts";

const VALUE = 10_000n;
const LOGGED_MS_MAX = 5_000;

let chain: TestChain;
let relay: RpcRelay;
let facilitator: Facilitator;

useFacilitator((running) => {
  ({ chain, relay, facilitator } = running);
});

/** Signed by a payer with money, for a payee that never had any. */
async function payment(options: Partial<PaymentOptions> = {}, payer = newPayer()): Promise<SignedPayment> {
  await chain.fundUsdc(options.from ?? payer.address, VALUE);
  return signPayment(payer, { to: newPayer().address, value: VALUE, ...options });
}

const settle = ({ settleRequest }: SignedPayment) => facilitator.settle(settleRequest);

async function expectSettled(answer: SettleAnswer, { authorization }: SignedPayment): Promise<void> {
  expect([answer.status, answer.body.success]).toEqual([200, true]);
  const { from, to, nonce } = authorization;
  const transfers = await chain.transfers({ nonce });
  expect(transfers).toEqual([
    expect.objectContaining({
      from: from.toLowerCase(),
      to: to.toLowerCase(),
      value: VALUE,
      transaction_hash: answer.body.transaction,
    }),
  ]);
  expect(facilitator.payment(nonce)).toMatchObject({
    status: "settled",
    transaction_hash: answer.body.transaction,
    block_hash: transfers[0]?.block_hash,
  });
}

/** The log is written behind the answer. */
async function logged(event: string, nonce: string): Promise<Readonly<Record<string, unknown>>> {
  const end = performance.now() + LOGGED_MS_MAX;
  for (;;) {
    const line = facilitator.lines(event).find((each) => each["nonce"] === nonce);
    if (line !== undefined) return line;
    if (performance.now() > end) throw new Error(`nothing logged of ${nonce}`);
    await Bun.sleep(20);
  }
}

/** A failure as everybody sees it, with nothing moved. */
async function expectFailure(answer: SettleAnswer, { authorization }: SignedPayment): Promise<void> {
  expect(answer.status).toBe(200);
  expect(answer.body).toEqual({
    success: false,
    errorReason: "payment could not be collected",
    transaction: "",
    network: "base",
    payer: authorization.from.toLowerCase(),
  });
  const { to, nonce } = authorization;
  expect(await chain.transfers({ to, nonce })).toEqual([]);
}

async function expectRefused(answer: SettleAnswer, signed: SignedPayment, reason: RegExp): Promise<void> {
  await expectFailure(answer, signed);
  const { nonce } = signed.authorization;
  expect(facilitator.refusal(nonce)).toMatch(reason);
  expect(facilitator.payment(nonce)).toBeNull();
  expect((await logged("payment_refused", nonce))["reason"]).toMatch(reason);
}

/** At the beginning of a second, so that all of a test lies in it. */
async function wholeSecond(): Promise<number> {
  const before = Math.floor(Date.now() / 1000);
  while (Math.floor(Date.now() / 1000) === before) await Bun.sleep(1000 - (Date.now() % 1000));
  return Math.floor(Date.now() / 1000);
}

/** Settles what a new second makes; another one if the answer has come too late to tell anything. */
async function settleInTime(make: (second: number) => Promise<SignedPayment>): Promise<[SettleAnswer, SignedPayment]> {
  for (;;) {
    const second = await wholeSecond();
    const signed = await make(second);
    const answer = await settle(signed);
    if (Math.floor(Date.now() / 1000) === second) return [answer, signed];
  }
}

describe("a payment", () => {
  test("is collected by a payee that never held the token, and by one that does", async () => {
    const first = await payment();
    await expectSettled(await settle(first), first);
    const second = await payment({ to: first.authorization.to });
    await expectSettled(await settle(second), second);
    expect(await chain.usdcOf(first.authorization.to)).toBe(2n * VALUE);
  });

  test("is collected with a signature that has v 0 or 1", async () => {
    const signed = await payment({ form: "zero" });
    await expectSettled(await settle(signed), signed);
  });

  test("is collected from a contract wallet that takes the signature, of 65 bytes or longer", async () => {
    const owner = newPayer();
    const from = await chain.contractWallet(owner.address);
    const plain = await payment({ from }, owner);
    await expectSettled(await settle(plain), plain);
    const bare = await payment({ from }, owner);
    const longer = await signPayment(owner, {
      from,
      to: bare.authorization.to,
      value: VALUE,
      validAfter: BigInt(bare.authorization.validAfter),
      validBefore: BigInt(bare.authorization.validBefore),
      nonce: bare.authorization.nonce,
      signature: `${bare.signature}c0ffee`,
    });
    await expectSettled(await settle(longer), longer);
  });

  test("is collected in a window that opens this second or opened a second ago, and in one that closes soon", async () => {
    for (const distance of [0, -1]) {
      const opened = await payment({ validAfter: (await wholeSecond()) + distance });
      await expectSettled(await settle(opened), opened);
    }
    await expectSettled(...(await settleInTime((second) => payment({ validBefore: second + 5 }))));
  });
});

describe("a payment, before its broadcast,", () => {
  const CASES: readonly (readonly [
    name: string,
    reason: RegExp,
    options: Partial<PaymentOptions>,
    act: (payer: PrivateKeyAccount, signed: SignedPayment) => Promise<unknown>,
  ])[] = [
    [
      "a cancelled authorization",
      /authorization is used or canceled/,
      {},
      (payer, { authorization }) => chain.cancelAuthorization(payer, authorization.nonce),
    ],
    ["an emptied account", /transfer amount exceeds balance/, {}, (payer) => empty(payer)],
    ["a blacklisted payer", /account is blacklisted/, {}, ({ address }) => chain.blacklist(address)],
    [
      "a blacklisted payee",
      /account is blacklisted/,
      {},
      (_payer, { authorization }) => chain.blacklist(authorization.to),
    ],
    [
      "an account with code by EIP-7702, whose plain signature recovers",
      /invalid signature/,
      {},
      (payer) => chain.delegate(payer),
    ],
    ["a signature with high s", /invalid signature/, { form: "high-s" }, async () => {}],
    ["a signature for another domain", /invalid signature/, { domain: { version: "1" } }, async () => {}],
    ["a signature of somebody else", /invalid signature/, { from: newPayer().address }, async () => {}],
  ];

  test.each(CASES)("is refused for %s", async (_name, reason, options, act) => {
    const payer = newPayer();
    const signed = await payment(options, payer);
    await act(payer, signed);
    const before = relay.count("eth_sendRawTransaction");
    const [moved, answer] = [await chain.transfers({ to: signed.authorization.to }), await settle(signed)];
    await expectRefused(answer, signed, reason);
    expect(await chain.transfers({ to: signed.authorization.to })).toEqual(moved);
    expect(relay.count("eth_sendRawTransaction")).toBe(before);
  });

  test("is refused while the token is paused; the same payment is taken afterwards", async () => {
    const signed = await payment();
    await chain.pauseToken();
    try {
      await expectRefused(await settle(signed), signed, /paused/);
    } finally {
      await chain.unpauseToken();
    }
    await expectSettled(await settle(signed), signed);
  });

  test("is refused well before its window opens, and not after it has opened", async () => {
    // The next block's time is known to about two seconds, and what may be good in it is not refused.
    const [answer, signed] = await settleInTime((second) => payment({ validAfter: second + 4 }));
    await expectRefused(answer, signed, /not_yet_valid/);
    while ((await wholeSecond()) <= Number(signed.authorization.validAfter));
    await expectSettled(await settle(signed), signed);
  });

  test("is refused a second before the end of its window, and a second after it", async () => {
    for (const distance of [1, -1]) {
      const signed = await payment({ validBefore: (await wholeSecond()) + distance });
      await expectRefused(await settle(signed), signed, /expired/);
    }
  });
});

/** Everything that the payer has goes to somebody else, by an authorization of its own. */
async function empty(payer: PrivateKeyAccount): Promise<void> {
  const value = await chain.usdcOf(payer.address);
  await chain.collectAsStranger(await signPayment(payer, { to: newPayer().address, value }));
}

describe("a payment, after its broadcast,", () => {
  /** Settled while no block is made until `act` has had the first place in the next one. */
  async function overtaken(
    signed: SignedPayment,
    act: () => Promise<unknown>,
  ): Promise<{ answer: SettleAnswer; hash: unknown }> {
    const sent = relay.count("eth_sendRawTransaction") + 1;
    await chain.pauseMining();
    try {
      const answering = settle(signed);
      await relay.passed("eth_sendRawTransaction", sent);
      const hash = facilitator.payment(signed.authorization.nonce)?.["transaction_hash"];
      await act();
      await chain.mine();
      return { answer: await answering, hash };
    } finally {
      await chain.resumeMining();
    }
  }

  async function expectLost(
    { answer, hash }: { answer: SettleAnswer; hash: unknown },
    signed: SignedPayment,
    reason: RegExp,
  ): Promise<Readonly<Record<string, unknown>>> {
    await expectFailure(answer, signed);
    const { nonce } = signed.authorization;
    expect(hash).toMatch(/^0x[0-9a-f]{64}$/);
    const record = facilitator.payment(nonce);
    expect(record).toMatchObject({ status: "failed", transaction_hash: hash });
    expect(record?.["reason"]).toMatch(reason);
    expect((await logged("payment_failed", nonce))["reason"]).toMatch(reason);
    // Whoever asks again is told the same, though it could be collected now.
    expect((await settle(signed)).body).toEqual(answer.body);
    return record ?? {};
  }

  test("is lost when the account is emptied", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    await expectLost(await overtaken(signed, () => empty(payer)), signed, /transfer amount exceeds balance/);
  });

  test("is lost when the authorization is cancelled", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    const { nonce } = signed.authorization;
    const outcome = await overtaken(signed, () => chain.cancelAuthorization(payer, nonce));
    const { foreign_transaction } = await expectLost(outcome, signed, /cancelled/);
    expect(foreign_transaction).toMatch(/^0x[0-9a-f]{64}$/);
    expect((await logged("payment_failed", nonce))["foreign_transaction"]).toBe(foreign_transaction);
  });

  test("is lost when the payer is blacklisted", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    const outcome = await overtaken(signed, () => chain.blacklist(payer.address));
    await expectLost(outcome, signed, /account is blacklisted/);
  });

  test("is lost when the token is paused", async () => {
    const signed = await payment();
    const outcome = await overtaken(signed, () => chain.pauseToken());
    await chain.unpauseToken();
    await expectLost(outcome, signed, /paused/);
  });

  test("is lost when the payer becomes an account with code", async () => {
    const payer = newPayer();
    const signed = await payment({}, payer);
    await expectLost(await overtaken(signed, () => chain.delegate(payer)), signed, /invalid signature/);
  });

  test("is lost when its time runs out before a block comes", async () => {
    const signed = await payment({ validBefore: Math.floor(Date.now() / 1000) + 5 });
    const late = async () => {
      while (Date.now() / 1000 <= Number(signed.authorization.validBefore)) await wholeSecond();
    };
    await expectLost(await overtaken(signed, late), signed, /expired/);
  });

  test("is lost when somebody else collects it: it is used, and not paid by us", async () => {
    const signed = await payment();
    const { nonce } = signed.authorization;
    let foreign = "";
    const { answer } = await overtaken(signed, async () => {
      foreign = await chain.collectAsStranger(signed);
    });
    expect(answer.body).toMatchObject({ success: false, transaction: "" });
    expect(facilitator.payment(nonce)).toMatchObject({ status: "failed", foreign_transaction: foreign });
    expect((await logged("payment_failed", nonce))["foreign_transaction"]).toBe(foreign);
    expect(await chain.transfers({ nonce })).toMatchObject([{ transaction_hash: foreign }]);
  });
});

test("no signature of a payment and no URL of a node is in the log, not even at its most talkative", async () => {
  await facilitator.stop();
  await facilitator.restart({ TOLLGATE_LOG_LEVEL: "debug" });
  const [good, bad] = [await payment(), await payment({ form: "high-s" })];
  await expectSettled(await settle(good), good);
  await expectFailure(await settle(bad), bad);
  await facilitator.stop();
  const log = facilitator.log();
  expect(log).toContain(good.authorization.nonce);
  for (const { signature } of [good, bad]) expect(log).not.toContain(signature.slice(2, 40));
  // A hash may hold any five digits, so the port counts where no digit or letter is beside it.
  expect(log).not.toMatch(new RegExp(`\\b${new URL(relay.url).port}\\b`));
});
