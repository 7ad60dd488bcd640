// The demo as a caller, a tenant and a payer: plain HTTP with a limit on time and size, agents and the facilitator configured
// through the gateway's API, and payments signed as any client of x402 signs them. The signature is made by viem and not by the
// product's own code, which would only agree with itself. Answers are read field by field, since the demo shares nothing but
// the wire format with the servers.

import { bytesToHex, type Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { systemClock } from "../../core/time.ts";
import { readBody } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import type { AnswerHeaders } from "../../http/client/response-parser.ts";
import { ASSET, CHAIN_ID, NETWORK, X402_VERSION } from "../../x402/kind.ts";

const ANSWER_BYTES_MAX = 1024 * 1024;

interface HttpRequest {
  readonly method: "GET" | "POST" | "PATCH";
  readonly url: string;
  readonly headers?: Readonly<Record<string, string>>;
  /** Sent as JSON. */
  readonly body?: unknown;
}

export interface HttpAnswer {
  readonly status: number;
  readonly headers: AnswerHeaders;
  /** Undefined when it is no JSON. */
  readonly body: unknown;
  readonly ms: number;
}

/** @throws DemoProblem when there is no answer; the signal's reason */
export async function ask({ method, url, headers = {}, body }: HttpRequest, signal: AbortSignal): Promise<HttpAnswer> {
  const startedAt = performance.now();
  // Everything that is called here is a part of the demo, on this machine.
  const outbound = createOutbound({ rules: null, extraCa: null });
  const content = body === undefined ? null : new TextEncoder().encode(JSON.stringify(body));
  try {
    const response = await outbound.request(url, {
      method,
      headers: [...Object.entries(headers), ["content-type", "application/json"]],
      body: content,
      signal,
    });
    const { captured } = await readBody(response, {
      maxBytes: ANSWER_BYTES_MAX,
      captureBytes: ANSWER_BYTES_MAX,
    });
    const ms = performance.now() - startedAt;
    return { status: response.status, headers: response.headers, body: parsed(captured), ms };
  } catch (error) {
    signal.throwIfAborted();
    if (!(error instanceof OutboundError)) throw error;
    throw new DemoProblem(`no answer from ${new URL(url).origin} (${error.message})`, { cause: error });
  }
}

function parsed(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return undefined;
  }
}

/** The value below these names; undefined where there is none. */
export function at(value: unknown, ...names: readonly (string | number)[]): unknown {
  let found = value;
  for (const name of names) {
    if (typeof found !== "object" || found === null) return undefined;
    found = Object.getOwnPropertyDescriptor(found, name)?.value;
  }
  return found;
}

/** @throws DemoProblem when there is no text */
export function textAt(value: unknown, ...names: readonly (string | number)[]): string {
  const found = at(value, ...names);
  if (typeof found === "string") return found;
  throw new DemoProblem(`an answer holds no ${names.join(".")}`);
}

export class DemoProblem extends Error {
  override readonly name = "DemoProblem";
}

/** In smallest units, of which a USDC has a million. */
export const NOTARY_PRICE = 10_000n;
export const FACTORIZE_PRICE = 25_000n;

/** A tenant's access to the gateway. */
export interface DemoTenant {
  readonly url: string;
  readonly token: string;
}

/** A request to a path of the gateway, with the tenant's token. */
interface TenantRequest extends Omit<HttpRequest, "url"> {
  readonly path: string;
}

export function call(
  { url, token }: DemoTenant,
  { path, ...asked }: TenantRequest,
  signal: AbortSignal,
): Promise<HttpAnswer> {
  const headers = { authorization: `Bearer ${token}`, ...asked.headers };
  return ask({ ...asked, url: `${url}${path}`, headers }, signal);
}

/** The agents' IDs, or the URLs of their upstreams. */
export type Agents = Readonly<Record<"notary" | "calculator", string>>;

/** @returns the agents' IDs */
export async function registerAgents(
  tenant: DemoTenant,
  upstreams: Agents,
  payTo: Hex,
  signal: AbortSignal,
): Promise<Agents> {
  const priced = { asset: ASSET, network: NETWORK, pay_to: payTo };
  const notary = await create(
    tenant,
    "/v1/agents",
    {
      name: "notary",
      description: "Answers with the SHA-256 of what it is sent.",
      upstream_url: upstreams.notary,
      pricing: { amount: `${NOTARY_PRICE}`, ...priced },
    },
    signal,
  );
  const calculator = await create(
    tenant,
    "/v1/agents",
    {
      name: "calculator",
      description: "Adds for nothing, and factorizes for a price.",
      protocol: "mcp",
      mcp_transport: "streamable_http",
      upstream_url: upstreams.calculator,
      pricing: { amount: "0", ...priced, tools: { factorize: `${FACTORIZE_PRICE}` } },
    },
    signal,
  );
  return { notary, calculator };
}

/** From then on payments are collected before the call is made. */
export async function configureSettlement(
  tenant: DemoTenant,
  facilitatorUrl: string,
  bundle: string,
  signal: AbortSignal,
): Promise<void> {
  const credential = { name: "facilitator", auth_type: "none", source: "managed", plaintext: bundle };
  const id = await create(tenant, "/v1/credentials", credential, signal);
  const body = { facilitator_url: facilitatorUrl, facilitator_credential_ref: id };
  const answer = await call(tenant, { method: "PATCH", path: "/v1/settlement/config", body }, signal);
  requireGood("PATCH /v1/settlement/config", answer);
}

async function create(tenant: DemoTenant, path: string, body: object, signal: AbortSignal): Promise<string> {
  const answer = await call(tenant, { method: "POST", path, body }, signal);
  requireGood(`POST ${path}`, answer);
  return textAt(answer.body, "id");
}

/** @throws DemoProblem */
export function requireGood(what: string, { status, body }: HttpAnswer): void {
  if (status < 300) return;
  throw new DemoProblem(`${what} was answered ${status} ${JSON.stringify(body) ?? ""}`);
}

/** Official clients do the same, since the clocks of chain and payer differ. */
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

/** An account of this run. */
export interface DemoAccount {
  readonly key: Hex;
  readonly address: Hex;
}

export function newAccount(): DemoAccount {
  const key = generatePrivateKey();
  return { key, address: privateKeyToAccount(key).address };
}

export type SignedPayment = Awaited<ReturnType<typeof signPayment>>;

/**
 * Signs what the body of a 402 asks for.
 *
 * @throws DemoProblem when it is no challenge
 */
export async function signPayment({ key }: DemoAccount, challenge: unknown) {
  const asked = at(challenge, "accepts", 0);
  const account = privateKeyToAccount(key);
  const now = Math.floor(systemClock.now() / 1000);
  const words = {
    from: account.address,
    to: hexAt(asked, "payTo"),
    value: BigInt(textAt(asked, "maxAmountRequired")),
    validAfter: BigInt(now - BACKDATED_SECONDS),
    validBefore: BigInt(now + Number(at(asked, "maxTimeoutSeconds"))),
    nonce: bytesToHex(crypto.getRandomValues(new Uint8Array(32))),
  };
  const signature = await account.signTypedData({
    domain: {
      name: textAt(asked, "extra", "name"),
      version: textAt(asked, "extra", "version"),
      chainId: CHAIN_ID,
      verifyingContract: hexAt(asked, "asset"),
    },
    types: TYPES,
    primaryType: "TransferWithAuthorization",
    message: words,
  });
  /** In wire format: every number is a decimal string. */
  const authorization = {
    ...words,
    value: `${words.value}`,
    validAfter: `${words.validAfter}`,
    validBefore: `${words.validBefore}`,
  };
  const payload = {
    x402Version: X402_VERSION,
    scheme: textAt(asked, "scheme"),
    network: textAt(asked, "network"),
    payload: { signature, authorization },
  };
  /** The value of X-PAYMENT. */
  const header = Buffer.from(JSON.stringify(payload)).toString("base64");
  return { authorization, signature, header };
}

function hexAt(value: unknown, name: string): Hex {
  const text = textAt(value, name);
  if (/^0x[0-9a-fA-F]{40}$/.test(text)) return `0x${text.slice(2)}`;
  throw new DemoProblem(`the challenge's ${name} is no address`);
}
