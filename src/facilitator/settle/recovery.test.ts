import { beforeEach, describe, expect, test } from "bun:test";
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
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { SettleRequest } from "../../x402/codec.ts";
import { markSent } from "../payments/payments.ts";
import { createResume } from "./resume.ts";

const away = async (): Promise<never> => {
  throw new Fault("unavailable", "no node");
};

describe.each(["sqlite", "postgres"] as const)("recovery of settling on %s, with doubles", (dialect) => {
  let store: Store;
  useStore(dialect, (opened) => {
    ({ store } = opened);
  });
  beforeEach(() => emptied(store));

  const claimed = (...claim: [SettleRequest, string?, string?]) => claimedOn(store, ...claim);

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
        inFlight: { sendingSince: () => () => false },
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
