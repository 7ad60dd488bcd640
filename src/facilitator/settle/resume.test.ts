import { beforeEach, describe, expect, test } from "bun:test";
import { newPayer, randomNonce } from "../../../test/support/chain/payments.ts";
import {
  account,
  allPayments,
  CLAIM,
  claimedOn,
  emptied,
  ending,
  hashOf,
  keyOfRequest,
  NOON,
  request,
  settling,
} from "../../../test/support/chain/settling.ts";
import { useStore } from "../../../test/support/stores/one-store.ts";
import { Fault } from "../../core/fault.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { markSent, withdrawClaim } from "../payments/payments.ts";

const away = async (): Promise<never> => {
  throw new Fault("unavailable", "no node");
};

describe.each(["sqlite", "postgres"] as const)("interrupted settling on %s, with doubles", (dialect) => {
  let store: Store;
  useStore(dialect, (opened) => {
    ({ store } = opened);
  });
  beforeEach(() => emptied(store));

  const claimed = (...claim: [SettleRequest, string?, string?]) => claimedOn(store, ...claim);

  test("a claim of a restored copy that was sent since is settled, and not failed while nobody can tell", async () => {
    const service = settling(store);
    const asked = await request();
    await claimed(asked);
    service.clock.time += 3_600_000;
    const hash = hashOf(keyOfRequest(asked));
    const receipt = { hash, from: hash, blockNumber: 7, blockHash: hash, succeeded: true, gasWei: 0n, logs: [] };
    const told = ["unknown", "unknown", receipt] as const;
    let looks = 0;
    service.turns.findOwnTransfer = async () => told[looks++] ?? receipt;
    await service.recover();
    expect(looks).toBe(3);
    expect(await allPayments(store)).toMatchObject([{ status: "settled", transaction_hash: hash, block_number: 7 }]);
    expect(await service.settle(account(), asked)).toMatchObject({ success: true, transaction: hash });
  });

  test("claims left behind while no node answers are tried with growing pauses, and one line tells of all", async () => {
    const service = settling(store);
    const { simulate } = service.turns;
    for (let claims = 0; claims < 3; claims++) await claimed(await request());
    const looks: number[] = [];
    service.turns.simulate = async (...args) => {
      looks.push(performance.now());
      return looks.length <= 9 ? away() : simulate(...args);
    };
    await service.recover();
    expect(service.sends).toHaveLength(3);
    const [first = 0, second = 0, third = 0, fourth = 0] = looks.filter((_, index) => index % 3 === 0);
    expect([second - first >= 240, third - second >= 480, fourth - third >= 960]).toEqual([true, true, true]);
    const said = service.logged.filter(({ level }) => level === "warn");
    expect(said).toEqual([{ level: "warn", event: "claims_not_resumed", fields: { left: 3 } }]);
  });

  test("an unready wallet or an absent node answers 503 for now, and nothing is kept as final", async () => {
    const service = settling(store);
    const asked = await request();
    service.turns.readiness = async () => ({ ready: false, reason: "gas wallet low" });
    const refused = await service.settle(account(), asked).catch((error) => error);
    expect(refused).toMatchObject({ kind: "unavailable", retryAfterSeconds: 5 });
    expect(refused.message).not.toContain("gas");
    expect(service.logged).toContainEqual(
      expect.objectContaining({ fields: expect.objectContaining({ reason: "gas wallet low" }) }),
    );
    service.turns.readiness = async () => ({ ready: true });
    const { simulate } = service.turns;
    service.turns.simulate = away;
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    expect([await allPayments(store), await service.refusals()]).toEqual([[], []]);
    service.turns.simulate = simulate;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
  });

  test("what the token would refuse is declined before a claim, counted, and may be asked again", async () => {
    const service = settling(store);
    const asked = await request();
    const { simulate } = service.turns;
    for (const reason of ["paused", "transfer amount exceeds balance"]) {
      service.turns.simulate = async () => ({ ok: false, reason });
      expect(await service.settle(account(), asked)).toMatchObject({ success: false, transaction: "" });
    }
    const { from: payer, nonce } = asked.payment.authorization;
    expect(await service.refusals()).toEqual([
      {
        account: "alpha",
        payer,
        nonce,
        reason: "transfer amount exceeds balance",
        attempts: 2,
        created_at: NOON,
        updated_at: NOON,
      },
    ]);
    expect([await allPayments(store), await service.reserved()]).toEqual([[], 0n]);
    service.turns.simulate = simulate;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
  });

  test("a payment that was not sent gives its claim back, so that a retry is collected", async () => {
    const service = settling(store);
    const asked = await request();
    service.turns.send = away;
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    expect([await allPayments(store), await service.reserved()]).toEqual([[], 0n]);
    service.turns.send = service.storeSent;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect([service.sends.length, await service.reserved()]).toEqual([1, 1_000n]);
  });

  test("a send that rejects although it was stored is waited for all the same", async () => {
    const service = settling(store);
    const asked = await request();
    service.turns.send = async (payment) => {
      await service.storeSent(payment);
      throw new Fault("unavailable", "the answer to the commit was lost");
    };
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(await service.reserved()).toBe(1_000n);
  });

  test("a claim that could not be given back is sent after all, once", async () => {
    let refuseWrites = false;
    const broken: Store = { ...store, write: (work) => (refuseWrites ? away() : store.write(work)) };
    const service = settling(broken);
    const asked = await request();
    const { promise: over, resolve } = Promise.withResolvers<void>();
    service.turns.afterSend = async (key) => resolve(void (await service.settled(key)));
    service.turns.send = async () => {
      refuseWrites = true;
      return away();
    };
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    expect(await service.record(asked)).toMatchObject({ status: "claimed" });
    // What is only claimed has no hash, and must not look declined either, however old it is.
    service.clock.time += 60_000;
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    refuseWrites = false;
    service.turns.send = service.storeSent;
    await over;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect([service.sends.length, await service.reserved()]).toEqual([1, 1_000n]);
    service.stop();
  });

  test("a claim whose commit was answered by a lost connection is taken up", async () => {
    let lost = false;
    const lossy: Store = {
      ...store,
      async write(work) {
        const result = await store.write(work);
        if (lost || result !== "claimed") return result;
        lost = true;
        return away();
      },
    };
    const service = settling(lossy);
    const asked = await request();
    const { promise: over, resolve } = Promise.withResolvers<void>();
    service.turns.afterSend = async (key) => resolve(void (await service.settled(key)));
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    await over;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(service.sends).toHaveLength(1);
    service.stop();
  });

  test("a note of a refusal, or a count of a retry, that can't be kept changes no answer", async () => {
    let refuseWrites = false;
    const broken: Store = { ...store, write: (work) => (refuseWrites ? away() : store.write(work)) };
    const service = settling(broken);
    const asked = await request();
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    refuseWrites = true;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(await ending(service.settle(account("beta"), asked))).toStartWith("unknown 0x");
    expect(await ending(service.settle(account("beta", 1n), await request()))).toBe("over_limit");
  });

  test("a wallet that takes too long is not waited for, and what it stores counts", async () => {
    const service = settling(store, { inclusionTimeoutMs: 200 });
    const { promise: go, resolve } = Promise.withResolvers<void>();
    const { promise: over, resolve: end } = Promise.withResolvers<void>();
    let sends = 0;
    service.turns.send = async (payment) => {
      sends += 1;
      await go;
      await service.storeSent(payment);
    };
    service.turns.afterSend = async (key) => end(void (await service.settled(key)));
    const asked = await request();
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    expect(await ending(service.settle(account(), asked))).toBe("unavailable");
    // It is the wallet's still: recovery leaves it alone.
    const recovered = service.recover();
    for (let look = 0; look < 5; look += 1) await service.record(asked);
    resolve();
    await over;
    await recovered;
    expect(await ending(service.settle(account(), asked))).toBe("settled");
    expect(sends).toBe(1);
  });

  test("a request beyond those that may be at work is told to come again", async () => {
    const service = settling(store, { inFlightMax: 3 });
    const { promise: go, resolve } = Promise.withResolvers<void>();
    service.turns.simulate = async () => {
      await go;
      return { ok: true, gas: 1n };
    };
    const asks = await Promise.all([request(), request(), request()]);
    const answers = asks.map((asked) => ending(service.settle(account(), asked)));
    expect(await Promise.race(answers)).toBe("over_limit");
    resolve();
    expect((await Promise.all(answers)).sort()).toEqual(["over_limit", "settled", "settled"]);
    expect(await ending(service.settle(account(), await request()))).toBe("settled");
  });

  test("an account whose settlements are slow keeps none of another's from its place", async () => {
    const service = settling(store, { inFlightMax: 3 });
    const { promise: go, resolve } = Promise.withResolvers<void>();
    const quick = await request();
    service.turns.simulate = async ({ nonce }) => {
      if (nonce !== quick.payment.authorization.nonce) await go;
      return { ok: true, gas: 1n };
    };
    const flood = await Promise.all(Array.from({ length: 5 }, () => request()));
    const enough = Promise.withResolvers<void>();
    let refused = 0;
    const answers = flood.map(async (asked) => {
      const answer = await ending(service.settle(account("flooder"), asked));
      if (++refused === 3) enough.resolve();
      return answer;
    });
    // All have come by now that get a place.
    await enough.promise;
    expect(await ending(service.settle(account("other"), quick))).toBe("settled");
    resolve();
    expect((await Promise.all(answers)).filter((answer) => answer === "settled")).toHaveLength(2);
  });

  describe("a claim that was given back and meanwhile made anew on other terms", () => {
    const payer = newPayer();
    const nonce = randomNonce();
    const renewed = async (old: SettleRequest, asked: SettleRequest) => {
      await store.write((tx) => withdrawClaim(tx, { key: keyOfRequest(old), claim: CLAIM }));
      expect(await claimed(asked, "beta", "a later attempt")).toBe("claimed");
    };

    test("is not sent with the words of the old one", async () => {
      const service = settling(store);
      const [old, now] = [await request({ payer, nonce }), await request({ payer, nonce, value: 5n })];
      await claimed(old);
      service.turns.simulate = async ({ value }) => {
        if (value === 1_000n) await renewed(old, now);
        return { ok: true, gas: 1n };
      };
      await service.recover();
      expect(service.sends.map(({ authorization }) => authorization.value)).toEqual([5n]);
    });

    test("does not fail for what was wrong with the old one", async () => {
      const service = settling(store);
      const [old, now] = [await request({ payer, nonce }), await request({ payer, nonce, value: 5n })];
      await claimed(old);
      service.turns.simulate = async () => {
        await renewed(old, now);
        service.stop();
        return { ok: false, reason: "transfer amount exceeds balance" };
      };
      await service.recover();
      expect(await service.record(now)).toMatchObject({ status: "claimed", account: "beta", reason: null });
    });

    test("is neither withdrawn nor answered for by the attempt that made the old one", async () => {
      const service = settling(store, { inclusionTimeoutMs: 250 });
      // On a busy machine what takes up claims would come in between.
      service.stop();
      const [old, now] = [await request({ payer, nonce }), await request({ payer, nonce, value: 5n })];
      service.turns.send = async ({ key, claim }) => {
        await store.write((tx) => withdrawClaim(tx, { key, claim }));
        expect(await claimed(now, "beta", "a later attempt")).toBe("claimed");
        return away();
      };
      expect(await ending(service.settle(account(), old))).toBe("unavailable");
      expect(await service.record(now)).toMatchObject({ status: "claimed", account: "beta" });
      expect([await service.reserved(), await service.reserved("beta")]).toEqual([0n, 5n]);
      service.turns.send = async ({ key, claim }) => {
        await store.write((tx) => withdrawClaim(tx, { key, claim }));
        await renewedAndSettled(service);
        return away();
      };
      await emptied(store);
      expect(await ending(service.settle(account(), old))).toStartWith("unknown 0x");
    });

    async function renewedAndSettled(service: ReturnType<typeof settling>) {
      const now = await request({ payer, nonce, value: 5n });
      const key = keyOfRequest(now);
      await claimed(now, "beta", "a later attempt");
      await store.write((tx) => markSent(tx, { key, claim: "a later attempt" }, hashOf(key), NOON));
      await service.settled(key);
    }
  });
});
