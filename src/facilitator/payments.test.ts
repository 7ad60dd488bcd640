import { Database, type SQLQueryBindings } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { drizzle } from "drizzle-orm/bun-sqlite";
import fc from "fast-check";
import { allPayments, emptied, hashOf, NOON, PAY_TO } from "../../test/support/settling.ts";
import { type Place, places, sqlitePlace } from "../../test/support/stores.ts";
import type { Queries, Store, Tx } from "../storage/store.ts";
import { CHAIN_ID, TOKEN } from "../x402/kind.ts";
import type { Hex, PaymentKey } from "../x402/types.ts";
import {
  claimedPayment,
  claimedWithoutTransaction,
  claimPayment,
  findPayment,
  markSent,
  markSentAgain,
  recordFailed,
  recordReorganised,
  recordSettled,
  reservedOn,
  utcDay,
  withdrawClaim,
} from "./payments.ts";

const DAY_MS = 86_400_000;
const CEILING = 1_000n;
const ACCOUNTS = ["alpha", "beta"];

const word = (n: number): Hex => `0x${n.toString(16).padStart(64, "0")}`;
const key = (n: number): PaymentKey => ({
  chain_id: CHAIN_ID,
  token: `0x${TOKEN.slice(2).toLowerCase()}`,
  payer: `0x${"c".repeat(40)}`,
  nonce: word(n),
});

const claimOf = (n: number, account: string, value: bigint, dailyCeiling = CEILING) => ({
  key: key(n),
  account,
  authorization: {
    from: key(n).payer,
    to: PAY_TO,
    value,
    validAfter: 1n,
    validBefore: 2n ** 255n,
    nonce: word(n),
  },
  signature: "0xabcd" as const,
  requirements: "{}",
  dailyCeiling,
});

const included = (n: number) => ({ transaction_hash: hashOf(key(n)), block_number: 1, block_hash: word(n) });
const failure = { reason: "reverted", foreign_transaction: null };

const EVENTS = ["send", "settle", "fail", "abandon", "sendAgain", "reorganise", "withdraw"] as const;
type Model = Map<number, { account: string; day: string; value: bigint; status: string }>;
interface Step {
  readonly event: "claim" | (typeof EVENTS)[number];
  readonly n: number;
  readonly account: string;
  readonly value: bigint;
  readonly hours: number;
}

const LEADS: Record<string, { from: string[]; to: string | null }> = {
  send: { from: ["claimed"], to: "sent" },
  settle: { from: ["sent"], to: "settled" },
  fail: { from: ["sent"], to: "failed" },
  abandon: { from: ["claimed"], to: "failed" },
  sendAgain: { from: ["sent"], to: "sent" },
  reorganise: { from: ["settled"], to: "sent" },
  withdraw: { from: ["claimed"], to: null },
};

const steps: fc.Arbitrary<Step[]> = fc.array(
  fc.record({
    event: fc.constantFrom("claim", "claim", ...EVENTS),
    n: fc.nat(3),
    account: fc.constantFrom(...ACCOUNTS),
    value: fc.bigInt({ min: 0n, max: 600n }),
    hours: fc.nat(30),
  }),
  { maxLength: 40, size: "max" },
);

/** What of the ceiling a model's payments hold. */
function heldBy(model: Model, account: string, day: string): bigint {
  return [...model.values()]
    .filter((row) => row.account === account && row.day === day && row.status !== "failed")
    .reduce((sum, row) => sum + row.value, 0n);
}

function expected(model: Model, step: Step, day: string): unknown {
  const { event, n, account, value } = step;
  const row = model.get(n);
  if (event === "claim") {
    if (row !== undefined) return "taken";
    if (heldBy(model, account, day) + value > CEILING) return "ceiling";
    model.set(n, { account, day, value, status: "claimed" });
    return "claimed";
  }
  const lead = LEADS[event];
  if (row === undefined || lead === undefined || !lead.from.includes(row.status)) return false;
  if (lead.to === null) model.delete(n);
  else row.status = lead.to;
  return true;
}

function apply(tx: Tx, { event, n, account, value }: Step, now: number): Promise<unknown> {
  if (event === "claim") return claimPayment(tx, claimOf(n, account, value), now);
  if (event === "send") return markSent(tx, key(n), hashOf(key(n)), now);
  if (event === "settle") return recordSettled(tx, key(n), included(n), now);
  if (event === "fail") return recordFailed(tx, key(n), failure, { was: "sent", now });
  if (event === "abandon") return recordFailed(tx, key(n), failure, { was: "claimed", now });
  if (event === "sendAgain") return markSentAgain(tx, key(n), now);
  if (event === "reorganise") return recordReorganised(tx, key(n), now);
  return withdrawClaim(tx, key(n));
}

describe.each(["sqlite", "postgres"] as const)("%s", (dialect) => {
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

  test("reservations are the sum of what is open or settled, per account and day, after any sequence", async () => {
    const runs = { numRuns: dialect === "sqlite" ? 60 : 20 };
    await fc.assert(
      fc.asyncProperty(steps, async (sequence) => {
        await emptied(store);
        const model: Model = new Map();
        let now = NOON;
        for (const step of sequence) {
          now += step.hours * 3_600_000;
          const wanted = expected(model, step, utcDay(now));
          expect(await store.write((tx) => apply(tx, step, now))).toEqual(wanted);
        }
        for (const account of ACCOUNTS) {
          for (let time = NOON; time <= now; time += DAY_MS) {
            const held = heldBy(model, account, utcDay(time));
            expect(await reservedOn(store.read, account, utcDay(time))).toBe(held);
          }
        }
        const rows = (await allPayments(store)).map((row) => `${row.nonce} ${row.status}`);
        expect(rows.sort()).toEqual([...model].map(([n, row]) => `${word(n)} ${row.status}`).sort());
      }),
      runs,
    );
  }, 30_000);

  test("works of several accounts at once give each reservation back once, and none is a deadlock", async () => {
    await emptied(store);
    for (let n = 0; n < 60; n += 1) {
      await store.write((tx) => claimPayment(tx, claimOf(n, ACCOUNTS[n % 2] ?? "", 5n), NOON));
    }
    // As a wallet does, which records several outcomes in one write.
    async function watcher() {
      for (let n = 0; n < 60; n += 1) {
        await store.write(async (tx) => {
          await recordFailed(tx, key(n), failure, { was: "claimed", now: NOON });
          await recordFailed(tx, key((n + 31) % 60), failure, { was: "sent", now: NOON });
        });
      }
    }
    const works = Array.from({ length: 60 }, (_, n) => [
      store.write((tx) => withdrawClaim(tx, key(n))),
      store.write((tx) => claimPayment(tx, claimOf(n, ACCOUNTS[(n >> 1) % 2] ?? "", 5n), NOON)),
      store.write((tx) => markSent(tx, key(n), word(n), NOON)),
      store.write((tx) => recordFailed(tx, key(n), failure, { was: "claimed", now: NOON })),
    ]);
    await Promise.all([watcher(), ...works.flat()]);
    for (const account of ACCOUNTS) {
      const open = (await allPayments(store)).filter(
        (row) => row.account === account && row.status !== "failed",
      );
      expect(await reservedOn(store.read, account, utcDay(NOON))).toBe(5n * BigInt(open.length));
    }
  }, 30_000);

  test("a claim is read back as it was made, to 256 bits", async () => {
    await emptied(store);
    const claim = claimOf(1, "alpha", 2n ** 256n - 1n, 2n ** 256n - 1n);
    expect(await store.write((tx) => claimPayment(tx, claim, NOON))).toBe("claimed");
    const row = await findPayment(store.read, claim.key);
    if (row === null) throw new Error("no record");
    const { key: name, authorization, signature } = claim;
    expect(claimedPayment(row)).toEqual({ key: name, authorization, signature });
    expect(await claimedWithoutTransaction(store.read, 10)).toEqual([row]);
    await store.write((tx) => markSent(tx, name, word(7), NOON + 1));
    expect(await claimedWithoutTransaction(store.read, 10)).toEqual([]);
  });

  test("the first hash stays until one has settled it, and through a reorganisation", async () => {
    await emptied(store);
    const hashes: (string | null | undefined)[] = [];
    const note = async () => hashes.push((await findPayment(store.read, key(1)))?.transaction_hash);
    await store.write((tx) => claimPayment(tx, claimOf(1, "alpha", 1n), NOON));
    await store.write((tx) => markSent(tx, key(1), word(1), NOON));
    await store.write((tx) => markSent(tx, key(1), word(2), NOON));
    await note();
    await store.write((tx) => recordSettled(tx, key(1), { ...included(1), transaction_hash: word(3) }, NOON));
    await store.write((tx) => recordReorganised(tx, key(1), NOON));
    await note();
    expect(hashes).toEqual([word(1), word(3)]);
    expect(await findPayment(store.read, key(1))).toMatchObject({
      status: "sent",
      block_hash: null,
      ended_at: null,
    });
  });
});

test("on SQLite open claims are found by their index, not by a scan of all payments", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const database = new Database(join(place.dir, "tollgate.db"));
  const queries: [string, SQLQueryBindings[]][] = [];
  const logger = {
    logQuery: (query: string, values: unknown[]) => void queries.push([query, values as SQLQueryBindings[]]),
  };
  const db = drizzle(database, { logger }) as unknown as Queries;
  await claimedWithoutTransaction({ db, tables: store.read.tables }, 10);
  for (const [query, values] of queries) {
    const plan = database.query(`explain query plan ${query}`).all(...values);
    expect(JSON.stringify(plan)).toContain("facilitator_payments_open");
  }
  expect(queries).toHaveLength(1);
  database.close();
  await store.close();
  place.remove();
});
