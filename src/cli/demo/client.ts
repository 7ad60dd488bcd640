// The demo's client, as a tenant and as a payer: sends requests to the gateway, and signs payments as any x402 client does.
// Signatures are made by viem, since signatures by the product's own code would only prove that it agrees with itself.
import { bytesToHex, type Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { systemClock } from "../../core/time.ts";
import { readBody } from "../../http/client/body.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import type { AnswerHeaders } from "../../http/client/response-parser.ts";
import { type Network, X402_VERSION } from "../../x402/network.ts";
import type { WireRequirements } from "../../x402/schemas.ts";

const ANSWER_BYTES_MAX = 1024 * 1024;

/** Thrown when the demo can't go on; the message is shown to the reader. */
export class DemoProblem extends Error {
  override readonly name = "DemoProblem";
}

export interface DemoTenant {
  readonly url: string;
  readonly token: string;
}

interface TenantRequest {
  readonly method: "GET" | "POST" | "PATCH";
  readonly path: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: object;
}

export interface GatewayAnswer<T> {
  readonly body: T;
  readonly headers: AnswerHeaders;
  readonly ms: number;
}

/** Sends a request. @throws DemoProblem for any other status than `expected`; OutboundError when there is no response */
export async function call<T = unknown>(
  { url, token }: DemoTenant,
  { method, path, headers = {}, body }: TenantRequest,
  expected: number,
): Promise<GatewayAnswer<T>> {
  const startedAt = performance.now();
  const own = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const response = await createOutbound({ rules: null, extraCa: null }).request(`${url}${path}`, {
    method,
    headers: Object.entries({ ...own, ...headers }),
    body: body === undefined ? null : Buffer.from(JSON.stringify(body)),
    signal: AbortSignal.timeout(60_000),
  });
  const { captured } = await readBody(response, { maxBytes: ANSWER_BYTES_MAX, captureBytes: ANSWER_BYTES_MAX });
  const text = new TextDecoder().decode(captured);
  if (response.status !== expected) {
    throw new DemoProblem(`${method} ${path} was answered ${response.status} instead of ${expected}: ${text}`);
  }
  // Not validated, since the gateway is this same process.
  return { body: JSON.parse(text) as T, headers: response.headers, ms: performance.now() - startedAt };
}

export interface Challenge {
  readonly accepts: readonly [WireRequirements];
}

/** As official clients do, since the clocks of chain and payer differ. */
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

/** A blockchain account, made for this run. */
export interface DemoAccount {
  readonly key: Hex;
  readonly address: Hex;
}

export function newAccount(): DemoAccount {
  const key = generatePrivateKey();
  return { key, address: privateKeyToAccount(key).address };
}

export type SignedPayment = Awaited<ReturnType<typeof signPayment>>;

/** Signs the payment that the body of a 402 asks for. */
export async function signPayment({ chainId }: Network, { key }: DemoAccount, { accepts: [required] }: Challenge) {
  const account = privateKeyToAccount(key);
  const now = Math.floor(systemClock.now() / 1000);
  const message = {
    from: account.address,
    to: required.payTo as Hex,
    value: BigInt(required.maxAmountRequired),
    validAfter: BigInt(now - BACKDATED_SECONDS),
    validBefore: BigInt(now + required.maxTimeoutSeconds),
    nonce: bytesToHex(crypto.getRandomValues(new Uint8Array(32))),
  };
  const signature = await account.signTypedData({
    domain: { ...required.extra, chainId, verifyingContract: required.asset as Hex },
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
  const { scheme, network } = required;
  const payload = { x402Version: X402_VERSION, scheme, network, payload: { signature, authorization } };
  /** The value of X-PAYMENT. */
  const header = Buffer.from(JSON.stringify(payload)).toString("base64");
  return { authorization, signature, header };
}
