import { expect, test } from "bun:test";
import { createDecoderShare, type DecoderShare } from "../../edge/decoder-share.ts";
import { createBorrower, createLender } from "./loans.ts";

const SIZE = 1000;
const never = new AbortController().signal;

async function turns(): Promise<void> {
  for (let count = 0; count < 5; count++) await new Promise((resolve) => setImmediate(resolve));
}

/** A worker beside the share of the main thread. */
function worker(share: DecoderShare) {
  const lender = createLender(share, (ids) => borrower.granted(ids));
  const borrower = createBorrower((requests) => lender.asked(structuredClone(requests)));
  return { lender, borrower };
}

/** Whether all of the share is free. */
async function isFree(share: DecoderShare): Promise<boolean> {
  const given = share.take("other", "agt_9", SIZE, AbortSignal.timeout(20)).catch(() => null);
  const giveBack = await given;
  giveBack?.();
  return giveBack !== null;
}

test("a worker has what it asked for when that is free, and gives it back", async () => {
  const share = createDecoderShare(SIZE);
  const { borrower } = worker(share);
  const giveBack = await borrower.take("acme", "agt_1", 600, never);
  expect(await isFree(share)).toBe(false);
  let isSecond = false;
  const second = borrower.take("acme", "agt_1", 600, never).then((give) => {
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

test("who waits no more holds nothing, also when that crosses with the grant", async () => {
  const share = createDecoderShare(SIZE);
  const { borrower } = worker(share);
  const giveBack = await borrower.take("acme", "agt_1", 800, never);
  const stop = new AbortController();
  const waiting = borrower.take("acme", "agt_1", 800, stop.signal).catch((reason) => reason);
  await turns();
  // The place becomes free and is not wanted any more in the same turn.
  giveBack();
  stop.abort("enough");
  expect(await waiting).toBe("enough");
  await turns();
  expect(await isFree(share)).toBe(true);
});

test("what a worker holds or waits for is free when it has died", async () => {
  const share = createDecoderShare(SIZE);
  const { lender, borrower } = worker(share);
  await borrower.take("acme", "agt_1", 800, never);
  void borrower.take("acme", "agt_1", 800, never);
  await turns();
  lender.clear();
  await turns();
  expect(await isFree(share)).toBe(true);
});
