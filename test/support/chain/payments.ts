// Payers and what they sign, made by viem and not by the product's own code, in every form that the wire knows:
// the headers of both versions of x402 and the body of a settle request. Every field can be made wrong.

import {
  type Address,
  bytesToHex,
  type Hex,
  hexToBigInt,
  type LocalAccount,
  numberToHex,
  parseSignature,
  serializeSignature,
  toHex,
} from "viem";
import { generatePrivateKey, type PrivateKeyAccount, privateKeyToAccount } from "viem/accounts";
import { SCHEME } from "../../../src/x402/network.ts";
import { checkSignature, type Verifier } from "../../../src/x402/verify.ts";
import { BASE } from "../network.ts";

/** Judges at once, on the thread of the test. */
export const verifiedAtOnce: Pick<Verifier, "signedBy"> = {
  signedBy: async (_owner, payment) => checkSignature({ domain: BASE.token.domain, ...payment }),
};

const CURVE_ORDER = 0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141n;
const WINDOW_SECONDS = 600;

/** What a payer signs (EIP-3009), in the words of EIP-712. */
export const TRANSFER_TYPES = {
  TransferWithAuthorization: [
    { name: "from", type: "address" },
    { name: "to", type: "address" },
    { name: "value", type: "uint256" },
    { name: "validAfter", type: "uint256" },
    { name: "validBefore", type: "uint256" },
    { name: "nonce", type: "bytes32" },
  ],
} as const;

export interface PaymentOptions {
  readonly to: Address;
  readonly value: bigint;
  /** The payer, when it is another than the one who signs: a contract wallet, or a lie. */
  readonly from?: Address;
  /** Unix seconds. By default the payment is valid from ten minutes ago until ten minutes from now. */
  readonly validAfter?: bigint | number;
  readonly validBefore?: bigint | number;
  /** 32 bytes; random by default. */
  readonly nonce?: Hex;
  /** The form of the signature: `zero` has v 0 or 1; `high-s` is the other valid signature of the same words. */
  readonly form?: "plain" | "zero" | "high-s";
  /** Replaces the signature altogether. */
  readonly signature?: Hex;
  /** Parts of the EIP-712 domain that the payer gets wrong. */
  readonly domain?: { name?: string; version?: string; chainId?: number; verifyingContract?: Address };
  /** What the envelope says of scheme and network (in the words of version 1), without a change of what is signed. */
  readonly scheme?: string;
  readonly network?: string;
  /** What the payer was asked for, as the settle request names it; by default what the payment pays. */
  readonly requirements?: Partial<WireRequirements>;
}

/** An entry of `accepts` in version 1. */
export interface WireRequirements {
  readonly scheme: string;
  readonly network: string;
  readonly maxAmountRequired: string;
  readonly resource: string;
  readonly description: string;
  readonly mimeType: string;
  readonly payTo: string;
  readonly maxTimeoutSeconds: number;
  readonly asset: string;
  readonly extra: { readonly name: string; readonly version: string };
}

/** The authorization as it travels: every number a decimal string. */
export interface WireAuthorization {
  readonly from: Address;
  readonly to: Address;
  readonly value: string;
  readonly validAfter: string;
  readonly validBefore: string;
  readonly nonce: Hex;
}

export type SignedPayment = Awaited<ReturnType<typeof signPayment>>;

/** A payer with a key of its own and nothing on any chain. */
export function newPayer(): PrivateKeyAccount {
  return privateKeyToAccount(generatePrivateKey());
}

export function randomNonce(): Hex {
  return bytesToHex(crypto.getRandomValues(new Uint8Array(32)));
}

/** Signs an EIP-3009 `TransferWithAuthorization` and wraps it up for each version of the protocol. */
export async function signPayment(account: LocalAccount, options: PaymentOptions) {
  const now = Math.floor(Date.now() / 1000);
  const words = {
    from: options.from ?? account.address,
    to: options.to,
    value: options.value,
    validAfter: BigInt(options.validAfter ?? now - WINDOW_SECONDS),
    validBefore: BigInt(options.validBefore ?? now + WINDOW_SECONDS),
    nonce: options.nonce ?? randomNonce(),
  };
  const signature = options.signature ?? reform(await sign(account, words, options), options.form ?? "plain");
  const authorization: WireAuthorization = {
    ...words,
    value: `${words.value}`,
    validAfter: `${words.validAfter}`,
    validBefore: `${words.validBefore}`,
  };
  const { scheme = SCHEME, network = BASE.name } = options;
  const payload = { x402Version: 1 as const, scheme, network, payload: { signature, authorization } };
  const requirements = wireRequirements(options);
  const version2 = version2Payload(payload, requirements);
  return {
    authorization,
    signature,
    /** Version 1's payload, before its encoding. */
    payload,
    version2,
    requirements,
    /** The value of X-PAYMENT. */
    header: encode(payload),
    /** The value of PAYMENT-SIGNATURE. */
    version2Header: encode(version2),
    /** The headers of a paid call. */
    headers: { "X-PAYMENT": encode(payload) },
    version2Headers: { "PAYMENT-SIGNATURE": encode(version2) },
    /** The body of a settle request. */
    settleRequest: { x402Version: 1 as const, paymentPayload: payload, paymentRequirements: requirements },
  };
}

function wireRequirements(options: PaymentOptions): WireRequirements {
  return {
    scheme: SCHEME,
    network: BASE.name,
    maxAmountRequired: `${options.value}`,
    resource: "https://gateway.test/v1/agents/agent/invoke",
    description: "",
    mimeType: "application/json",
    payTo: options.to,
    maxTimeoutSeconds: WINDOW_SECONDS,
    asset: BASE.token.address,
    extra: { name: BASE.token.name, version: BASE.token.version },
    ...options.requirements,
  };
}

/** The same payment in version 2: what was accepted travels with it, and the network has its CAIP-2 name. */
function version2Payload(
  { scheme, network, payload }: { scheme: string; network: string; payload: object },
  asked: WireRequirements,
) {
  return {
    x402Version: 2 as const,
    resource: { url: asked.resource, description: asked.description, mimeType: asked.mimeType },
    accepted: {
      scheme,
      network: network === BASE.name ? BASE.caip2 : network,
      amount: asked.maxAmountRequired,
      asset: asked.asset,
      payTo: asked.payTo,
      maxTimeoutSeconds: asked.maxTimeoutSeconds,
      extra: asked.extra,
    },
    payload,
  };
}

function sign(
  account: LocalAccount,
  message: {
    from: Address;
    to: Address;
    value: bigint;
    validAfter: bigint;
    validBefore: bigint;
    nonce: Hex;
  },
  { domain }: PaymentOptions,
): Promise<Hex> {
  return account.signTypedData({
    domain: {
      name: BASE.token.name,
      version: BASE.token.version,
      chainId: BASE.chainId,
      verifyingContract: BASE.token.address,
      ...domain,
    },
    types: TRANSFER_TYPES,
    primaryType: "TransferWithAuthorization",
    message,
  });
}

function reform(signature: Hex, form: "plain" | "zero" | "high-s"): Hex {
  const { r, s, yParity } = parseSignature(signature);
  if (form === "zero") return `0x${signature.slice(2, -2)}${numberToHex(yParity, { size: 1 }).slice(2)}`;
  if (form === "plain") return serializeSignature({ r, s, yParity });
  const other = toHex(CURVE_ORDER - hexToBigInt(s), { size: 32 });
  return serializeSignature({ r, s: other, yParity: 1 - yParity });
}

function encode(value: unknown): string {
  return Buffer.from(JSON.stringify(value)).toString("base64");
}
