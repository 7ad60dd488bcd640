import { afterAll, beforeAll, beforeEach, describe, expect, test } from "bun:test";
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
import { type Place, places } from "../../../test/support/stores/stores.ts";
import { Fault } from "../../core/fault.ts";
import type { Store } from "../../storage/store.ts";

const COARSE = "payment could not be collected";

describe.each(["sqlite", "postgres"] as const)(
  "settling on %s, with doubles of chain and wallet",
  (dialect) => {
    let place: Place;
    let store: Store;
    beforeAll(async () => {
      place = await places[dialect]();
      store = await place.open();
    }, 30_000);
    afterAll(async () => {
      await store.close();
      place.remove();
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

    test("a retry learns the truth, whatever window, limits, readiness and node say by then", async () => {
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
        "a wrong signature": [
          account(),
          { ...asked, payment: { ...asked.payment, signature: `0x${"11".repeat(65)}` } },
        ],
        "another network": [account(), { ...asked, payment: { ...asked.payment, network: "base-sepolia" } }],
        "another scheme": [account(), { ...asked, payment: { ...asked.payment, scheme: "upto" } }],
        "another price": [
          account(),
          { ...asked, requirements: { ...requirements, maxAmountRequired: 1_001n } },
        ],
        "another resource": [
          account(),
          { ...asked, requirements: { ...requirements, resource: "https://x.test/" } },
        ],
        "another timeout": [
          account(),
          { ...asked, requirements: { ...requirements, maxTimeoutSeconds: 61 } },
        ],
        "another asset": [account(), { ...asked, requirements: { ...requirements, asset: PAY_TO } }],
        "another payTo": [
          account(),
          { ...asked, requirements: { ...requirements, payTo: `0x${"0b".repeat(20)}` } },
        ],
        "another required network": [
          account(),
          { ...asked, requirements: { ...requirements, network: "base-sepolia" } },
        ],
        "another required scheme": [
          account(),
          { ...asked, requirements: { ...requirements, scheme: "upto" } },
        ],
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

    test("on other terms: 503 while claimed, the hash while sent, no hash once it has failed", async () => {
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
      while ((await service.record(asked))?.status !== "sent") await Bun.sleep(1);
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

    test("two accounts that present one payment at once: one of them collects it", async () => {
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

    test("not included in time: no success, but the hash that may still land; later the success", async () => {
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
      expect(await ending(settling(store, { inclusionTimeoutMs: 40 }).settle(account(), asked))).toBe(
        "unavailable",
      );
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

    test("what this process waits for is in flight, however its clock is set meanwhile", async () => {
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
      service.turns.afterSend = (key) =>
        service.failed(key, "authorization used by another", `0x${"fe".repeat(32)}`);
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
        expect([window, await ending(service.settle(account(), await request(window)))]).toEqual([
          window,
          expected,
        ]);
      }
      expect((await service.refusals()).map((row) => row.reason).sort()).toEqual([
        "expired",
        "not_yet_valid",
      ]);
    });

    test("what became too late while it was simulated is not claimed", async () => {
      const service = settling(store);
      service.turns.simulate = async () => {
        service.clock.time += 600_000;
        return { ok: true, gas: 1n };
      };
      expect(await ending(service.settle(account(), await request()))).toBe("declined");
      expect(await allPayments(store)).toEqual([]);
    });

    test("the requirements decide: value, recipient and scheme decline; another kind is a guardrail", async () => {
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
        expect([change, await ending(service.settle(account(), await request(change)))]).toEqual([
          change,
          expected,
        ]);
      }
      const reasons = (await service.refusals()).map((row) => row.reason);
      expect(reasons.filter((reason) => reason === "kind_not_allowed")).toHaveLength(3);
      expect(reasons.filter((reason) => reason === "wrong_recipient")).toHaveLength(1);
    });

    test("what a payer has under way is held against its balance, over accounts and processes", async () => {
      const others = await place.open();
      const services = [settling(store), settling(others)];
      const payer = newPayer();
      const { promise: allSimulate, resolve } = Promise.withResolvers<void>();
      let simulations = 0;
      for (const service of services) {
        service.turns.afterSend = async () => {};
        service.turns.balanceOf = async () => ({ amount: 2_500n, block: 6 });
        service.turns.simulate = async () => {
          simulations += 1;
          if (simulations === 30) resolve();
          await allSimulate;
          return { ok: true, gas: 1n };
        };
      }
      const asks = await Promise.all(Array.from({ length: 30 }, () => request({ payer })));
      const told: string[] = [];
      const { promise: allTold, resolve: isTold } = Promise.withResolvers<void>();
      const answers = asks.map(async (asked, i) => {
        told.push(await ending(services[i % 2]!.settle(account(`account ${i % 3}`), asked)));
        if (told.length === 28) isTold();
      });
      await allTold;
      expect(told).toEqual(Array(28).fill("unavailable"));
      const sentSoFar = () => services.flatMap((service) => service.sends);
      while (sentSoFar().length < 2) await Bun.sleep(1);
      const sent = sentSoFar();
      expect(sent).toHaveLength(2);
      // Settled in a later block than that of the balance: it is not part of it yet, so it still counts.
      await services[0]!.settled(sent[0]!.key);
      const [service] = services;
      service!.turns.simulate = async () => ({ ok: true, gas: 1n });
      expect(await ending(service!.settle(account(), await request({ payer })))).toBe("unavailable");
      // Failed: nothing of it can be taken any more. Then settled, and part of the balance.
      await services[0]!.failed(sent[1]!.key);
      service!.turns.afterSend = service!.settled;
      expect(await ending(service!.settle(account(), await request({ payer })))).toBe("settled");
      service!.turns.balanceOf = async () => ({ amount: 1_000n, block: 7 });
      expect(await ending(service!.settle(account(), await request({ payer })))).toBe("settled");
      expect(await ending(service!.settle(account(), await request({ payer, value: 1_001n })))).toBe(
        "unavailable",
      );
      await Promise.all(answers);
      await others.close();
    });

    test("what is in a block already, and not recorded yet, is not counted against the balance twice", async () => {
      const service = settling(store);
      const payer = newPayer();
      service.turns.afterSend = async () => {};
      // It has money for two. The first is sent, and in block 9; the record does not say so yet.
      service.turns.balanceOf = async () => ({ amount: 1_000n, block: 9 });
      const first = await request({ payer });
      service.turns.isUsed = async ({ nonce }, { number }) =>
        nonce === keyOfRequest(first).nonce && number === 9;
      void service.settle(account(), first).catch(() => {});
      while ((await service.record(first))?.status !== "sent") await Bun.sleep(1);
      const second = await request({ payer });
      const both = [first, second].map((asked) => ending(service.settle(account(), asked)));
      while ((await service.record(second))?.status !== "sent") await Bun.sleep(1);
      expect(await ending(service.settle(account(), await request({ payer })))).toBe("unavailable");
      for (const asked of [first, second]) await service.settled(keyOfRequest(asked));
      expect(await Promise.all(both)).toEqual(["unavailable", "settled"]);
    });

    test("a payment that is put off for others of its payer keeps nothing, and may be asked again", async () => {
      const service = settling(store);
      service.turns.balanceOf = async () => ({ amount: 999n, block: 6 });
      const asked = await request();
      const refused = await service.settle(account(), asked).catch((error) => error);
      expect(refused).toMatchObject({ kind: "unavailable", retryAfterSeconds: 2 });
      expect([await allPayments(store), await service.refusals(), await service.reserved()]).toEqual([
        [],
        [],
        0n,
      ]);
      service.turns.balanceOf = async () => ({ amount: 1_000n, block: 7 });
      expect(await ending(service.settle(account(), asked))).toBe("settled");
    });

    test("what reverted keeps its share of the ceiling, and counts towards the account's gas of the day", async () => {
      const service = settling(store, { dailyGasWei: 100n, dailyCeiling: 10_000n });
      const burn = async (wei: bigint) => {
        service.turns.afterSend = (key) => service.failed(key, "the transaction reverted", null, wei);
        return ending(service.settle(account(), await request()));
      };
      const settle = async (name = "alpha") => {
        service.turns.afterSend = service.settled;
        return ending(service.settle(account(name), await request()));
      };
      expect([await burn(60n), await burn(40n), await settle()]).toEqual(["declined", "declined", "settled"]);
      expect(await service.reserved()).toBe(3_000n);
      expect([await burn(1n), await settle(), await settle("beta")]).toEqual([
        "declined",
        "over_limit",
        "settled",
      ]);
      expect((await service.refusals()).map((row) => row.reason)).toEqual(["over_daily_gas"]);
      service.clock.time += 12 * 3_600_000;
      const tomorrow = await request({ validBefore: NOON / 1000 + 86_400 });
      service.turns.afterSend = service.settled;
      expect(await ending(service.settle(account(), tomorrow))).toBe("settled");
    });

    test("while no block comes, an account with all that it may have under way keeps no other from its place", async () => {
      const service = settling(store, { capacity: 8, inclusionTimeoutMs: 20 });
      service.turns.afterSend = async () => {};
      const settle = async (name: string) => ending(service.settle(account(name), await request()));
      for (let sent = 0; sent < 7; sent++) expect(await settle("flooder")).toStartWith("unknown");
      expect(await settle("flooder")).toBe("unavailable");
      expect(await settle("other")).toStartWith("unknown");
    });

    test("the limits are exact: what equals one is allowed; an account's own come before the deployment's", async () => {
      const service = settling(store, { maxPerTransaction: 1_000n, dailyCeiling: 2_500n });
      const ask = async (value: bigint, from = account()) =>
        ending(service.settle(from, await request({ value })));
      expect(await ask(1_001n)).toBe("over_limit");
      expect(await ask(1_000n)).toBe("settled");
      expect(await ask(1_000n)).toBe("settled");
      expect(await ask(501n)).toBe("over_limit");
      expect(await ask(500n)).toBe("settled");
      expect(await ask(1n)).toBe("over_limit");
      expect(await ask(1_001n, account("beta", 1_001n))).toBe("settled");
      expect(await ask(1n, account("gamma", 0n))).toBe("over_limit");
      expect(await ask(1n, account("delta", undefined, 0n))).toBe("over_limit");
      expect((await service.refusals()).map((row) => row.reason).sort()).toEqual([
        ...Array(3).fill("over_daily_ceiling"),
        ...Array(2).fill("over_max_per_transaction"),
      ]);
    });

    test("a ceiling that fifty raced for, in two processes, is reached and never exceeded", async () => {
      const others = await place.open();
      const services = [settling(store), settling(others)];
      // All have passed the first look at the ceiling before any of them claims.
      const { promise: allSimulate, resolve } = Promise.withResolvers<void>();
      let simulations = 0;
      for (const service of services) {
        service.turns.simulate = async () => {
          simulations += 1;
          if (simulations === 50) resolve();
          await allSimulate;
          return { ok: true, gas: 1n };
        };
      }
      const limited = account("alpha", undefined, 20_500n);
      const asks = await Promise.all(Array.from({ length: 50 }, () => request()));
      const answers = await Promise.all(
        asks.map((asked, i) => ending(services[i % 2]!.settle(limited, asked))),
      );
      expect(answers.filter((answer) => answer === "settled")).toHaveLength(20);
      expect(answers.filter((answer) => answer === "over_limit")).toHaveLength(30);
      expect(await services[0]!.reserved()).toBe(20_000n);
      await others.close();
    });

    test("a reservation counts on the UTC day of its claim, and goes back there after midnight", async () => {
      const midnight = Date.UTC(2025, 10, 22);
      const service = settling(store, { now: midnight - 1, dailyCeiling: 1_000n });
      const { promise: sent, resolve } = Promise.withResolvers<void>();
      service.turns.afterSend = async () => resolve();
      const ask = () => request({ validAfter: 0, validBefore: midnight });
      const asked = await ask();
      const first = ending(service.settle(account(), asked));
      await sent;
      expect(await ending(service.settle(account(), await ask()))).toBe("over_limit");
      service.clock.time = midnight;
      const next = await ask();
      service.turns.afterSend = service.settled;
      expect(await ending(service.settle(account(), next))).toBe("settled");
      await service.failed(keyOfRequest(asked));
      expect(await first).toBe("declined");
      expect([await service.reserved("alpha", midnight - 1), await service.reserved()]).toEqual([0n, 1_000n]);
      expect((await service.record(asked))?.day).toBe("2025-11-21");
    });
  },
);
