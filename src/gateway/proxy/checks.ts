// The order of checks on a proxy call, from top to bottom, the same on both paths: agent → invocable → rate → model →
// body → form → idempotency → policy → payment. A call that is refused here leaves nothing behind. The agent is read
// again when the body has arrived. A call that was paid for but not made was accepted before: when its caller comes
// back, it is let in even if the agent or the policy has changed since.

import { and, eq } from "drizzle-orm";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { agentStatus } from "../../core/states.ts";
import type { Clock, TimeBounds } from "../../core/time.ts";
import { viaProblem } from "../../core/via.ts";
import type { Store } from "../../storage/store.ts";
import { type CallBody, hashOf } from "../../wire/body.ts";
import { type Price, priceOf } from "../agents/service.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { findByIdempotencyKey, findKey, type Idempotency } from "../invocations/idempotency.ts";
import type { LostCommits } from "../invocations/lost-commits.ts";
import type { InvocationKey, InvocationRow } from "../invocations/service.ts";
import type { Charge, Payments, PricedCall } from "../payment/service.ts";
import { type PolicyCall, type PolicyService, warningOf } from "../policy/service.ts";
import type { AskedCall } from "../streaming/service.ts";
import { bringsPayment, idempotencyKey, serviceModel } from "./request-headers.ts";

export type ProxyCall = Omit<AskedCall, "signal">;

export interface CheckOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly time: TimeBounds;
  readonly refusals: Pick<LostCommits, "isRefused" | "wasStored">;
  readonly log: Log;
  readonly payments: Pick<Payments, "check" | "usedFor" | "presentedIn">;
  readonly policy: Pick<PolicyService, "readAhead" | "judge" | "judgeAll">;
  findAgent(tenant: string, agentId: string): Promise<InvocableAgent | null> | InvocableAgent | null;
  /** Takes a token of the agent's bucket: null, or the whole seconds until there is one. */
  takeToken(tenant: string, agent: InvocableAgent): Promise<number | null> | number | null;
  /** The name of this deployment in `Via`. */
  readonly pseudonym: string;
}

/** What a body asks of its agent. */
export interface ParsedRequest {
  /** What the history shows: the JSON-RPC method, and the tool of a `tools/call`. */
  readonly method: string | null;
  readonly tool: string | null;
  /** The messages that are judged and paid for, each by itself, with the tool that it calls. May be empty. */
  readonly calls: readonly Pick<ParsedRequest, "tool">[];
  /** Whether headers that repeat parts of the body are passed on. */
  readonly echoedMcpHeaders: boolean;
}

/** What differs between the paths. */
export interface CallKind<P extends ParsedRequest> {
  /** Of the call's URL, after the agent's ID. */
  readonly suffix: string;
  /** For an http agent, whose bodies the gateway does not read. */
  readonly plain: P;
  /**
   * For an mcp agent.
   *
   * @throws Fault `invalid_request`
   */
  parse(agent: InvocableAgent, body: CallBody, call: ProxyCall): Promise<P>;
  /** For a call that was accepted before: it is not judged again, even if its agent has changed. */
  parseAny(body: CallBody, call: ProxyCall): Promise<P>;
}

/** A call as far as it is known when it is judged. */
interface AskedAgent<P extends ParsedRequest> {
  readonly agent: InvocableAgent;
  readonly model: string | null;
  readonly body: CallBody;
  readonly parsed: P;
  readonly idempotency: Idempotency | null;
}

export interface CheckedCall<P extends ParsedRequest> extends AskedAgent<P> {
  readonly url: string;
  /** What the policy warns of. */
  readonly warning: string | null;
  readonly paymentState: PaymentState;
}

type JudgedCall = Pick<AskedAgent<ParsedRequest>, "agent" | "body" | "parsed">;

/** The state of the payment of a call that may be made. */
export type PaymentState =
  /** It has been made before, as this invocation. */
  | { readonly kind: "earlier"; readonly id: string }
  | { readonly kind: "free" }
  | { readonly kind: "charge"; readonly charge: Charge; readonly asked: PricedCall };

// What is at hand for nearly every call (the agent, its rate, the policy) is awaited only where it is a promise: an await
// costs a turn of the queue of microtasks, and each accepted call passes here.

/** @throws Fault of every kind that the order of checks names */
export async function checkCall<P extends ParsedRequest>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<P>,
): Promise<CheckedCall<P>> {
  const { caller, agentId, headers } = call;
  const found = options.findAgent(caller.tenant, agentId);
  if (found instanceof Promise) options.policy.readAhead(caller.tenant);
  const first = existing(found instanceof Promise ? await found : found);
  refuseLoop(options, call);
  const refusing = refusalOf(options, caller.tenant, first);
  const refusal = refusing instanceof Promise ? await refusing : refusing;
  const mayResume = bringsPayment(headers) || headers.has("idempotency-key");
  if (mayResume) {
    const paidCall = await findResumablePaidCall(options, call, refusal !== null || first.pricing !== null);
    if (paidCall !== null) return checkResumed(options, call, path, { paidCall, refusal });
  }
  if (refusal !== null) throw refusal;
  const model = serviceModel(headers);
  const body = await call.readBody();
  const latest = options.findAgent(caller.tenant, agentId);
  const agent = existing(latest instanceof Promise ? await latest : latest);
  return checkWhole(options, call, path, { agent, model, body, refusal });
}

/** The checks of a call that looks like a resumable paid one, which is kept meanwhile. */
async function checkResumed<P extends ParsedRequest>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<P>,
  { paidCall, refusal }: { readonly paidCall: InvocationRow; readonly refusal: Fault | null },
): Promise<CheckedCall<P>> {
  using _kept = keepResumablePaidCall(options, paidCall);
  const model = serviceModel(call.headers);
  const body = await call.readBody();
  const agent = existing(await options.findAgent(call.caller.tenant, call.agentId));
  const key = idempotencyKey(call.headers);
  const idempotency = key === null ? null : await idempotencyOf(options, call, key, body);
  const back = await earlierCall(options, call, { body, idempotency });
  if (back === null) return await checkWhole(options, call, path, { agent, model, body, refusal });
  const parsed = await path.parseAny(body, call);
  return calledBefore({ agent, model, body, idempotency, parsed }, back);
}

interface WholeCall extends Pick<AskedAgent<ParsedRequest>, "agent" | "model" | "body"> {
  /** Why it would not have been let in, had it not looked like a resumable paid call. */
  readonly refusal: Fault | null;
}

/** What is checked once the body is here. */
async function checkWhole<P extends ParsedRequest>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<P>,
  { agent, model, body, refusal }: WholeCall,
): Promise<CheckedCall<P>> {
  const parsed = agent.protocol === "mcp" ? await path.parse(agent, body, call) : path.plain;
  const key = idempotencyKey(call.headers);
  const idempotency = key === null ? null : await idempotencyOf(options, call, key, body);
  const asked = { agent, model, body, parsed, idempotency };
  const id = idempotency === null ? null : await callWithKey(options, call, idempotency);
  if (id !== null) return calledBefore(asked, id);
  if (refusal !== null) throw refusal;
  return judgedByLatest(options, call, path, asked);
}

/** Changes of an agent while one call is judged. */
const AGENT_CHANGES_MAX = 5;

/**
 * The call, judged by the latest state of its agent. Judging a large body or a signature takes turns with other work,
 * so the agent may change meanwhile. Then the call is judged again.
 *
 * @throws Fault `unavailable` when it changes all the time
 */
async function judgedByLatest<P extends ParsedRequest>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<P>,
  asked: AskedAgent<P>,
  tries: number = 1,
  known: Pick<CheckedCall<P>, "warning"> | null = null,
): Promise<CheckedCall<P>> {
  const url = invocableUrl(asked.agent);
  const told = known === null ? judge(options, call, asked) : known.warning;
  const warning = told instanceof Promise ? await told : told;
  const isFree = asked.agent.pricing === null && !bringsPayment(call.headers);
  const paymentState = isFree ? FREE : await checkedPayment(options, call, asked, path.suffix);
  const latest = options.findAgent(call.caller.tenant, call.agentId);
  const agent = existing(latest instanceof Promise ? await latest : latest);
  const isLatest = agent === asked.agent || Bun.deepEquals(agent, asked.agent);
  if (isLatest || paymentState.kind === "earlier") return { ...asked, url, warning, paymentState };
  if (tries === AGENT_CHANGES_MAX) {
    throw new Fault("unavailable", "the agent is being changed", { retryAfterSeconds: 1 });
  }
  const parsed = agent.protocol === "mcp" ? await path.parse(agent, asked.body, call) : path.plain;
  // The policy judges what is called. Where that is the same, the call has been counted and its decision written.
  const isJudged = agent.protocol === asked.agent.protocol && Bun.deepEquals(parsed.calls, asked.parsed.calls);
  const changed = { ...asked, agent, parsed };
  return judgedByLatest(options, call, path, changed, tries + 1, isJudged ? { warning } : null);
}

function calledBefore<P extends ParsedRequest>(asked: AskedAgent<P>, id: string): CheckedCall<P> {
  return {
    ...asked,
    url: asked.agent.upstream_url ?? "",
    warning: null,
    paymentState: { kind: "earlier", id },
  };
}

/** The call that this one repeats: by its key; or by its payment. */
async function earlierCall(
  options: CheckOptions,
  call: ProxyCall,
  { body, idempotency }: Pick<AskedAgent<ParsedRequest>, "body" | "idempotency">,
): Promise<string | null> {
  const byKey = idempotency === null ? null : await callWithKey(options, call, idempotency);
  if (byKey !== null) return byKey;
  const { caller, agentId, headers } = call;
  const { tenant, user } = caller;
  const id = await options.payments.usedFor({ tenant, caller: user, agent_id: agentId, headers, body });
  return id === null || (await options.refusals.isRefused({ tenant, id })) ? null : id;
}

/** @throws Fault `not_found` */
export function existing(agent: InvocableAgent | null): InvocableAgent {
  if (agent === null) throw new Fault("not_found", "no such agent");
  return agent;
}

/** @throws Fault `agent_not_invocable` when the call has come from here again and again */
export function refuseLoop(
  { pseudonym }: Pick<CheckOptions, "pseudonym">,
  { headers }: Pick<ProxyCall, "headers">,
): void {
  const why = viaProblem(headers, pseudonym);
  if (why !== null) throw new Fault("agent_not_invocable", `the call ${why}`);
}

async function idempotencyOf(
  { time }: CheckOptions,
  { caller }: ProxyCall,
  key: string,
  body: CallBody,
): Promise<Idempotency> {
  const body_sha256 = await hashOf(body, caller.tenant);
  return { key, body_sha256, asked_at: time.earliest(), latest: time.latest() };
}

async function callWithKey(
  { store, refusals }: CheckOptions,
  { caller, agentId }: ProxyCall,
  idempotency: Idempotency,
): Promise<string | null> {
  const { tenant, user } = caller;
  const id = await findByIdempotencyKey(store, { tenant, caller: user, agent_id: agentId }, idempotency);
  return id === null || (await refusals.isRefused({ tenant, id })) ? null : id;
}

/**
 * What the policy warns of. Each of the calls gets its own decision. If one is denied, all are refused.
 *
 * @throws Fault `denied`
 */
function judge(options: CheckOptions, call: ProxyCall, asked: JudgedCall) {
  const [only] = asked.parsed.calls;
  if (only === undefined || asked.parsed.calls.length > 1) return judgeAll(options, call, asked);
  const verdict = options.policy.judge(judgedCall(call, asked, only.tool));
  return verdict instanceof Promise ? verdict.then(warningOf) : warningOf(verdict);
}

async function judgeAll({ policy }: CheckOptions, call: ProxyCall, asked: JudgedCall): Promise<string | null> {
  const verdicts = await policy.judgeAll(asked.parsed.calls.map(({ tool }) => judgedCall(call, asked, tool)));
  const warnings = new Set(verdicts.map(warningOf).filter((warning) => warning !== null));
  return warnings.size === 0 ? null : [...warnings].join(", ");
}

function judgedCall({ caller }: ProxyCall, { agent, body }: JudgedCall, tool: string | null): PolicyCall {
  const { tenant, user } = caller;
  const { id: agent_id, protocol } = agent;
  return { tenant, user, agent_id, protocol, mcp_tool: tool, body_bytes: body.byteLength };
}

/** @throws Fault `agent_not_invocable` */
export function invocableUrl(agent: InvocableAgent): string {
  if (agentStatus(agent) === "inactive") throw notInvocable("is inactive");
  if (agent.suspended) throw notInvocable("is suspended");
  if (agent.upstream_url === null) throw notInvocable("has no upstream_url");
  return agent.upstream_url;
}

function notInvocable(why: string): Fault {
  return new Fault("agent_not_invocable", `the agent ${why}`);
}

/** @throws Fault `rate_limited` when the agent has no token left for so many seconds */
export function checkRate(retryAfterSeconds: number | null): void {
  if (retryAfterSeconds === null) return;
  throw new Fault("rate_limited", "the agent's invocation rate limit is exceeded", { retryAfterSeconds });
}

/**
 * The Fault for which an agent may not be called just now, or null.
 *
 * @throws Fault `unavailable` when the replicas can't count together
 */
function refusalOf({ takeToken }: CheckOptions, tenant: string, agent: InvocableAgent) {
  try {
    invocableUrl(agent);
    const taken = takeToken(tenant, agent);
    if (taken instanceof Promise) return taken.then(checkRate).then(() => null, ifFault);
    checkRate(taken);
    return null;
  } catch (error) {
    return ifFault(error);
  }
}

function ifFault(error: unknown): Fault {
  if (error instanceof Fault && error.kind !== "unavailable") return error;
  throw error;
}

// Resumable paid calls: they are, or may be, paid for and have not been made. When their caller comes back, the payment or
// the idempotency key tells which call it is, before the body is read. Whether the rest is the same is checked later.

/** Well within the time for which an unfetched call is kept. */
const TOUCH_EVERY_MS = 30_000;

/**
 * The paid call that this request, which carries a payment or an idempotency key, seems to come back for; or null.
 *
 * @param byKey whether to look for the call of its idempotency key, if it brings no payment
 */
async function findResumablePaidCall(
  options: CheckOptions,
  call: ProxyCall,
  byKey: boolean,
): Promise<InvocationRow | null> {
  const { caller, agentId } = call;
  const id = (await idByPayment(options, call)) ?? (byKey ? await idByKey(options, call) : null);
  if (id === null) return null;
  const row = await findInvocation(options.store.read, caller.tenant, id).catch(orNull);
  const isResumable = row?.status === "pending" && row.payment_nonce !== null;
  return isResumable && row.caller === caller.user && row.agent_id === agentId ? row : null;
}

async function idByPayment({ payments }: CheckOptions, { caller, headers }: ProxyCall): Promise<string | null> {
  const payment = await payments.presentedIn(headers);
  return payment?.tenant === caller.tenant ? payment.invocation_id : null;
}

async function idByKey({ store, time }: CheckOptions, { caller, agentId, headers }: ProxyCall): Promise<string | null> {
  // An invalid key is refused later, by its own check.
  const key = headers.get("idempotency-key");
  if (key === null) return null;
  const owner = { tenant: caller.tenant, caller: caller.user, agent_id: agentId };
  return (
    (await findKey(store, owner, { key, asked_at: time.earliest(), latest: time.latest() }))?.invocation_id ?? null
  );
}

function orNull(error: unknown): null {
  if (error instanceof Fault && error.kind === "not_found") return null;
  throw error;
}

/**
 * Keeps a resumable paid call of the streaming path while its caller is here. The time to come back counts from the caller's last try, and
 * sending the body may take long.
 */
export function keepResumablePaidCall(
  { store, clock, log }: Pick<CheckOptions, "store" | "clock" | "log">,
  paidCall: InvocationRow,
): Disposable {
  if (paidCall.mode !== "streaming") return { [Symbol.dispose]() {} };
  const keep = () => {
    touch(store, paidCall, clock.now()).catch((error) =>
      log.warn("owed_call_not_kept", { invocation_id: paidCall.id, error }),
    );
  };
  keep();
  const timer = setInterval(keep, TOUCH_EVERY_MS);
  return { [Symbol.dispose]: () => clearInterval(timer) };
}

function touch(store: Store, { tenant, id }: InvocationKey, now: number): Promise<void> {
  return store.write(async ({ db, tables: { openInvocations: t } }) => {
    await db
      .update(t)
      .set({ updated_at: now })
      .where(and(eq(t.tenant, tenant), eq(t.id, id), eq(t.status, "pending")));
  });
}

function pricedCall(
  { caller, headers, note }: ProxyCall,
  { agent, body, parsed }: JudgedCall,
  suffix: string,
): PricedCall {
  const { tenant, user } = caller;
  const path = `/v1/proxy/${agent.id}${suffix}`;
  const price = sumOf(parsed.calls.map(({ tool }) => priceOf(agent, tool)));
  return { tenant, caller: user, agent_id: agent.id, path, price, headers, body, note };
}

const FREE: PaymentState = { kind: "free" };

/** @throws Fault `payment_required`, `unavailable` */
async function checkedPayment(
  options: CheckOptions,
  call: ProxyCall,
  asking: JudgedCall,
  suffix: string,
): Promise<PaymentState> {
  const asked = pricedCall(call, asking, suffix);
  const checked = await options.payments.check(asked);
  switch (checked.kind) {
    case "known": {
      const { invocation_id: id } = checked;
      if (!(await options.refusals.isRefused({ tenant: asked.tenant, id }))) return { kind: "earlier", id };
      return checkedPayment(options, call, asking, suffix);
    }
    case "charge":
      return { kind: "charge", charge: checked.charge, asked };
    default:
      return checked;
  }
}

/** The sum of the prices. All calls are of one agent, so there is one payee. */
function sumOf(prices: readonly (Price | null)[]): Price | null {
  return prices.reduce((sum, price) => {
    if (sum === null || price === null) return sum ?? price;
    return { ...price, amount: price.amount + sum.amount };
  }, null);
}
