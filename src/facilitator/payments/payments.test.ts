import { Database, type SQLQueryBindings } from "bun:sqlite";
import { expect, test } from "bun:test";
import { join } from "node:path";
import { drizzle } from "drizzle-orm/bun-sqlite";
import fc from "fast-check";
import {
  allPayments,
  emptied,
  hashOf,
  NOON,
  PAY_TO,
  reservedOn,
  UNMEASURED,
} from "../../../test/support/chain/settling.ts";
import { BASE } from "../../../test/support/network.ts";
import { eachStore, useStore } from "../../../test/support/stores/one-store.ts";
import { sqlitePlace } from "../../../test/support/stores/stores.ts";
import type { Queries, Store, Tx } from "../../storage/store.ts";
import type { Hex, PaymentKey } from "../../x402/types.ts";
import { usedOn, utcDay } from "./guardrails.ts";
import {
  claimedPayment,
  claimedWithoutTransaction,
  claimPayment,
  heldOf,
  markSent,
  markSentAgain,
  recordFailed,
  recordReorganised,
  recordSettled,
  storedPayment,
  withdrawClaim,
} from "./payments.ts";

const DAY_MS = 86_400_000;
const CEILING = 1_000n;
/** Of the one payer, who has more than the accounts' ceilings of a day and less than two of them. */
const BALANCE = 1_700n;
const GAS_BURNED = 10n;
const DAILY_GAS_WEI = 15n;
const ACCOUNTS = ["alpha", "beta"];
/** Attempts: what one has claimed is no other's to send, to fail or to withdraw. */
const CLAIMS = ["first", "second"] as const;

const word = (n: number): Hex => `0x${n.toString(16).padStart(64, "0")}`;
const key = (n: number): PaymentKey => ({
  chain_id: BASE.chainId,
  token: BASE.token.key,
  payer: `0x${"c".repeat(40)}`,
  nonce: word(n),
});

const claimOf = (n: number, account: string, value: bigint) => ({
  key: key(n),
  claim: CLAIMS[0],
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
  ...UNMEASURED,
});

const included = (n: number) => ({ hash: hashOf(key(n)), blockNumber: 1, blockHash: word(n) });
const failure = { reason: "expired", foreign_transaction: null, gas_burned: null };
const reverted = { ...failure, reason: "reverted", gas_burned: GAS_BURNED };

const EVENTS = ["send", "settle", "fail", "revert", "abandon", "sendAgain", "reorganise", "withdraw"] as const;
interface ModelRow {
  readonly account: string;
  readonly claim: string;
  readonly day: string;
  readonly value: bigint;
  status: string;
}
/** The payments, and the wei burned by account and day. */
interface Model {
  readonly payments: Map<number, ModelRow>;
  readonly burned: Map<string, bigint>;
}
interface Step {
  readonly event: "claim" | (typeof EVENTS)[number];
  readonly n: number;
  readonly account: string;
  readonly claim: string;
  readonly value: bigint;
  /** Whose balance it is: what settles does so in block 1. */
  readonly block: number;
  readonly hours: number;
}

const LEADS: Record<string, { from: string[]; to: string | null }> = {
  send: { from: ["claimed"], to: "sent" },
  settle: { from: ["sent"], to: "settled" },
  fail: { from: ["sent"], to: "failed" },
  revert: { from: ["sent"], to: "reverted" },
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
    claim: fc.constantFrom(CLAIMS[0], ...CLAIMS),
    block: fc.nat(1),
    value: fc.bigInt({ min: 0n, max: 600n }),
    hours: fc.nat(30),
  }),
  { maxLength: 40, size: "max" },
);

const sumOf = (rows: readonly ModelRow[]) => rows.reduce((sum, row) => sum + row.value, 0n);

/** What of the ceiling a model's payments hold: a reverted one too. */
function reservedBy({ payments }: Model, account: string, day: string): bigint {
  return sumOf(
    [...payments.values()].filter((row) => row.account === account && row.day === day && row.status !== "failed"),
  );
}

/** What of the payer's balance at the end of the block. */
function heldBy({ payments }: Model, block: number): bigint {
  const isHeld = ({ status }: ModelRow) =>
    status === "claimed" || status === "sent" || (status === "settled" && block < 1);
  return sumOf([...payments.values()].filter(isHeld));
}

/** Where a step must name the claim that stands. */
const OF_CLAIM = ["send", "abandon", "withdraw"];

function expected(model: Model, step: Step, day: string): unknown {
  const { event, n, account, claim, value, block } = step;
  const row = model.payments.get(n);
  if (event === "claim") {
    if (row !== undefined) return "taken";
    if (reservedBy(model, account, day) + value > CEILING) return "ceiling";
    if ((model.burned.get(account + day) ?? 0n) > DAILY_GAS_WEI) return "gas";
    if (heldBy(model, block) + value > BALANCE) return "held";
    model.payments.set(n, { account, claim, day, value, status: "claimed" });
    return "claimed";
  }
  const lead = LEADS[event];
  if (row === undefined || lead === undefined || !lead.from.includes(row.status)) return false;
  if (OF_CLAIM.includes(event) && row.claim !== claim) return false;
  if (lead.to === null) model.payments.delete(n);
  else row.status = lead.to;
  if (event === "revert") {
    const name = row.account + day;
    model.burned.set(name, (model.burned.get(name) ?? 0n) + GAS_BURNED);
  }
  return true;
}

function apply(tx: Tx, { event, n, account, claim, value, block }: Step, now: number): Promise<unknown> {
  const named = { key: key(n), claim };
  if (event === "claim") {
    const limits = { dailyCeiling: CEILING, dailyGasWei: DAILY_GAS_WEI, dailyGasAllWei: 0n };
    const balance = { amount: BALANCE, block };
    return claimPayment(tx, { ...claimOf(n, account, value), claim, limits, balance, day: utcDay(now) }, now);
  }
  if (event === "send") return markSent(tx, named, hashOf(key(n)), now);
  if (event === "settle") return recordSettled(tx, key(n), included(n), now);
  if (event === "fail") return recordFailed(tx, key(n), failure, { was: "sent", day: utcDay(now), now });
  if (event === "revert") return recordFailed(tx, key(n), reverted, { was: "sent", day: utcDay(now), now });
  if (event === "abandon") return recordFailed(tx, key(n), failure, { was: "claimed", claim, now });
  if (event === "sendAgain") return markSentAgain(tx, key(n), now);
  if (event === "reorganise") return recordReorganised(tx, key(n), now);
  return withdrawClaim(tx, named);
}

eachStore((makePlace, dialect) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ store } = opened);
  });

  test("reservations, burned gas and claims are those of a model, after any sequence", async () => {
    const runs = { numRuns: dialect === "sqlite" ? 60 : 20 };
    await fc.assert(
      fc.asyncProperty(steps, async (sequence) => {
        await emptied(store);
        const model: Model = { payments: new Map(), burned: new Map() };
        let now = NOON;
        for (const step of sequence) {
          now += step.hours * 3_600_000;
          const wanted = expected(model, step, utcDay(now));
          expect(await store.write((tx) => apply(tx, step, now))).toEqual(wanted);
        }
        for (const account of ACCOUNTS) {
          for (let time = NOON; time <= now; time += DAY_MS) {
            const day = utcDay(time);
            expect(await usedOn(store.read, { account, day })).toEqual({
              reserved: reservedBy(model, account, day),
              gasBurned: model.burned.get(account + day) ?? 0n,
              gasUsed: 0n,
            });
          }
        }
        const rows = (await allPayments(store)).map((row) => `${row.nonce} ${row.status}`);
        const wanted = [...model.payments].map(
          ([n, { status }]) => `${word(n)} ${status === "reverted" ? "failed" : status}`,
        );
        expect(rows.sort()).toEqual(wanted.sort());
      }),
      runs,
    );
  });

  test("transactions for several accounts at once give each reservation back once, and none is a deadlock", async () => {
    await emptied(store);
    for (let n = 0; n < 60; n += 1) {
      await store.write((tx) => claimPayment(tx, claimOf(n, ACCOUNTS[n % 2] ?? "", 5n), NOON));
    }
    // As a wallet does, which records several outcomes in one write.
    async function watcher() {
      for (let n = 0; n < 60; n += 1) {
        await store.write(async (tx) => {
          await recordFailed(tx, key(n), failure, { was: "claimed", claim: CLAIMS[0], now: NOON });
          await recordFailed(tx, key((n + 31) % 60), failure, { was: "sent", day: utcDay(NOON), now: NOON });
        });
      }
    }
    const works = Array.from({ length: 60 }, (_, n) => [
      store.write((tx) => withdrawClaim(tx, claimOf(n, "", 5n))),
      store.write((tx) => claimPayment(tx, claimOf(n, ACCOUNTS[(n >> 1) % 2] ?? "", 5n), NOON)),
      store.write((tx) => markSent(tx, claimOf(n, "", 5n), word(n), NOON)),
      store.write((tx) => recordFailed(tx, key(n), failure, { was: "claimed", claim: CLAIMS[0], now: NOON })),
    ]);
    await Promise.all([watcher(), ...works.flat()]);
    for (const account of ACCOUNTS) {
      const open = (await allPayments(store)).filter((row) => row.account === account && row.status !== "failed");
      expect(await reservedOn(store.read, account, utcDay(NOON))).toBe(5n * BigInt(open.length));
    }
  });

  test("a payer without code has 256 payments under way at most, while an account's gas is bounded", async () => {
    await emptied(store);
    const bounded = { dailyCeiling: 10n ** 30n, dailyGasWei: 10n ** 30n, dailyGasAllWei: 0n };
    const claimIn = (tx: Tx, n: number, more: object = {}) =>
      claimPayment(tx, { ...claimOf(n, ACCOUNTS[n % 2] ?? "", 1n), limits: bounded, ...more }, NOON);
    const claim = (n: number, more?: object) => store.write((tx) => claimIn(tx, n, more));
    // In several transactions: a busy database ends one that takes long.
    for (let first = 0; first < 256; first += 16) {
      await store.write(async (tx) => {
        for (let n = first; n < first + 16; n += 1) expect(await claimIn(tx, n)).toBe("claimed");
      });
    }
    await store.write((tx) => markSent(tx, claimOf(0, "", 1n), word(1), NOON));
    expect(await claim(256)).toBe("gas held");
    expect(await claim(257, { limits: { ...bounded, dailyGasWei: 0n } })).toBe("claimed");
    expect(await claim(258, { hasCode: true })).toBe("claimed");
    for (const n of [1, 2, 3]) await store.write((tx) => withdrawClaim(tx, claimOf(n, "", 1n)));
    expect(await claim(256)).toBe("claimed");
    expect(await claim(1)).toBe("gas held");
    await store.write((tx) => recordSettled(tx, key(0), included(0), NOON));
    expect(await claim(1)).toBe("claimed");
  });

  test("a claim is read back as it was made, to 256 bits", async () => {
    await emptied(store);
    const most = 2n ** 256n - 1n;
    const limits = { dailyCeiling: most, dailyGasWei: 0n, dailyGasAllWei: 0n };
    const claim = { ...claimOf(1, "alpha", most), limits, balance: { amount: most, block: 0 } };
    expect(await store.write((tx) => claimPayment(tx, claim, NOON))).toBe("claimed");
    const row = await storedPayment(store.read, claim.key);
    if (row === null) throw new Error("no record");
    const { key: name, claim: attempt, authorization, signature } = claim;
    expect(claimedPayment(row)).toEqual({ key: name, claim: attempt, authorization, signature });
    expect(await claimedWithoutTransaction(store.read, 10)).toEqual([row]);
    await store.write((tx) => markSent(tx, claim, word(7), NOON + 1));
    expect(await claimedWithoutTransaction(store.read, 10)).toEqual([]);
  });

  test("the first hash stays until one has settled the payment, and through a reorganisation", async () => {
    await emptied(store);
    const hashes: (string | null | undefined)[] = [];
    const note = async () => hashes.push((await storedPayment(store.read, key(1)))?.transaction_hash);
    await store.write((tx) => claimPayment(tx, claimOf(1, "alpha", 1n), NOON));
    await store.write((tx) => markSent(tx, claimOf(1, "alpha", 1n), word(1), NOON));
    await store.write((tx) => markSent(tx, claimOf(1, "alpha", 1n), word(2), NOON));
    await note();
    await store.write((tx) => recordSettled(tx, key(1), { ...included(1), hash: word(3) }, NOON));
    await store.write((tx) => recordReorganised(tx, key(1), NOON));
    await note();
    expect(hashes).toEqual([word(1), word(3)]);
    expect(await storedPayment(store.read, key(1))).toMatchObject({
      status: "sent",
      block_hash: null,
      ended_at: null,
    });
  });
});

test("on SQLite open claims, and the open payments of one payer, are found by indexes, not by a scan of all payments", async () => {
  const place = sqlitePlace();
  const store = await place.open();
  const database = new Database(join(place.dir, "tollgate.db"));
  const queries: [string, SQLQueryBindings[]][] = [];
  const logger = {
    logQuery: (query: string, values: unknown[]) => void queries.push([query, values as SQLQueryBindings[]]),
  };
  const db = drizzle(database, { logger }) as unknown as Queries;
  await claimedWithoutTransaction({ db, tables: store.read.tables }, 10);
  await heldOf({ db, tables: store.read.tables } as Tx, key(1).payer, { block: 7 });
  const plans = queries.map(([query, values]) =>
    JSON.stringify(database.query(`explain query plan ${query}`).all(...values)),
  );
  expect(plans).toEqual([
    expect.stringContaining("facilitator_payments_open"),
    expect.stringMatching(/facilitator_payments_payer_open .*facilitator_payments_payer_settled /),
  ]);
  database.close();
  await store.close();
  place.remove();
});
