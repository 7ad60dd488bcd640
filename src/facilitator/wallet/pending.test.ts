import { expect, test } from "bun:test";
import type { Hex } from "../../x402/types.ts";
import { createPendingNonces, REACH } from "./pending.ts";
import type { TransactionRow } from "./transactions.ts";

const WALLET: Hex = `0x${"aa".repeat(20)}`;

function fillerAt(wallet_nonce: number): TransactionRow {
  const hash: Hex = `0x${wallet_nonce.toString(16).padStart(64, "0")}`;
  const fees = { gas: "1", max_fee: "1", max_priority_fee: "1" };
  const at = { open: true, gas_burned: null, stored_at_block: 1, created_at: 1 };
  return {
    hash,
    wallet: WALLET,
    wallet_nonce,
    replacement: 0,
    payer: null,
    nonce: null,
    raw: "0x",
    ...fees,
    ...at,
    payments: [],
  };
}

test("transactions at nonces far away, where a node once sent them, take no place from others", () => {
  const pendingNonces = createPendingNonces();
  const [near, far] = [5, 1_000_000].map((nonce) => pendingNonces.add(fillerAt(nonce), []));
  expect(pendingNonces.load(WALLET)).toBe(2);
  pendingNonces.advance(WALLET, 5);
  expect([near, far].map((pendingNonce) => pendingNonce !== undefined && pendingNonces.isOpen(pendingNonce))).toEqual([
    true,
    false,
  ]);
  expect(pendingNonces.load(WALLET)).toBe(1);
  pendingNonces.advance(WALLET, 1_000_001 - REACH);
  expect(pendingNonces.load(WALLET)).toBe(2);
});
