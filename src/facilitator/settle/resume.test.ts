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
  request,
  settling,
  UNMEASURED,
} from "../../../test/support/chain/settling.ts";
import { useStore } from "../../../test/support/stores/one-store.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { claimPayment, markSent, withdrawClaim } from "../payments/payments.ts";
import { requirementsText } from "./request.ts";
import { createResume } from "./resume.ts";

/** The name of a claim that another process has made. */
const CLAIM = "another process";

const away = async (): Promise<never> => {
  throw new Fault("unavailable", "no node");
};

describe.each(["sqlite", "postgres"] as const)("interrupted settling on %s, with doubles", (dialect) => {
  let store: Store;
  useStore(dialect, (opened) => {
    ({ store } = opened);
  });
  beforeEach(() => emptied(store));

  /** As a process leaves it that dies between the claim and the transaction. */
  async function claimed(asked: SettleRequest, name = "alpha", attempt = CLAIM) {
    const { authorization, signature } = asked.payment;
    const requirements = requirementsText(asked.requirements);
    const key = keyOfRequest(asked);
    const claim = { key, claim: attempt, account: name, authorization, signature, requirements };
    return store.write((tx) => claimPayment(tx, { ...claim, ...UNMEASURED }, NOON));
  }

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
    const service = settling(store, { atWorkMax: 3 });
    const { promise: go, resolve } = Promise.withResolvers<void>();
    service.turns.simulate = async () => {
      await go;
      return { ok: true, gas: 1n };
    };
    const asks = await Promise.all([request(), request(), request()]);
    const answers = asks.map((asked) => ending(service.settle(account(), asked)));
    expect(await Promise.race(answers)).toBe("unavailable");
    resolve();
    expect((await Promise.all(answers)).sort()).toEqual(["settled", "settled", "unavailable"]);
    expect(await ending(service.settle(account(), await request()))).toBe("settled");
  });

  test("an account whose settlements are slow keeps none of another's from its place", async () => {
    const service = settling(store, { atWorkMax: 3 });
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

  test("recovery sends claims that are still good, fails the others, and leaves sent ones alone", async () => {
    const service = settling(store);
    const good = await request();
    const expired = await request({ validBefore: NOON / 1000 + 2 });
    const refused = await request();
    const sent = await request();
    for (const asked of [good, expired, refused, sent]) expect(await claimed(asked)).toBe("claimed");
    await store.write((tx) =>
      markSent(tx, { key: keyOfRequest(sent), claim: CLAIM }, hashOf(keyOfRequest(sent)), NOON),
    );
    const { nonce } = refused.payment.authorization;
    service.turns.simulate = async (authorization) =>
      authorization.nonce === nonce ? { ok: false, reason: "paused" } : { ok: true, gas: 1n };
    await service.recover();
    expect(service.sends.map((payment) => payment.key)).toEqual([keyOfRequest(good)]);
    expect(service.sends[0]?.authorization).toEqual(good.payment.authorization);
    expect(service.sends[0]?.signature).toBe(good.payment.signature);
    expect(await service.record(expired)).toMatchObject({ status: "failed", reason: "expired" });
    expect(await service.record(refused)).toMatchObject({ status: "failed", reason: "paused" });
    expect(await service.record(sent)).toMatchObject({ status: "sent" });
    expect(await service.reserved()).toBe(2_000n);
    expect(await ending(service.settle(account(), expired))).toBe("declined");
  });

  test("a claim that another process has left behind is taken up once it is old, and no earlier", async () => {
    const service = settling(store);
    const asked = await request();
    await claimed(asked);
    service.clock.time += 9_999;
    await service.takeUp();
    expect(service.sends).toHaveLength(0);
    service.clock.time += 1;
    await service.takeUp();
    expect(service.sends.map(({ key }) => key)).toEqual([keyOfRequest(asked)]);
  });

  test("a claim is taken up too when the clock was set back since it was made", async () => {
    const service = settling(store);
    const asked = await request();
    await claimed(asked);
    service.clock.time -= 10_000;
    await service.takeUp();
    expect(service.sends.map(({ key }) => key)).toEqual([keyOfRequest(asked)]);
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

  test("recovery fails no payment that another process has sent meanwhile", async () => {
    const service = settling(store);
    const asked = await request();
    await claimed(asked);
    service.turns.simulate = async () => {
      await store.write((tx) =>
        markSent(tx, { key: keyOfRequest(asked), claim: CLAIM }, hashOf(keyOfRequest(asked)), NOON),
      );
      return { ok: false, reason: "FiatTokenV2: authorization is used or canceled" };
    };
    await service.recover();
    expect(await service.record(asked)).toMatchObject({ status: "sent", reason: null });
    expect(await service.reserved()).toBe(1_000n);
  });

  test("recovery goes on until node and wallet are there, and fails nothing meanwhile", async () => {
    const service = settling(store);
    const asked = await request();
    await claimed(asked);
    const troubles: string[] = [];
    service.turns.readiness = async () => {
      troubles.push("unready");
      service.turns.readiness = async () => ({ ready: true });
      return { ready: false, reason: "rpc unreachable" };
    };
    service.turns.send = async () => {
      troubles.push("not sent");
      service.turns.send = service.storeSent;
      return away();
    };
    await service.recover();
    expect([troubles, service.sends.length]).toEqual([["unready", "not sent"], 1]);
  });

  test("recovery ends with the stop, whatever is left", async () => {
    const service = settling(store);
    await claimed(await request());
    const { promise: asked, resolve } = Promise.withResolvers<void>();
    service.turns.simulate = () => {
      resolve();
      return away();
    };
    const recovered = service.recover();
    await asked;
    service.stop();
    await recovered;
    expect((await allPayments(store)).map((row) => row.status)).toEqual(["claimed"]);
  });
});

test("a run that is wanted at any moment of the end of another one begins", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const MOMENTS = 40;
  const begun = Array.from({ length: MOMENTS }, () => 0);
  try {
    const runs = begun.map(async (_, moment) => {
      const again = Promise.withResolvers<void>();
      const select = (...columns: []) => {
        begun[moment] = (begun[moment] ?? 0) + 1;
        if (begun[moment] === 1) void afterSteps(moment).then(() => resume.soon());
        else again.resolve();
        return store.read.db.select(...columns);
      };
      const resume = createResume({
        store: { ...store, read: { ...store.read, db: { ...store.read.db, select } } },
        clock: { now: () => NOON },
        log: silentLog,
        atWork: { sendingSince: () => () => false },
        wallet: { worksFor: () => true },
      } as unknown as Parameters<typeof createResume>[0]);
      await resume.run();
      await Promise.race([again.promise, Bun.sleep(2_000)]);
      resume.stop();
    });
    await Promise.all(runs);
    expect(begun.filter((times) => times < 2)).toEqual([]);
  } finally {
    await store.close();
    place.remove();
  }
});

/** So many turns of the queue of promises. */
async function afterSteps(count: number): Promise<void> {
  for (let step = 0; step < count; step++) await null;
}
