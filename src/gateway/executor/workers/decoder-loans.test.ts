import { expect, test } from "bun:test";
import { createDecoderShare, type DecoderShare } from "../../../http/client/decode.ts";
import { createBorrower, createLender } from "./decoder-loans.ts";

const SIZE = 1000;
const never = new AbortController().signal;
const noWay = () => {};

async function turns(): Promise<void> {
  for (let count = 0; count < 5; count++) await new Promise((resolve) => setImmediate(resolve));
}

/** A worker beside the share of the main thread. */
function worker(share: DecoderShare) {
  const lender = createLender(share, (news) => borrower.receive(structuredClone(news)));
  const borrower = createBorrower((requests) => lender.asked(structuredClone(requests)));
  return { lender, borrower };
}

/** Whether all of the share is free. */
async function isFree(share: DecoderShare): Promise<boolean> {
  const given = share.take("other", "agt_9", SIZE, AbortSignal.timeout(20), noWay).catch(() => null);
  const giveBack = await given;
  giveBack?.();
  return giveBack !== null;
}

test("a worker has the memory that it asked for when that is free, and gives it back", async () => {
  const share = createDecoderShare(SIZE);
  const { borrower } = worker(share);
  const giveBack = await borrower.take("acme", "agt_1", 600, never, noWay);
  expect(await isFree(share)).toBe(false);
  let isSecond = false;
  const second = borrower.take("acme", "agt_1", 600, never, noWay).then((give) => {
    isSecond = true;
    return give;
  });
  await turns();
  expect(isSecond).toBe(false);
  giveBack();
  (await second)();
  await turns();
  expect(await isFree(share)).toBe(true);
});

test("a worker that waits no more holds nothing, also when that crosses with the grant", async () => {
  const share = createDecoderShare(SIZE);
  const { borrower } = worker(share);
  const giveBack = await borrower.take("acme", "agt_1", 800, never, noWay);
  const stop = new AbortController();
  const waiting = borrower.take("acme", "agt_1", 800, stop.signal, noWay).catch((reason) => reason);
  await turns();
  // The place becomes free and is not wanted any more in the same turn.
  giveBack();
  stop.abort("enough");
  expect(await waiting).toBe("enough");
  await turns();
  expect(await isFree(share)).toBe(true);
});

test("memory that a worker holds or waits for is free when it has died", async () => {
  const share = createDecoderShare(SIZE);
  const { lender, borrower } = worker(share);
  await borrower.take("acme", "agt_1", 800, never, noWay);
  void borrower.take("acme", "agt_1", 800, never, noWay);
  await turns();
  lender.clear();
  await turns();
  expect(await isFree(share)).toBe(true);
});

test("a worker is told of the memory that others need, once and after it was granted, and only of what it still has", async () => {
  const recalls: (() => void)[] = [];
  const granting = Promise.withResolvers<() => void>();
  const share: DecoderShare = {
    take(_tenant, _agent, _bytes, _signal, giveWay) {
      recalls.push(giveWay);
      return granting.promise;
    },
  };
  const { borrower } = worker(share);
  const told: string[] = [];
  const [first, second] = ["first", "second"].map((name) =>
    borrower
      .take("acme", "agt_1", 100, never, () => told.push(`${name} recalled`))
      .then((giveBack) => {
        told.push(`${name} granted`);
        return giveBack;
      }),
  );
  await turns();
  // In the same turn as the grant.
  granting.resolve(() => {});
  for (const recall of recalls) recall();
  await turns();
  (await second)?.();
  recalls[1]?.();
  await turns();
  expect(told.filter((what) => what.startsWith("first"))).toEqual(["first recalled", "first granted"]);
  expect(told.filter((what) => what === "second recalled").length).toBe(1);
  (await first)?.();
});
