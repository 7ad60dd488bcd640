// The scenario of the demo: a paid call of an http agent from its challenge to its record, step by step, and more
// briefly a priced tool of an mcp agent. All through HTTP, like a caller; only balances come from the chain.
import type { Hex } from "viem";
import { STATUS, SUCCESS } from "../../http/responses.ts";
import { type DemoChain, usdc } from "./chain.ts";
import {
  type Agents,
  at,
  call,
  type DemoAccount,
  DemoProblem,
  type DemoTenant,
  FACTORIZE_PRICE,
  type HttpAnswer,
  requireGood,
  type SignedPayment,
  signPayment,
  textAt,
} from "./client.ts";
import { duration, type ListLine, type Terminal } from "./terminal.ts";

export interface Scenario {
  readonly terminal: Terminal;
  readonly tenant: DemoTenant;
  readonly agents: Agents;
  readonly payer: DemoAccount;
  readonly payee: Hex;
  readonly chain: DemoChain;
}

const LETTER = { text: "Pay to the bearer on demand" };
const NUMBER = 600_851_475_143;
const CHALLENGED = STATUS.payment_required;
const ACCEPTED = SUCCESS.accepted;

/** Runs a whole paid call. @throws DemoProblem when a step does not go as it must */
export async function runPaidCall(scenario: Scenario, signal: AbortSignal): Promise<void> {
  const { terminal, tenant, agents, payer } = scenario;
  const path = `/v1/proxy/${agents.notary}`;
  terminal.section(`A paid call of the http agent "notary", step by step`);

  terminal.chapter(1, "A call without a payment is answered with what it costs");
  terminal.line(`POST ${path}`);
  terminal.line(JSON.stringify(LETTER));
  const asked = await call(tenant, { method: "POST", path, body: LETTER }, signal);
  requireStatus(asked, CHALLENGED);
  terminal.line(`402 Payment Required, ${shortly(asked)}`);
  terminal.json(asked.body);

  terminal.chapter(2, "The payer signs that authorization (EIP-3009): no transaction, and no gas");
  const payment = await signPayment(payer, asked.body);
  terminal.entries(authorizationEntries(payment));

  terminal.chapter(3, "The same call with the payment in X-PAYMENT");
  const before = await balances(scenario);
  const paid = await pay(scenario, path, LETTER, payment, signal);
  terminal.line(`202 Accepted, ${shortly(paid.answer)}: collected before the answer`);
  terminal.entries(await paidEntries(scenario, paid));

  terminal.chapter(4, "The money has moved");
  showBalances(terminal, before, await balances(scenario));

  terminal.chapter(5, "The agent was called, and its answer is there to be polled");
  await showResult(scenario, path, paid.invocation, signal);

  terminal.chapter(6, "The same payment once more is the same call: it buys nothing twice");
  const again = await pay(scenario, path, LETTER, payment, signal);
  terminal.line(`202 Accepted, ${shortly(again.answer)}`);
  terminal.entries([["invocation", `${again.invocation} (${sameness(again.invocation, paid.invocation)})`]]);
  if (again.invocation !== paid.invocation) throw new DemoProblem("one payment made two calls");

  terminal.chapter(7, "What the history keeps of it");
  await showRecord(scenario, paid.invocation, signal);
}

function sameness(one: string, other: string): string {
  return one === other ? "the same" : "another one!";
}

export async function runPricedTool(scenario: Scenario, signal: AbortSignal): Promise<void> {
  const { terminal, tenant, agents, payer } = scenario;
  const path = `/v1/proxy/${agents.calculator}`;
  terminal.section(`The mcp agent "calculator": one tool is free, the other has a price of its own`);

  const sum = { a: 40, b: 2 };
  terminal.chapter(1, `tools/call add ${JSON.stringify(sum)}`);
  const free = await call(tenant, { method: "POST", path, body: toolCall(1, "add", sum) }, signal);
  requireStatus(free, ACCEPTED);
  terminal.line(`202 Accepted, ${shortly(free)}, without any payment`);
  await showToolResult(scenario, path, textAt(free.body, "invocation_id"), signal);

  const product = { number: NUMBER };
  terminal.chapter(2, `tools/call factorize ${JSON.stringify(product)}`);
  const body = toolCall(2, "factorize", product);
  const asked = await call(tenant, { method: "POST", path, body }, signal);
  requireStatus(asked, CHALLENGED);
  const price = BigInt(textAt(asked.body, "accepts", 0, "maxAmountRequired"));
  if (price !== FACTORIZE_PRICE) throw new DemoProblem("the tool is not asked for at its own price");
  terminal.line(`402 Payment Required, ${shortly(asked)}: ${usdc(price)} USDC`);

  const before = await balances(scenario);
  const paid = await pay(scenario, path, body, await signPayment(payer, asked.body), signal);
  terminal.line(`202 Accepted, ${shortly(paid.answer)}, with the payment`);
  terminal.entries(await paidEntries(scenario, paid));
  showBalances(terminal, before, await balances(scenario));
  await showToolResult(scenario, path, paid.invocation, signal);
}

function toolCall(id: number, name: string, args: object): object {
  return { jsonrpc: "2.0", id, method: "tools/call", params: { name, arguments: args } };
}

/** A call that was paid for and accepted. */
interface Paid {
  readonly answer: HttpAnswer;
  readonly invocation: string;
  /** What X-PAYMENT-RESPONSE says. */
  readonly settled: unknown;
}

async function pay(
  { tenant }: Scenario,
  path: string,
  body: object,
  { header }: SignedPayment,
  signal: AbortSignal,
): Promise<Paid> {
  const answer = await call(tenant, { method: "POST", path, headers: { "x-payment": header }, body }, signal);
  requireStatus(answer, ACCEPTED);
  const settlement = answer.headers.get("x-payment-response");
  if (settlement === null) throw new DemoProblem("the payment was not collected in time");
  const settled: unknown = JSON.parse(Buffer.from(settlement, "base64").toString());
  return { answer, invocation: textAt(answer.body, "invocation_id"), settled };
}

async function paidEntries({ chain }: Scenario, { invocation, settled }: Paid): Promise<ListLine[]> {
  const transaction = textAt(settled, "transaction");
  const block = await chain.blockOf(transaction);
  return [
    ["invocation", invocation],
    ["transaction", transaction],
    ["block", String(block)],
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

interface Balances {
  readonly payer: bigint;
  readonly payee: bigint;
}

async function balances({ chain, payer, payee }: Scenario): Promise<Balances> {
  return { payer: await chain.usdcOf(payer.address), payee: await chain.usdcOf(payee) };
}

function showBalances(terminal: Terminal, before: Balances, after: Balances): void {
  const row = (who: keyof Balances): ListLine => [
    who,
    `${column(before[who])}  →  ${column(after[who])} USDC  (${change(after[who] - before[who])})`,
  ];
  terminal.entries([row("payer"), row("payee")]);
}

/** Smallest units as USDC with all six decimals, in columns. */
function column(units: bigint): string {
  const digits = units.toString().padStart(7, "0");
  return `${digits.slice(0, -6)}.${digits.slice(-6)}`.padStart(9);
}

function change(units: bigint): string {
  return `${units > 0n ? "+" : ""}${usdc(units)}`;
}

/** The poll view of an invocation that has ended. @throws DemoProblem when it failed */
async function ended({ tenant }: Scenario, path: string, invocation: string, signal: AbortSignal): Promise<HttpAnswer> {
  const headers = { prefer: "wait=20" };
  const polled = await call(tenant, { method: "GET", path: `${path}/invocations/${invocation}`, headers }, signal);
  requireGood("the poll", polled);
  const status = textAt(polled.body, "status");
  if (status === "succeeded") return polled;
  throw new DemoProblem(`the call ended ${status}, ${String(at(polled.body, "error_class"))}`);
}

async function showResult(scenario: Scenario, path: string, invocation: string, signal: AbortSignal): Promise<void> {
  const { terminal } = scenario;
  terminal.line(`GET /v1/proxy/agt_…/invocations/${invocation}`);
  const { body } = await ended(scenario, path, invocation, signal);
  const [upstream, latency] = [at(body, "upstream_status"), at(body, "latency_ms")];
  terminal.line(`${textAt(body, "status")}, upstream ${String(upstream)} in ${String(latency)} ms; its answer:`);
  terminal.json(answerOf(body));
}

async function showToolResult(scenario: Scenario, path: string, invocation: string, signal: AbortSignal) {
  const { body } = await ended(scenario, path, invocation, signal);
  scenario.terminal.entries([["result", textAt(answerOf(body), "result", "content", 0, "text")]]);
}

function answerOf(polled: unknown): unknown {
  return JSON.parse(Buffer.from(textAt(polled, "response_body_b64"), "base64").toString());
}

async function showRecord({ terminal, tenant }: Scenario, invocation: string, signal: AbortSignal): Promise<void> {
  const path = `/v1/invocations/${invocation}`;
  terminal.line(`GET ${path}`);
  const record = await call(tenant, { method: "GET", path }, signal);
  requireGood("the record", record);
  terminal.json({ settlement: at(record.body, "settlement") });
  if (textAt(record.body, "settlement", "status") !== "settled") throw new DemoProblem("the record is not settled");
}

/** @throws DemoProblem */
function requireStatus({ status, body }: HttpAnswer, expected: number): void {
  if (status === expected) return;
  throw new DemoProblem(`a call was answered ${status} instead of ${expected}: ${JSON.stringify(body) ?? ""}`);
}

function shortly({ ms }: HttpAnswer): string {
  return `in ${duration(ms)}`;
}
