import { describe, expect, test } from "bun:test";
import { CLAIM, claimedOn, keyOfRequest, NOON, request } from "../../../test/support/chain/settling.ts";
import { places } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import type { Hex } from "../../x402/types.ts";
import { createRefusalLog } from "../settle/outcome.ts";
import { utcDay } from "./guardrails.ts";
import { markSent, recordSettled } from "./payments.ts";
import { cleanUpFacilitator } from "./retention.ts";

const DAY_MS = 86_400_000;
const word = (n: number): Hex => `0x${n.toString(16).padStart(64, "0")}`;

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  test("refusals of over 90 days and ceilings of over 35 are removed, in groups, and the others stay", async () => {
    const place = await places[dialect]();
    const store = await place.open();
    const { facilitatorRefusals, facilitatorDays } = store.read.tables;
    const ages = (count: number, limit: number) =>
      Array.from({ length: count }, (_, n) => NOON - limit * DAY_MS - (n % 2 === 0 ? 1 : 0) * DAY_MS);
    const refusals = ages(450, 90).map((updated_at, n) => ({
      account: `account ${n % 3}`,
      payer: word(1),
      nonce: word(n),
      reason: "expired",
      attempts: 1,
      created_at: 0,
      updated_at,
    }));
    const days = ages(450, 35).map((time, n) => ({
      account: `account ${n}`,
      day: utcDay(time),
      reserved: "1",
      gas_burned: "0",
      gas_used: "0",
    }));
    await store.write(async ({ db }) => {
      await db.insert(facilitatorRefusals).values(refusals);
      await db.insert(facilitatorDays).values(days);
    });
    await cleanUpFacilitator(store, { now: () => NOON }, silentLog);
    const { db } = store.read;
    const left = [await db.select().from(facilitatorRefusals), await db.select().from(facilitatorDays)];
    expect(left.map((rows) => rows.length)).toEqual([225, 225]);
    expect(left[0]).toEqual(expect.arrayContaining(refusals.slice(1, 2)));
    expect(left[1]).toEqual(expect.arrayContaining(days.slice(1, 2)));
    await store.close();
    place.remove();
  });

  test("payments go 90 days after their end and their time, and their transactions when final for a week", async () => {
    const place = await places[dialect]();
    const store = await place.open();
    const { facilitatorPayments, facilitatorTransactions } = store.read.tables;
    const ended = async (name: number, ageDays: number, validBefore: number, isOpen = false) => {
      const asked = await request({ nonce: word(name), validBefore });
      const key = keyOfRequest(asked);
      const ended_at = NOON - ageDays * DAY_MS;
      await claimedOn(store, asked);
      await store.write(async (tx) => {
        await markSent(tx, { key, claim: CLAIM }, word(name), NOON);
        await recordSettled(tx, key, { hash: word(name), blockNumber: 1, blockHash: word(1) }, ended_at);
        const fees = { gas: "1", max_fee: "1", max_priority_fee: "1", gas_burned: null, replacement: 0 };
        const of = { hash: word(name), wallet: word(9), wallet_nonce: name, payer: key.payer, nonce: key.nonce };
        const row = { ...fees, ...of, raw: word(1), open: isOpen, stored_at_block: 1, created_at: ended_at };
        await tx.db.insert(facilitatorTransactions).values(row);
      });
    };
    const old = NOON / 1000 - 91 * 86_400;
    await ended(1, 91, old);
    await ended(2, 91, NOON / 1000);
    await ended(3, 91, 10 ** 12);
    await ended(4, 89, old);
    await ended(5, 6, old);
    await ended(6, 91, old + 2 * 86_400, true);
    await cleanUpFacilitator(store, { now: () => NOON }, silentLog);
    const { db } = store.read;
    const payments = await db.select().from(facilitatorPayments);
    const transactions = await db.select().from(facilitatorTransactions);
    expect(payments.map(({ nonce }) => Number(nonce)).sort()).toEqual([2, 3, 4, 5, 6]);
    expect(transactions.map(({ hash }) => Number(hash)).sort()).toEqual([5, 6]);
    await store.close();
    place.remove();
  });
});

test("an account that has itself refused without end fills the table of one day only up to a bound", async () => {
  const place = await places.sqlite();
  const store = await place.open();
  const clock = { time: NOON, now: () => clock.time };
  const lines: string[] = [];
  const log = { ...silentLog, info: (event: string) => void lines.push(event) };
  const note = createRefusalLog({ store, clock, log });
  const refusal = { account: "alpha", payer: word(1), nonce: word(2) };
  const attempts = async () => {
    const { db, tables } = store.read;
    return (await db.select().from(tables.facilitatorRefusals)).map((row) => [row.account, row.attempts]);
  };
  await Promise.all(Array.from({ length: 10_003 }, () => note(refusal, "expired")));
  await note({ ...refusal, account: "beta" }, "expired");
  expect(lines).toHaveLength(10_004);
  expect(await attempts()).toEqual([
    ["alpha", 10_000],
    ["beta", 1],
  ]);
  clock.time += DAY_MS;
  await note(refusal, "expired");
  expect((await attempts())[0]).toEqual(["alpha", 10_001]);
  await store.close();
  place.remove();
});
