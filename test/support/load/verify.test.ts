// Each disagreement that chaos looks for, planted.
import { expect, test } from "bun:test";
import type { Transfer } from "../chain/chain.ts";
import type { Call } from "./callers.ts";
import { disagreements, type Evidence, rateExceeded } from "./verify.ts";

const NONCE = "0xab";
const call = (fields: Partial<Call> = {}): Call => ({
  n: 0,
  agent: "agt_1",
  kind: "paid",
  nonce: NONCE,
  statuses: [202],
  sentAt: 0,
  answeredAt: 1,
  invocation: "inv_1",
  ...fields,
});
const settled = { status: "settled", tx_hash: "0x1" };
const record = { status: "succeeded", error_class: null, payment_nonce: NONCE, settlement: settled };
const transfer = { nonce: NONCE, transaction_hash: "0x1" } as unknown as Transfer;

interface Planted {
  readonly calls?: readonly Call[];
  readonly records?: Readonly<Record<string, object>>;
  /** The invocations that have brought call 0. */
  readonly made?: readonly string[];
  readonly transfers?: readonly Transfer[];
}

function found(
  { calls = [call()], records = { inv_1: record }, made = ["inv_1"], transfers = [transfer] }: Planted,
  gatewaysDied: boolean,
) {
  const visits = new Map<string, number>();
  for (const id of made) visits.set(id, (visits.get(id) ?? 0) + 1);
  const upstream: Evidence["upstream"] = { of: (n) => (n === 0 ? made : []), visits };
  return disagreements({ calls, records: new Map(Object.entries(records)), upstream, transfers }, { gatewaysDied });
}

const internal = { ...record, status: "failed", error_class: "internal" };
const refused: Partial<Call> = { invocation: null, nonce: null, kind: "free", statuses: [503] };

test.each<[string, Planted, boolean, boolean]>([
  ["what agrees", {}, false, false],
  ["a call that was made twice", { made: ["inv_1", "inv_1"] }, true, true],
  [
    "a key that was made as two calls",
    { made: ["inv_1", "inv_2"], records: { inv_1: record, inv_2: record } },
    true,
    true,
  ],
  ["an accepted call that is lost", { records: {}, made: [] }, true, true],
  ["a call that succeeded and was never made", { made: [] }, true, true],
  ["a call that was made and is not in the history", { made: ["inv_1", "inv_9"] }, true, true],
  ["a call that failed though no gateway died", { records: { inv_1: internal } }, true, false],
  [
    "a call that failed for another reason",
    { records: { inv_1: { ...internal, error_class: "timeout" } } },
    true,
    true,
  ],
  ["a refused call that was made", { calls: [call(refused)], transfers: [] }, true, false],
  ["a payment that moved twice", { transfers: [transfer, transfer] }, true, true],
  ["a call that was made unpaid", { transfers: [] }, true, true],
  [
    "a payment of another transaction than the record names",
    { transfers: [{ ...transfer, transaction_hash: "0x2" }] },
    true,
    true,
  ],
  [
    "a payment of a call whose record does not know of it",
    { records: { inv_1: { ...record, settlement: undefined } } },
    true,
    true,
  ],
  ["a payment of no call", { calls: [call({ invocation: null, statuses: [402] })], records: {}, made: [] }, true, true],
])("finds %s", (_, planted, alive, died) => {
  expect([found(planted, false).length > 0, found(planted, true).length > 0]).toEqual([alive, died]);
});

test("finds one call more than the bucket and its rate let through, however they lie in time", () => {
  const at = (ms: number) => call({ sentAt: ms, answeredAt: ms + 10, kind: "limited" });
  const limit = { rate: 1, burst: 3 };
  const calls = [at(0), at(1), at(2), at(3)];
  expect(rateExceeded(calls, limit)).toEqual([]);
  expect(rateExceeded([...calls, at(4)], limit)).toHaveLength(1);
  // Long before and after there was less.
  expect(rateExceeded([at(-60_000), ...calls, at(4), at(60_000)], limit)).toHaveLength(1);
  expect(rateExceeded([...calls, at(1_010)], limit)).toEqual([]);
});
