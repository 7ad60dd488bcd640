// Which transaction a wallet nonce gets, and its row: the payment's transfer, or a transfer of nothing to the wallet
// itself where the nonce must be used and the payment is over.
import type { Authorization, Hex } from "../x402/types.ts";
import type { Fees } from "./fees.ts";
import type { ClaimedPayment } from "./payments.ts";
import type { Signer, Unsigned } from "./signer.ts";
import { TOKEN_ADDRESS, transferData } from "./token.ts";
import type { TransactionRow } from "./transactions.ts";

/** What a transfer of nothing costs, exactly. */
const NOTHING_GAS = 21_000n;

export interface Content {
  readonly to: Hex;
  readonly data: Hex;
  readonly gas: bigint;
  /** Null for one that only uses up the nonce. */
  readonly payment: Pick<Authorization, "from" | "nonce"> | null;
}

export interface Position {
  readonly nonce: number;
  readonly replacement: number;
  readonly fees: Fees;
  /** The chain's newest block now. */
  readonly block: number;
  /** Milliseconds. */
  readonly now: number;
}

export function transfer({ authorization, signature }: ClaimedPayment, gas: bigint): Content {
  return {
    to: TOKEN_ADDRESS,
    data: transferData(authorization, signature),
    gas,
    payment: authorization,
  };
}

export function nothing(wallet: Hex): Content {
  return { to: wallet, data: "0x", gas: NOTHING_GAS, payment: null };
}

/** @throws what the signer throws */
export async function signRow(signer: Signer, content: Content, position: Position): Promise<TransactionRow> {
  const { to, data, gas, payment } = content;
  const { nonce, replacement, fees, block, now } = position;
  const unsigned: Unsigned = { nonce, to, data, gas, fees };
  const { raw, hash } = await signer.sign(unsigned);
  return {
    hash,
    wallet: signer.address,
    wallet_nonce: nonce,
    replacement,
    payer: payment?.from ?? null,
    nonce: payment?.nonce ?? null,
    raw,
    gas: String(gas),
    max_fee: String(fees.maxFee),
    max_priority_fee: String(fees.maxPriorityFee),
    open: true,
    stored_at_block: block,
    created_at: now,
  };
}
