// What the demo plays: a paid call of an http agent from its challenge to its record, step by step, and more briefly
// a priced tool of an mcp agent. All through HTTP, as a caller would; only balances come from the chain.
import type { Hex } from "viem";
import { STATUS, SUCCESS } from "../../http/server.ts";
import { type DemoChain, usdc } from "./chain.ts";
import { at, type HttpAnswer, textAt } from "./http.ts";
import { type Agents, call, type DemoTenant, FACTORIZE_PRICE, requireGood } from "./market.ts";
import { type DemoAccount, type SignedPayment, signPayment } from "./payer.ts";
import { DemoProblem } from "./problem.ts";
import { duration, type ListLine, type Screen } from "./screen.ts";

export interface Stage {
  readonly screen: Screen;
  readonly tenant: DemoTenant;
  readonly agents: Agents;
  readonly payer: DemoAccount;
  readonly payee: Hex;
  /** Null without anvil: payments are verified then, and not collected. */
  readonly chain: DemoChain | null;
}

const LETTER = { text: "Pay to the bearer on demand" };
const NUMBER = 600_851_475_143;
const CHALLENGED = STATUS.payment_required;
const ACCEPTED = SUCCESS.accepted;

/** Plays the whole of a paid call. @throws DemoProblem when it goes another way than it must */
export async function playPaidCall(stage: Stage, signal: AbortSignal): Promise<void> {
  const { screen, tenant, agents, payer, chain } = stage;
  const path = `/v1/proxy/${agents.notary}`;
  screen.section(`A paid call of the http agent "notary", step by step`);

  screen.chapter(1, "A call without a payment is answered with what it costs");
  screen.line(`POST ${path}`);
  screen.line(JSON.stringify(LETTER));
  const asked = await call(tenant, { method: "POST", path, body: LETTER }, signal);
  requireStatus(asked, CHALLENGED);
  screen.line(`402 Payment Required, ${shortly(asked)}`);
  screen.json(asked.body);

  screen.chapter(2, "The payer signs that authorization (EIP-3009): no transaction, and no gas");
  const payment = await signPayment(payer, asked.body);
  screen.entries(authorizationEntries(payment));

  screen.chapter(3, "The same call with the payment in X-PAYMENT");
  const before = await balances(stage);
  const paid = await pay(stage, path, LETTER, payment, signal);
  screen.line(
    `202 Accepted, ${shortly(paid.answer)}${chain === null ? "" : ": collected before the answer"}`,
  );
  screen.entries(await paidEntries(stage, paid));

  if (before !== null) {
    screen.chapter(4, "The money has moved");
    showBalances(screen, before, await balances(stage));
  }
  screen.chapter(chain === null ? 4 : 5, "The agent was called, and its answer is there to be polled");
  await showResult(stage, path, paid.invocation, signal);

  if (chain === null) return;
  screen.chapter(6, "The same payment once more is the same call: it buys nothing twice");
  const again = await pay(stage, path, LETTER, payment, signal);
  screen.line(`202 Accepted, ${shortly(again.answer)}`);
  screen.entries([["invocation", `${again.invocation} (${sameness(again.invocation, paid.invocation)})`]]);
  if (again.invocation !== paid.invocation) throw new DemoProblem("one payment made two calls");

  screen.chapter(7, "What the history keeps of it");
  await showRecord(stage, paid.invocation, signal);
}

function sameness(one: string, other: string): string {
  return one === other ? "the same" : "another one!";
}

export async function playPricedTool(stage: Stage, signal: AbortSignal): Promise<void> {
  const { screen, tenant, agents, payer } = stage;
  const path = `/v1/proxy/${agents.calculator}`;
  screen.section(`The mcp agent "calculator": one tool is free, the other has a price of its own`);

  const sum = { a: 40, b: 2 };
  screen.chapter(1, `tools/call add ${JSON.stringify(sum)}`);
  const free = await call(tenant, { method: "POST", path, body: toolCall(1, "add", sum) }, signal);
  requireStatus(free, ACCEPTED);
  screen.line(`202 Accepted, ${shortly(free)}, without any payment`);
  await showToolResult(stage, path, textAt(free.body, "invocation_id"), signal);

  const product = { number: NUMBER };
  screen.chapter(2, `tools/call factorize ${JSON.stringify(product)}`);
  const body = toolCall(2, "factorize", product);
  const asked = await call(tenant, { method: "POST", path, body }, signal);
  requireStatus(asked, CHALLENGED);
  const price = BigInt(textAt(asked.body, "accepts", 0, "maxAmountRequired"));
  if (price !== FACTORIZE_PRICE) throw new DemoProblem("the tool is not asked for at its own price");
  screen.line(`402 Payment Required, ${shortly(asked)}: ${usdc(price)} USDC`);

  const before = await balances(stage);
  const paid = await pay(stage, path, body, await signPayment(payer, asked.body), signal);
  screen.line(`202 Accepted, ${shortly(paid.answer)}, with the payment`);
  screen.entries(await paidEntries(stage, paid));
  if (before !== null) showBalances(screen, before, await balances(stage));
  await showToolResult(stage, path, paid.invocation, signal);
}

function toolCall(id: number, name: string, given: object): object {
  return { jsonrpc: "2.0", id, method: "tools/call", params: { name, arguments: given } };
}

/** A call that was paid for and accepted. */
interface Paid {
  readonly answer: HttpAnswer;
  readonly invocation: string;
  /** What X-PAYMENT-RESPONSE says; null without a facilitator. */
  readonly settled: unknown;
}

async function pay(
  { tenant, chain }: Stage,
  path: string,
  body: object,
  { header }: SignedPayment,
  signal: AbortSignal,
): Promise<Paid> {
  const answer = await call(tenant, { method: "POST", path, headers: { "x-payment": header }, body }, signal);
  requireStatus(answer, ACCEPTED);
  const told = answer.headers.get("x-payment-response");
  if (told === null && chain !== null) throw new DemoProblem("the payment was not collected in time");
  const settled: unknown = told === null ? null : JSON.parse(Buffer.from(told, "base64").toString());
  return { answer, invocation: textAt(answer.body, "invocation_id"), settled };
}

async function paidEntries({ chain }: Stage, { invocation, settled }: Paid): Promise<ListLine[]> {
  const entries: ListLine[] = [["invocation", invocation]];
  if (chain === null)
    return [...entries, ["payment", "verified only: without a facilitator nobody collects it"]];
  const transaction = textAt(settled, "transaction");
  const block = await chain.blockOf(transaction);
  return [...entries, ["transaction", transaction], ["block", String(block)]];
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

async function balances({ chain, payer, payee }: Stage): Promise<Balances | null> {
  if (chain === null) return null;
  return { payer: await chain.usdcOf(payer.address), payee: await chain.usdcOf(payee) };
}

function showBalances(screen: Screen, before: Balances, after: Balances | null): void {
  if (after === null) return;
  const row = (who: keyof Balances): ListLine => [
    who,
    `${column(before[who])}  →  ${column(after[who])} USDC  (${change(after[who] - before[who])})`,
  ];
  screen.entries([row("payer"), row("payee")]);
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
async function ended(
  { tenant }: Stage,
  path: string,
  invocation: string,
  signal: AbortSignal,
): Promise<HttpAnswer> {
  const headers = { prefer: "wait=20" };
  const polled = await call(
    tenant,
    { method: "GET", path: `${path}/invocations/${invocation}`, headers },
    signal,
  );
  requireGood("the poll", polled);
  const status = textAt(polled.body, "status");
  if (status === "succeeded") return polled;
  throw new DemoProblem(`the call ended ${status}, ${String(at(polled.body, "error_class"))}`);
}

async function showResult(
  stage: Stage,
  path: string,
  invocation: string,
  signal: AbortSignal,
): Promise<void> {
  const { screen } = stage;
  screen.line(`GET /v1/proxy/agt_…/invocations/${invocation}`);
  const { body } = await ended(stage, path, invocation, signal);
  const [upstream, latency] = [at(body, "upstream_status"), at(body, "latency_ms")];
  screen.line(
    `${textAt(body, "status")}, upstream ${String(upstream)} in ${String(latency)} ms; its answer:`,
  );
  screen.json(answerOf(body));
}

async function showToolResult(stage: Stage, path: string, invocation: string, signal: AbortSignal) {
  const { body } = await ended(stage, path, invocation, signal);
  stage.screen.entries([["result", textAt(answerOf(body), "result", "content", 0, "text")]]);
}

function answerOf(polled: unknown): unknown {
  return JSON.parse(Buffer.from(textAt(polled, "response_body_b64"), "base64").toString());
}

async function showRecord({ screen, tenant }: Stage, invocation: string, signal: AbortSignal): Promise<void> {
  const path = `/v1/invocations/${invocation}`;
  screen.line(`GET ${path}`);
  const record = await call(tenant, { method: "GET", path }, signal);
  requireGood("the record", record);
  screen.json({ settlement: at(record.body, "settlement") });
  if (textAt(record.body, "settlement", "status") !== "settled")
    throw new DemoProblem("the record is not settled");
}

/** @throws DemoProblem */
function requireStatus({ status, body }: HttpAnswer, expected: number): void {
  if (status === expected) return;
  throw new DemoProblem(
    `a call was answered ${status} instead of ${expected}: ${JSON.stringify(body) ?? ""}`,
  );
}

function shortly({ ms }: HttpAnswer): string {
  return `in ${duration(ms)}`;
}
