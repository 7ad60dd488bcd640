import { beforeEach, describe, expect, test } from "bun:test";
import { newPayer, randomNonce } from "../../../test/support/chain/payments.ts";
import {
  account,
  allPayments,
  emptied,
  ending,
  hashOf,
  keyOfRequest,
  NOON,
  PAY_TO,
  request,
  settling,
} from "../../../test/support/chain/settling.ts";
import { useStore } from "../../../test/support/stores/one-store.ts";
import type { Place } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import { Fault } from "../../core/fault.ts";
import type { Store } from "../../storage/store.ts";

const COARSE = "payment could not be collected";

describe.each(["sqlite", "postgres"] as const)("settling on %s, with doubles of chain and wallet", (dialect) => {
  let place: Place;
  let store: Store;
  useStore(dialect, (opened) => {
    ({ place, store } = opened);
  });
  beforeEach(() => emptied(store));

  test("a payment is claimed, sent and settled, and answered with its hash", async () => {
    const service = settling(store);
    const asked = await request({ form: "zero" });
    const { from, nonce } = asked.payment.authorization;
    const hash = hashOf(keyOfRequest(asked));
    expect(await service.settle(account(), asked)).toEqual({
      success: true,
      transaction: hash,
      network: "base",
      payer: from,
    });
    expect(await service.record(asked)).toMatchObject({
      account: "alpha",
      status: "settled",
      payer: from,
      nonce,
      pay_to: PAY_TO,
      value: "1000",
      day: "2025-11-21",
      attempts: 1,
      transaction_hash: hash,
      block_number: 7,
      reason: null,
      ended_at: NOON,
    });
    expect(await service.reserved()).toBe(1_000n);
    // The token takes v 27 and 28 alone.
    expect(service.sends.map((sent) => sent.signature.slice(-2))).not.toContain("00");
    expect(service.sends.map((sent) => sent.signature.slice(-2))).not.toContain("01");
    expect(service.sends).toHaveLength(1);
  });

  test("a retry is told the truth, whatever window, limits, readiness and node say by then", async () => {
    const service = settling(store);
    const asked = await request();
    const first = await service.settle(account(), asked);
    service.clock.time += 3_600_000;
    service.turns.readiness = async () => ({ ready: false, reason: "gas wallet low" });
    service.turns.simulate = async () => {
      throw new Fault("unavailable", "no node");
    };
    expect(await service.settle(account("alpha", 1n, 1n), asked)).toEqual(first);
    expect(service.sends).toHaveLength(1);
    expect(await service.record(asked)).toMatchObject({ attempts: 2 });
  });

  test("the same authorization on other terms, or from another account, is no success, but names its transaction", async () => {
    const service = settling(store);
    const payer = newPayer();
    const nonce = randomNonce();
    const asked = await request({ payer, nonce });
    const { requirements } = asked;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    const others = {
      "another account": [account("beta"), asked],
      "another value": [account(), await request({ payer, nonce, value: 999n })],
      "another recipient": [account(), await request({ payer, nonce, to: `0x${"ab".repeat(20)}` })],
      "another validAfter": [account(), await request({ payer, nonce, validAfter: 1 })],
      "another validBefore": [account(), await request({ payer, nonce, validBefore: NOON / 1000 + 601 })],
      "a wrong signature": [account(), { ...asked, payment: { ...asked.payment, signature: `0x${"11".repeat(65)}` } }],
      "another network": [account(), { ...asked, payment: { ...asked.payment, network: "base-sepolia" } }],
      "another scheme": [account(), { ...asked, payment: { ...asked.payment, scheme: "upto" } }],
      "another price": [account(), { ...asked, requirements: { ...requirements, maxAmountRequired: 1_001n } }],
      "another resource": [account(), { ...asked, requirements: { ...requirements, resource: "https://x.test/" } }],
      "another timeout": [account(), { ...asked, requirements: { ...requirements, maxTimeoutSeconds: 61 } }],
      "another asset": [account(), { ...asked, requirements: { ...requirements, asset: PAY_TO } }],
      "another payTo": [account(), { ...asked, requirements: { ...requirements, payTo: `0x${"0b".repeat(20)}` } }],
      "another required network": [account(), { ...asked, requirements: { ...requirements, network: "base-sepolia" } }],
      "another required scheme": [account(), { ...asked, requirements: { ...requirements, scheme: "upto" } }],
    } as const;
    const hash = hashOf(keyOfRequest(asked));
    for (const [what, [from, other]] of Object.entries(others)) {
      const answer = what === "a wrong signature" ? "declined" : `unknown ${hash}`;
      expect([what, await ending(service.settle(from, other))]).toEqual([what, answer]);
    }
    expect(service.sends).toHaveLength(1);
    // Signed for another chain it is another payment, and so a question of the guardrails.
    const sepolia = { network: "base-sepolia", domain: { chainId: 84_532 } };
    const elsewhere = await request({ payer, nonce, ...sepolia });
    expect(await ending(service.settle(account("gamma"), elsewhere))).toBe("over_limit");
    const kept = (await service.refusals()).map((row) => [row.account, row.attempts]).sort();
    expect(kept).toEqual([
      ["alpha", Object.keys(others).length - 1],
      ["beta", 1],
      ["gamma", 1],
    ]);
    expect(await ending(service.settle(account(), asked))).toBe("settled");
  });

  test("a retry of a contract wallet's payment must come with its very signature", async () => {
    const service = settling(store);
    const asked = await request({ signature: `0x${"ab".repeat(70)}` });
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(service.sends.map((sent) => sent.signature)).toEqual([asked.payment.signature]);
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    const other = { ...asked, payment: { ...asked.payment, signature: `0x${"ac".repeat(70)}` as const } };
    expect(await ending(service.settle(account(), other))).toBe("declined");
    // Unless it is another one of that wallet: then the record is not what was asked for, and has landed.
    service.turns.isSignedByContract = async ({ from }, signature) =>
      from === asked.payment.authorization.from && signature === other.payment.signature;
    expect(await ending(service.settle(account(), other))).toBe(`unknown ${hashOf(keyOfRequest(asked))}`);
  });

  test("the same payment on other terms gets 503 while it is claimed, the hash while it is sent, and no hash once it has failed", async () => {
    const service = settling(store, { inclusionTimeoutMs: 30 });
    const { promise: go, resolve } = Promise.withResolvers<void>();
    const { promise: claimed, resolve: isClaimed } = Promise.withResolvers<void>();
    service.turns.send = async (payment) => {
      isClaimed();
      await go;
      await service.storeSent(payment);
    };
    service.turns.afterSend = async () => {};
    const asked = await request();
    const forged = { ...asked, payment: { ...asked.payment, signature: `0x${"11".repeat(65)}` as const } };
    const asOthers = () => ending(service.settle(account("beta"), asked));
    const asForger = () => ending(service.settle(account("beta"), forged));
    const first = ending(service.settle(account(), asked));
    await claimed;
    expect([await asOthers(), await asForger()]).toEqual(["unavailable", "declined"]);
    resolve();
    expect(await first).toStartWith("un");
    const hash = hashOf(keyOfRequest(asked));
    await until(async () => (await service.record(asked))?.status === "sent");
    expect([await asOthers(), await asForger()]).toEqual([`unknown ${hash}`, "declined"]);
    await service.failed(keyOfRequest(asked));
    expect([await asOthers(), await asForger()]).toEqual(["declined", "declined"]);
  });

  test("of twenty equal requests at once one is sent, and the others are told to come again", async () => {
    const service = settling(store);
    const told: string[] = [];
    const { promise: all, resolve } = Promise.withResolvers<void>();
    const { promise: sent, resolve: isSent } = Promise.withResolvers<void>();
    service.turns.afterSend = async () => isSent();
    let simulations = 0;
    service.turns.simulate = async () => {
      simulations += 1;
      return { ok: true, gas: 1n };
    };
    const asked = await request();
    const answers = Array.from({ length: 20 }, async () => {
      told.push(await ending(service.settle(account(), asked)));
      if (told.length === 19) resolve();
    });
    await Promise.all([all, sent]);
    expect(told).toEqual(Array(19).fill("unavailable"));
    const late = service.settle(account(), asked).catch((error) => error);
    expect(await late).toMatchObject({ kind: "unavailable", retryAfterSeconds: 2 });
    await service.settled(keyOfRequest(asked));
    await Promise.all(answers);
    expect(told.at(-1)).toBe("settled");
    expect([service.sends.length, simulations]).toEqual([1, 1]);
  });

  test("of two accounts that present one payment at once, one collects it", async () => {
    const service = settling(store);
    const asked = await request();
    const answers = ["alpha", "beta"].map((name) => ending(service.settle(account(name), asked)));
    const [collected, other] = (await Promise.all(answers)).sort();
    expect([collected, other]).toEqual(["settled", expect.stringMatching(/^(unavailable|unknown 0x.*)$/)]);
    expect(service.sends).toHaveLength(1);
    expect((await service.reserved("alpha")) + (await service.reserved("beta"))).toBe(1_000n);
  });

  test("what another process collects meanwhile is answered as collected, whatever it looks like by then", async () => {
    const others = await place.open();
    const faster = settling(others);
    const service = settling(store);
    const verdicts = [
      { ok: false, reason: "authorization is used" },
      { ok: true, gas: 1n },
    ] as const;
    for (const verdict of verdicts) {
      const asked = await request();
      service.turns.simulate = async () => {
        await faster.settle(account(), asked);
        return verdict;
      };
      expect(await ending(service.settle(account(undefined, undefined, 2_000n), asked))).toBe("settled");
    }
    expect([service.sends.length, faster.sends.length]).toEqual([0, 2]);
    expect(await service.refusals()).toEqual([]);
    await others.close();
  });

  test("a payment that is not included in time is no success but has the hash that may still land, and later the success", async () => {
    const service = settling(store, { inclusionTimeoutMs: 40 });
    service.turns.afterSend = async () => {};
    const asked = await request();
    const hash = hashOf(keyOfRequest(asked));
    expect(await service.settle(account(), asked)).toMatchObject({
      success: false,
      errorReason: COARSE,
      transaction: hash,
    });
    // The record's time says when a waiter is gone, so it is right after a restart too.
    expect(await ending(settling(store, { inclusionTimeoutMs: 40 }).settle(account(), asked))).toBe("unavailable");
    service.clock.time += 39;
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    service.clock.time += 1;
    expect(await ending(service.settle(account(), asked))).toBe(`unknown ${hash}`);
    expect(await service.reserved()).toBe(1_000n);
    // A clock that is set back does not begin the wait anew.
    service.clock.time -= 3_600_000;
    expect(await ending(service.settle(account(), asked))).toBe(`unknown ${hash}`);
    await service.settled(keyOfRequest(asked));
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(service.sends).toHaveLength(1);
  });

  test("a payment that this process waits for is in flight, however its clock is set meanwhile", async () => {
    const service = settling(store);
    const { promise: sent, resolve } = Promise.withResolvers<void>();
    service.turns.afterSend = async () => resolve();
    const asked = await request();
    const first = ending(service.settle(account(), asked));
    await sent;
    for (const hours of [1, -2]) {
      service.clock.time += hours * 3_600_000;
      expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    }
    await service.settled(keyOfRequest(asked));
    expect(await first).toBe("settled");
  });

  test("a failure after the claim is final, coarse outside, exact in log and store, and frees the ceiling", async () => {
    const service = settling(store);
    service.turns.afterSend = (key) => service.failed(key, "authorization used by another", `0x${"fe".repeat(32)}`);
    const asked = await request();
    const declined = { success: false, errorReason: COARSE, transaction: "", network: "base" };
    expect(await service.settle(account(), asked)).toMatchObject(declined);
    expect(await service.record(asked)).toMatchObject({
      status: "failed",
      reason: "authorization used by another",
      foreign_transaction: `0x${"fe".repeat(32)}`,
    });
    expect(await service.reserved()).toBe(0n);
    expect(await service.settle(account(), asked)).toMatchObject(declined);
    expect(service.sends).toHaveLength(1);
    expect(service.logged).toContainEqual({
      level: "info",
      event: "settlement_answered",
      fields: expect.objectContaining({ account: "alpha", reason: "authorization used by another" }),
    });
  });

  test("no log line holds a signature", async () => {
    const service = settling(store);
    const asked = await request();
    await service.settle(account(), asked);
    await service.settle(account("beta"), asked);
    service.turns.send = async () => {
      throw new Error("no");
    };
    await ending(service.settle(account(), await request({ signature: asked.payment.signature })));
    expect(service.logged).toHaveLength(3);
    expect(Bun.inspect(service.logged, { depth: 10 })).not.toContain(asked.payment.signature.slice(2, 40));
  });

  test("the window is judged with three seconds to spare, to the second", async () => {
    const service = settling(store);
    const now = NOON / 1000;
    const windows = [
      [{ validAfter: now }, "settled"],
      [{ validAfter: now + 1 }, "declined"],
      [{ validBefore: now + 3 }, "settled"],
      [{ validBefore: now + 2 }, "declined"],
      [{ validAfter: 0, validBefore: 2n ** 256n - 1n }, "settled"],
    ] as const;
    for (const [window, expected] of windows) {
      expect([window, await ending(service.settle(account(), await request(window)))]).toEqual([window, expected]);
    }
    expect((await service.refusals()).map((row) => row.reason).sort()).toEqual(["expired", "not_yet_valid"]);
  });

  test("a payment that became too late while it was simulated is not claimed", async () => {
    const service = settling(store);
    service.turns.simulate = async () => {
      service.clock.time += 600_000;
      return { ok: true, gas: 1n };
    };
    expect(await ending(service.settle(account(), await request()))).toBe("declined");
    expect(await allPayments(store)).toEqual([]);
  });

  test("a wrong value, recipient or scheme is declined, and another network or asset is refused by the account's limits", async () => {
    const service = settling(store);
    const cases = [
      [{ requirements: { maxAmountRequired: "1000" } }, "settled"],
      [{ requirements: { maxAmountRequired: "1001" } }, "settled"],
      [{ requirements: { maxAmountRequired: "999" } }, "declined"],
      [{ requirements: { payTo: `0x${"0b".repeat(20)}` } }, "declined"],
      [{ requirements: { payTo: PAY_TO.toUpperCase().replace("0X", "0x") } }, "settled"],
      [{ requirements: { scheme: "upto" } }, "declined"],
      [{ scheme: "upto" }, "declined"],
      [{ network: "base-sepolia" }, "over_limit"],
      [{ requirements: { network: "base-sepolia" } }, "over_limit"],
      [{ requirements: { asset: PAY_TO } }, "over_limit"],
      [{ network: "base-sepolia", requirements: { maxAmountRequired: "1" } }, "declined"],
      [{ network: "base-sepolia", validBefore: 1 }, "declined"],
    ] as const;
    for (const [change, expected] of cases) {
      expect([change, await ending(service.settle(account(), await request(change)))]).toEqual([change, expected]);
    }
    const reasons = (await service.refusals()).map((row) => row.reason);
    expect(reasons.filter((reason) => reason === "kind_not_allowed")).toHaveLength(3);
    expect(reasons.filter((reason) => reason === "wrong_recipient")).toHaveLength(1);
  });
});
