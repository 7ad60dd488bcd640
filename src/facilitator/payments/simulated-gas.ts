// What a simulation found, as a claim keeps it for whoever sends the payment.
import type { Hex } from "../../x402/types.ts";
import type { PaymentsTable } from "./held-funds.ts";

/** It holds for the wallet that it was made for. */
export interface SimulatedGas {
  readonly limit: bigint;
  readonly from: Hex;
  /** Whether it may share a transaction with other payments. */
  readonly mayShare: boolean;
}

type Kept = Pick<PaymentsTable["$inferSelect"], "wallet" | "gas_limit" | "may_share">;

/** As it was for the claim; null for what an earlier version has claimed. */
export function simulatedGas({ wallet, gas_limit, may_share }: Kept): SimulatedGas | null {
  if (wallet === null || gas_limit === null) return null;
  return { limit: BigInt(gas_limit), from: wallet, mayShare: may_share === true };
}
