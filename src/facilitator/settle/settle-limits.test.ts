import { beforeEach, describe, expect, test } from "bun:test";
import { newPayer } from "../../../test/support/chain/payments.ts";
import {
  account,
  allPayments,
  emptied,
  ending,
  keyOfRequest,
  NOON,
  request,
  settling,
} from "../../../test/support/chain/settling.ts";
import { useStore } from "../../../test/support/stores/one-store.ts";
import type { Place } from "../../../test/support/stores/stores.ts";
import { until } from "../../../test/support/until.ts";
import type { Store } from "../../storage/store.ts";

describe.each(["sqlite", "postgres"] as const)(
  "limits of settling on %s, with doubles of chain and wallet",
  (dialect) => {
    let place: Place;
    let store: Store;
    useStore(dialect, (opened) => {
      ({ place, store } = opened);
    });
    beforeEach(() => emptied(store));

    test("what a payer owes for open payments is held against its balance, over accounts and processes", async () => {
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
      await until(() => sentSoFar().length >= 2);
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
      expect(await ending(service!.settle(account(), await request({ payer, value: 1_001n })))).toBe("unavailable");
      await Promise.all(answers);
      await others.close();
    });

    test("a payment that is in a block already, and not recorded yet, is not counted against the balance twice", async () => {
      const service = settling(store);
      const payer = newPayer();
      service.turns.afterSend = async () => {};
      // It has money for two. The first is sent, and in block 9; the record does not say so yet.
      service.turns.balanceOf = async () => ({ amount: 1_000n, block: 9 });
      const first = await request({ payer });
      service.turns.isUsed = async ({ nonce }, { number }) => nonce === keyOfRequest(first).nonce && number === 9;
      void service.settle(account(), first).catch(() => {});
      await until(async () => (await service.record(first))?.status === "sent");
      const second = await request({ payer });
      const both = [first, second].map((asked) => ending(service.settle(account(), asked)));
      await until(async () => (await service.record(second))?.status === "sent");
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
      expect([await allPayments(store), await service.refusals(), await service.reserved()]).toEqual([[], [], 0n]);
      service.turns.balanceOf = async () => ({ amount: 1_000n, block: 7 });
      expect(await ending(service.settle(account(), asked))).toBe("settled");
    });

    test("a payment that reverted keeps its share of the ceiling, and counts towards the account's gas of the day", async () => {
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
      expect([await burn(1n), await settle(), await settle("beta")]).toEqual(["declined", "over_limit", "settled"]);
      expect((await service.refusals()).map((row) => row.reason)).toEqual(["over_daily_gas"]);
      service.clock.time += 12 * 3_600_000;
      const tomorrow = await request({ validBefore: NOON / 1000 + 86_400 });
      service.turns.afterSend = service.settled;
      expect(await ending(service.settle(account(), tomorrow))).toBe("settled");
    });

    test("a clock that is set forward a day gives no second ceiling, since the chain's time tells the day", async () => {
      const service = settling(store, { dailyCeiling: 1_000n });
      service.turns.time = async () => ({ earliest: NOON, latest: NOON });
      expect(await ending(service.settle(account(), await request()))).toBe("settled");
      service.clock.time += 86_400_000;
      const refused = await service.settle(account(), await request()).catch((error) => error);
      expect(refused).toMatchObject({ kind: "over_limit", retryAfterSeconds: 3600 });
      service.turns.time = async () => ({ earliest: NOON + 86_400_000, latest: NOON + 86_400_000 });
      const tomorrow = await request({ validBefore: NOON / 1000 + 90_000 });
      expect(await ending(service.settle(account(), tomorrow))).toBe("settled");
      const beyond = await service
        .settle(account(), await request({ value: 1_001n, validBefore: NOON / 1000 + 90_000 }))
        .catch((error) => error);
      expect([beyond.kind, beyond.retryAfterSeconds]).toEqual(["over_limit", undefined]);
    });

    test("while no block comes, an account with as many open payments as it may have keeps no other from its place", async () => {
      const service = settling(store, { capacity: 8, inclusionTimeoutMs: 200 });
      service.turns.afterSend = async () => {};
      const settle = async (name: string) => ending(service.settle(account(name), await request()));
      for (let sent = 0; sent < 7; sent++) expect(await settle("flooder")).toStartWith("unknown");
      expect(await settle("flooder")).toBe("over_limit");
      expect(await settle("other")).toStartWith("unknown");
    });

    test("limits are exact: what equals one is allowed; an account's own come before the deployment's", async () => {
      const service = settling(store, { maxPerTransaction: 1_000n, dailyCeiling: 2_500n });
      const ask = async (value: bigint, from = account()) => ending(service.settle(from, await request({ value })));
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

    test("a ceiling that fifty requests raced for, in two processes, is reached and never exceeded", async () => {
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
      const answers = await Promise.all(asks.map((asked, i) => ending(services[i % 2]!.settle(limited, asked))));
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
