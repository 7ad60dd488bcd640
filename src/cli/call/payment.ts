// A caller's payments, for `tollgate call` and the demo. Signatures are made by viem, as by any x402 client, since signatures by
// the product's own code would only prove that it agrees with itself.
import { bytesToHex, type Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { systemClock } from "../../core/time.ts";
import { encodeBase64, MAX_TIMEOUT_SECONDS, parseChallenge } from "../../x402/codec.ts";
import { findNetwork, type Network, SCHEME, X402_VERSION } from "../../x402/network.ts";
import type { Requirements } from "../../x402/types.ts";

/** A payment is valid from this long ago, as with official clients, since the clocks of chain and payer differ. */
const BACKDATED_SECONDS = 600;

const TYPES = {
  TransferWithAuthorization: [
    { name: "from", type: "address" },
    { name: "to", type: "address" },
    { name: "value", type: "uint256" },
    { name: "validAfter", type: "uint256" },
    { name: "validBefore", type: "uint256" },
    { name: "nonce", type: "bytes32" },
  ],
} as const;

/** A blockchain account. */
export interface PayerAccount {
  readonly key: Hex;
  readonly address: Hex;
}

export const newAccount = (): PayerAccount => accountOf(generatePrivateKey());

export const accountOf = (key: Hex): PayerAccount => ({ key, address: privateKeyToAccount(key).address });

export interface PayableOffer {
  readonly network: Network;
  readonly terms: Requirements;
}

/** The first payable offer in the body of a 402: USDC on a known network, by the exact scheme. If there is none, the reason. */
export function payableOffer(challenge: unknown): PayableOffer | string {
  const offers = parseChallenge(challenge);
  if (!offers.ok) return `its terms can't be read: ${offers.reason}`;
  for (const terms of offers.value) {
    const network = findNetwork(terms.network);
    if (terms.scheme === SCHEME && network?.token.key === terms.asset) return { network, terms };
  }
  const asked = offers.value.map(({ scheme, network, asset }) => `${scheme} on ${network} in ${asset}`);
  const paid = "this command pays only in USDC, on a network that it knows, by the scheme exact";
  return `${paid}; the gateway asks for ${asked.join(" or ") || "nothing"}`;
}

export type SignedPayment = Awaited<ReturnType<typeof signPayment>>;

/** Signs the payment of an offer, valid for MAX_TIMEOUT_SECONDS at most, for the network's token whatever the offer says. */
export async function signPayment({ network, terms }: PayableOffer, { key, address }: PayerAccount) {
  const { chainId, token } = network;
  const now = Math.floor(systemClock.now() / 1000);
  const message = {
    from: address,
    to: terms.payTo,
    value: terms.maxAmountRequired,
    validAfter: BigInt(now - BACKDATED_SECONDS),
    validBefore: BigInt(now + Math.min(terms.maxTimeoutSeconds, MAX_TIMEOUT_SECONDS)),
    nonce: bytesToHex(crypto.getRandomValues(new Uint8Array(32))),
  };
  const signature = await privateKeyToAccount(key).signTypedData({
    domain: { name: token.name, version: token.version, chainId, verifyingContract: token.address },
    types: TYPES,
    primaryType: "TransferWithAuthorization",
    message,
  });
  /** In wire format, where every number is a decimal string. */
  const authorization = {
    ...message,
    value: `${message.value}`,
    validAfter: `${message.validAfter}`,
    validBefore: `${message.validBefore}`,
  };
  const payload = { signature, authorization };
  /** The value of X-PAYMENT. */
  const header = encodeBase64({ x402Version: X402_VERSION, scheme: SCHEME, network: network.name, payload });
  return { authorization, signature, header };
}
