// The official library (x402 1.2.0) as a facilitator: its own functions with clients as it makes them itself, but
// for the node that they ask.
import {
  type Chain,
  createPublicClient,
  createWalletClient,
  custom,
  type Hex,
  http,
  publicActions,
  toHex,
  type VerifyTypedDataParameters,
  verifyTypedData,
} from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { base } from "viem/chains";
import { settle, verify } from "x402/facilitator";
import { PaymentPayloadSchema, PaymentRequirementsSchema } from "x402/types";
import type { SignedPayment } from "../../support/chain/payments.ts";

const CHAIN: Chain = base;

export type OfficialPayment = ReturnType<typeof officialPayment>;

/** The payment in the library's own types. */
export function officialPayment({ payload, requirements }: SignedPayment) {
  return {
    payload: PaymentPayloadSchema.parse(payload),
    requirements: PaymentRequirementsSchema.parse(requirements),
  };
}

type Verify = (payment: OfficialPayment) => Promise<boolean>;

/** It asks the chain twice in each verify: to judge the signature, and for the payer's balance. */
export function officialVerify(url: string): Verify {
  const client = createPublicClient({ chain: CHAIN, transport: http(url) });
  return async ({ payload, requirements }) => (await verify(client, payload, requirements)).isValid;
}

/** With a chain that says at once that everybody has enough, and leaves the signature to viem. */
export function officialVerifyAlone(): Verify {
  const balance = toHex(10n ** 12n, { size: 32 });
  const transport = custom({ request: () => Promise.resolve(balance) });
  const client = Object.assign(createPublicClient({ chain: CHAIN, transport }), {
    verifyTypedData: (parameters: VerifyTypedDataParameters) => verifyTypedData(parameters),
  });
  return async ({ payload, requirements }) => (await verify(client, payload, requirements)).isValid;
}

/** One wallet that settles. Resolves with whether the library says that it succeeded; rejects as it does. */
export function officialSettle(url: string, key: Hex): (payment: OfficialPayment) => Promise<boolean> {
  const account = privateKeyToAccount(key);
  const wallet = createWalletClient({ account, chain: CHAIN, transport: http(url) }).extend(publicActions);
  return async ({ payload, requirements }) => (await settle(wallet, payload, requirements)).success;
}
