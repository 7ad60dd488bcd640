// The scenario of the demo: registers two agents, shows a paid call of the http agent step by step, from its challenge to its
// record, and more briefly a priced tool of the mcp agent. Everything goes over HTTP, as for any caller; only balances and
// block numbers are read from the chain.
import type { Hex } from "viem";
import { STATUS, SUCCESS } from "../../http/responses.ts";
import { usdc } from "../../x402/network.ts";
import { type AccessRequest, ask, type GatewayAccess, type GatewayAnswer } from "../call/access.ts";
import type { PayableOffer, PayerAccount, SignedPayment } from "../call/payment.ts";
import { payableOffer, signPayment } from "../call/payment.ts";
import { type DemoChain, DemoProblem } from "./chain.ts";
import { duration, type ListLine, terminal } from "./terminal.ts";

/** Prices in smallest units, of which a USDC has a million. */
export const NOTARY_PRICE = 10_000n;
export const FACTORIZE_PRICE = 25_000n;

/** The agents' IDs, or the URLs of their upstreams. */
export type Agents = Readonly<Record<"notary" | "calculator", string>>;

export interface Scenario {
  readonly tenant: GatewayAccess;
  readonly agents: Agents;
  readonly payer: PayerAccount;
  readonly payee: Hex;
  readonly chain: DemoChain;
}

export async function registerAgents(tenant: GatewayAccess, upstreams: Agents, priced: object): Promise<Agents> {
  const notary = await create(tenant, "/v1/agents", {
    name: "notary",
    description: "Answers with the SHA-256 of what it is sent.",
    upstream_url: upstreams.notary,
    pricing: { amount: `${NOTARY_PRICE}`, ...priced },
  });
  const calculator = await create(tenant, "/v1/agents", {
    name: "calculator",
    description: "Adds for nothing, and factorizes for a price.",
    protocol: "mcp",
    mcp_transport: "streamable_http",
    upstream_url: upstreams.calculator,
    pricing: { amount: "0", ...priced, tools: { factorize: `${FACTORIZE_PRICE}` } },
  });
  return { notary, calculator };
}

/** Configures the facilitator; from then on payments are collected before the call is made. */
export async function configureSettlement(tenant: GatewayAccess, facilitatorUrl: string, bundle: string) {
  const credential = { name: "facilitator", auth_type: "none", source: "managed", plaintext: bundle };
  const id = await create(tenant, "/v1/credentials", credential);
  const body = { facilitator_url: facilitatorUrl, facilitator_credential_ref: id };
  await call(tenant, { method: "PATCH", path: "/v1/settlement/config", body }, SUCCESS.ok);
}

interface DemoRequest extends Omit<AccessRequest, "body" | "signal"> {
  readonly body?: object;
}

interface DemoAnswer<T> extends GatewayAnswer {
  readonly body: T;
  readonly ms: number;
}

/** Sends a request. @throws DemoProblem for any other status than `expected`; OutboundError when there is no response */
async function call<T = unknown>(
  tenant: GatewayAccess,
  { method, path, headers = {}, body }: DemoRequest,
  expected: number,
): Promise<DemoAnswer<T>> {
  const startedAt = performance.now();
  const answer = await ask(tenant, {
    ...{ method, path, signal: AbortSignal.timeout(60_000) },
    headers: { "content-type": "application/json", ...headers },
    ...(body !== undefined && { body: Buffer.from(JSON.stringify(body)) }),
  });
  if (answer.status !== expected) {
    throw new DemoProblem(`${method} ${path} was answered ${answer.status} instead of ${expected}: ${answer.text}`);
  }
  // Not validated, since the gateway is this same process.
  return { ...answer, body: answer.body as T, ms: performance.now() - startedAt };
}

const create = async (tenant: GatewayAccess, path: string, body: object): Promise<string> =>
  (await call<{ readonly id: string }>(tenant, { method: "POST", path, body }, SUCCESS.created)).body.id;

/** Runs a whole paid call. @throws DemoProblem when a step does not go as it must */
export async function runPaidCall(scenario: Scenario): Promise<void> {
  const { tenant, agents, payer } = scenario;
  const path = `/v1/proxy/${agents.notary}`;
  const letter = { text: "Pay to the bearer on demand" };
  terminal.section(`A paid call of the http agent "notary", step by step`);

  terminal.chapter(1, "A call without a payment is answered with what it costs");
  terminal.line(`POST ${path}`);
  terminal.line(JSON.stringify(letter));
  const asked = await challengeFor(scenario, path, letter);
  terminal.line(`402 Payment Required, ${elapsed(asked)}`);
  terminal.json(asked.body);

  terminal.chapter(2, "The payer signs that authorization (EIP-3009): no transaction, and no gas");
  const payment = await signPayment(offerIn(asked.body), payer);
  terminal.entries(authorizationEntries(payment));

  terminal.chapter(3, "The same call with the payment in X-PAYMENT");
  const before = await balances(scenario);
  const paid = await pay(scenario, path, letter, payment);
  terminal.line(`202 Accepted, ${elapsed(paid)}: collected before the answer`);
  terminal.entries(await paidEntries(scenario, paid));

  terminal.chapter(4, "The money has moved");
  showBalances(before, await balances(scenario));

  const { invocation_id: id } = paid.body;
  terminal.chapter(5, "The agent was called, and its answer is there to be polled");
  terminal.line(`GET /v1/proxy/agt_…/invocations/${id}`);
  const { body: result } = await ended(scenario, path, id);
  terminal.line(`${result.status}, upstream ${result.upstream_status} in ${result.latency_ms} ms; its answer:`);
  terminal.json(answerOf(result));

  terminal.chapter(6, "The same payment once more is the same call: it buys nothing twice");
  const again = await pay(scenario, path, letter, payment);
  if (again.body.invocation_id !== id) throw new DemoProblem("one payment made two calls");
  terminal.line(`202 Accepted, ${elapsed(again)}`);
  terminal.entries([["invocation", `${id} (the same)`]]);

  terminal.chapter(7, "What the history keeps of it");
  terminal.line(`GET /v1/invocations/${id}`);
  const get = { method: "GET", path: `/v1/invocations/${id}` } as const;
  const record = await call<{ readonly settlement: { readonly status: string } }>(tenant, get, SUCCESS.ok);
  const { settlement } = record.body;
  terminal.json({ settlement });
  if (settlement.status !== "settled") throw new DemoProblem("the record is not settled");
}

export async function runPricedTool(scenario: Scenario): Promise<void> {
  const { tenant, agents, payer } = scenario;
  const path = `/v1/proxy/${agents.calculator}`;
  terminal.section(`The mcp agent "calculator": one tool is free, the other has a price of its own`);

  const sum = { a: 40, b: 2 };
  terminal.chapter(1, `tools/call add ${JSON.stringify(sum)}`);
  const free = await call<Accepted>(tenant, { method: "POST", path, body: toolCall("add", sum) }, SUCCESS.accepted);
  terminal.line(`202 Accepted, ${elapsed(free)}, without any payment`);
  await showToolResult(scenario, path, free.body);

  const product = { number: 600_851_475_143 };
  terminal.chapter(2, `tools/call factorize ${JSON.stringify(product)}`);
  const body = toolCall("factorize", product);
  const asked = await challengeFor(scenario, path, body);
  const offer = offerIn(asked.body);
  const price = offer.terms.maxAmountRequired;
  if (price !== FACTORIZE_PRICE) throw new DemoProblem("the tool is not asked for at its own price");
  terminal.line(`402 Payment Required, ${elapsed(asked)}: ${usdc(price)} USDC`);

  const before = await balances(scenario);
  const paid = await pay(scenario, path, body, await signPayment(offer, payer));
  terminal.line(`202 Accepted, ${elapsed(paid)}, with the payment`);
  terminal.entries(await paidEntries(scenario, paid));
  showBalances(before, await balances(scenario));
  await showToolResult(scenario, path, paid.body);
}

function toolCall(name: string, args: object): object {
  return { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name, arguments: args } };
}

const challengeFor = ({ tenant }: Scenario, path: string, body: object): Promise<DemoAnswer<object>> =>
  call<object>(tenant, { method: "POST", path, body }, STATUS.payment_required);

function offerIn(challenge: object): PayableOffer {
  const offer = payableOffer(challenge);
  if (typeof offer === "string") throw new DemoProblem(offer);
  return offer;
}

interface Accepted {
  readonly invocation_id: string;
}

interface PolledCall {
  readonly status: string;
  readonly error_class: string | null;
  readonly upstream_status: number | null;
  readonly latency_ms: number | null;
  readonly response_body_b64: string;
}

function pay({ tenant }: Scenario, path: string, body: object, { header }: SignedPayment) {
  const headers = { "x-payment": header };
  return call<Accepted>(tenant, { method: "POST", path, headers, body }, SUCCESS.accepted);
}

async function paidEntries({ chain }: Scenario, { headers, body }: DemoAnswer<Accepted>): Promise<ListLine[]> {
  const settled = headers.get("x-payment-response");
  if (settled === null) throw new DemoProblem("the payment was not collected in time");
  const { transaction } = JSON.parse(Buffer.from(settled, "base64").toString()) as { readonly transaction: Hex };
  return [
    ["invocation", body.invocation_id],
    ["transaction", transaction],
    ["block", String(await chain.blockOf(transaction))],
  ];
}

function authorizationEntries({ authorization, signature }: SignedPayment): ListLine[] {
  const { from, to, value, validAfter, validBefore, nonce } = authorization;
  return [
    ["from", `${from}  the payer`],
    ["to", `${to}  the agent's owner`],
    ["value", `${value}  (${usdc(BigInt(value))} USDC)`],
    ["validAfter", validAfter],
    ["validBefore", validBefore],
    ["nonce", nonce],
    ["signature", `${signature.slice(0, 18)}…${signature.slice(-8)}  (65 bytes)`],
  ];
}

type Balances = Readonly<Record<"payer" | "payee", bigint>>;

async function balances({ chain, payer, payee }: Scenario): Promise<Balances> {
  return { payer: await chain.usdcOf(payer.address), payee: await chain.usdcOf(payee) };
}

function showBalances(before: Balances, after: Balances): void {
  const row = (who: keyof Balances): ListLine => {
    const change = after[who] - before[who];
    return [
      who,
      `${column(before[who])}  →  ${column(after[who])} USDC  (${change < 0n ? "-" : "+"}${usdc(change < 0n ? -change : change)})`,
    ];
  };
  terminal.entries([row("payer"), row("payee")]);
}

/** Smallest units as USDC with all six decimals, in columns. */
function column(units: bigint): string {
  const digits = units.toString().padStart(7, "0");
  return `${digits.slice(0, -6)}.${digits.slice(-6)}`.padStart(9);
}

/** The poll view of an invocation that has ended. @throws DemoProblem when it failed */
async function ended({ tenant }: Scenario, path: string, id: string): Promise<DemoAnswer<PolledCall>> {
  const request = { method: "GET", path: `${path}/invocations/${id}`, headers: { prefer: "wait=20" } } as const;
  const polled = await call<PolledCall>(tenant, request, SUCCESS.ok);
  const { status, error_class } = polled.body;
  if (status !== "succeeded") throw new DemoProblem(`the call ended ${status}, ${error_class}`);
  return polled;
}

async function showToolResult(scenario: Scenario, path: string, { invocation_id }: Accepted): Promise<void> {
  const { body } = await ended(scenario, path, invocation_id);
  const { result } = answerOf(body) as { readonly result: { readonly content: readonly [{ readonly text: string }] } };
  terminal.entries([["result", result.content[0].text]]);
}

const answerOf = ({ response_body_b64 }: PolledCall): unknown =>
  JSON.parse(Buffer.from(response_body_b64, "base64").toString());

const elapsed = ({ ms }: { readonly ms: number }): string => `in ${duration(ms)}`;
