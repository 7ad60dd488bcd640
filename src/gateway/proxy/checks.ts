// The order of checks on a proxy call, from top to bottom, the same on both paths: agent → invocable → rate → model →
// body → form → idempotency → policy → payment. A call that is refused here leaves nothing behind. The agent is read
// again when the body has arrived. A call that was paid for but not made was accepted before: when its caller comes
// back, it is let in even if the agent or the policy has changed since.

import { andThen } from "../../concurrency/and-then.ts";
import type { Clock, TimeBounds } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import { viaProblem } from "../../core/via.ts";
import type { Store } from "../../storage/store.ts";
import { type CallBody, hashOf } from "../../wire/body.ts";
import type { InvocableAgent } from "../agents/look-up.ts";
import { findByIdempotencyKey, type Idempotency } from "../invocations/idempotency.ts";
import type { Refusals } from "../invocations/refusals.ts";
import type { InvocationRow } from "../invocations/service.ts";
import type { Payments } from "../payment/service.ts";
import type { PolicyService } from "../policy/service.ts";
import type { AskedCall } from "../streaming/service.ts";
import { judge } from "./judgement.ts";
import { invocableUrl, refusalOf, type TokenTaker } from "./may-call.ts";
import { findOwed, keepOwed } from "./owed.ts";
import { type PaymentState, paymentStateOf } from "./payment-state.ts";
import { idempotencyKey, serviceModel } from "./request-headers.ts";

export type ProxyCall = Omit<AskedCall, "signal">;

export interface CheckOptions extends TokenTaker {
  readonly store: Store;
  readonly clock: Clock;
  readonly time: TimeBounds;
  readonly refusals: Pick<Refusals, "isRefused" | "wasStored">;
  readonly log: Log;
  readonly payments: Pick<Payments, "check" | "usedFor" | "presentedIn">;
  readonly policy: Pick<PolicyService, "readAhead" | "judge" | "judgeAll">;
  findAgent(tenant: string, agentId: string): Bun.MaybePromise<InvocableAgent | null>;
  /** The name of this deployment in `Via`. */
  readonly pseudonym: string;
}

/** What a body asks of its agent. */
export interface Form {
  /** What the history shows: the JSON-RPC method, and the tool of a `tools/call`. */
  readonly method: string | null;
  readonly tool: string | null;
  /** The messages that are judged and paid for, each by itself, with the tool that it calls. May be empty. */
  readonly calls: readonly Pick<Form, "tool">[];
  /** Whether headers that repeat parts of the body are passed on. */
  readonly mirrors: boolean;
}

/** What differs between the paths. */
export interface CallKind<F extends Form> {
  /** Of the call's URL, after the agent's ID. */
  readonly suffix: string;
  /** @throws Fault `invalid_request` */
  formOf(agent: InvocableAgent, body: CallBody, call: ProxyCall): Bun.MaybePromise<F>;
  /** For a call that was accepted before: it is not judged again, even if its agent has changed. */
  anyForm(body: CallBody, call: ProxyCall): Bun.MaybePromise<F>;
}

export interface CheckedCall<F extends Form> {
  readonly agent: InvocableAgent;
  readonly url: string;
  readonly model: string | null;
  readonly body: CallBody;
  readonly form: F;
  readonly idempotency: Idempotency | null;
  /** What the policy warns of. */
  readonly warning: string | null;
  readonly paymentState: PaymentState;
}

/** @throws Fault of every kind that the order of checks names */
export async function checkCall<F extends Form>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<F>,
): Promise<CheckedCall<F>> {
  const known = knownAgent(options, call);
  if (known instanceof Promise) options.policy.readAhead(call.caller.tenant);
  const first = known instanceof Promise ? await known : known;
  refuseLoop(options, call);
  const asked = refusalOf(options, call.caller.tenant, first);
  const refusal = asked instanceof Promise ? await asked : asked;
  const found = findOwed(options, call, refusal !== null || first.pricing !== null);
  const owed = found instanceof Promise ? await found : found;
  if (owed !== null) return checkOwed(options, call, path, { owed, refusal });
  if (refusal !== null) throw refusal;
  const model = serviceModel(call.headers);
  const body = await call.readBody();
  const latest = knownAgent(options, call);
  const agent = latest instanceof Promise ? await latest : latest;
  return checkWhole(options, call, path, { agent, model, body, refusal });
}

/** The same for a call that looks like an owed one, which is kept meanwhile. */
async function checkOwed<F extends Form>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<F>,
  { owed, refusal }: { readonly owed: InvocationRow; readonly refusal: Fault | null },
): Promise<CheckedCall<F>> {
  using _kept = keepOwed(options, owed);
  const model = serviceModel(call.headers);
  const body = await call.readBody();
  const agent = await knownAgent(options, call);
  const idempotency = await readIdempotency(options, call, body);
  const back = await earlierCall(options, call, { body, idempotency });
  if (back === null) return await checkWhole(options, call, path, { agent, model, body, refusal });
  const form = await path.anyForm(body, call);
  return calledBefore({ agent, model, body, idempotency, form }, back);
}

interface WholeCall extends Pick<CheckedCall<Form>, "agent" | "model" | "body"> {
  /** Why it would not have been let in, had it not looked like an owed call. */
  readonly refusal: Fault | null;
}

/** What is checked once the body is here. */
function checkWhole<F extends Form>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<F>,
  { agent, model, body, refusal }: WholeCall,
): Bun.MaybePromise<CheckedCall<F>> {
  return andThen(path.formOf(agent, body, call), (form) =>
    andThen(readIdempotency(options, call, body), (idempotency) => {
      const asked = { agent, model, body, form, idempotency };
      return andThen(firstWithKey(options, call, idempotency), (id) => {
        if (id !== null) return calledBefore(asked, id);
        if (refusal !== null) throw refusal;
        return judgedByLatest(options, call, path, asked);
      });
    }),
  );
}

/**
 * The call, judged by the latest state of its agent. Judging a large body or a signature takes turns with other work,
 * so the agent may change meanwhile. Then the call is judged again.
 *
 * @throws Fault `unavailable` when it changes all the time
 */
function judgedByLatest<F extends Form>(
  options: CheckOptions,
  call: ProxyCall,
  path: CallKind<F>,
  asked: Omit<CheckedCall<F>, "url" | "warning" | "paymentState">,
  tries: number = 1,
  before: (JudgedCall & Pick<CheckedCall<F>, "warning">) | null = null,
): Bun.MaybePromise<CheckedCall<F>> {
  const url = invocableUrl(asked.agent);
  // The policy judges what is called. Where that is the same, the call has been counted and its decision written.
  const isJudged =
    before !== null &&
    Bun.deepEquals(before.form.calls, asked.form.calls) &&
    before.agent.protocol === asked.agent.protocol;
  return andThen(isJudged ? before.warning : judge(options, call, asked), (warning) =>
    andThen(paymentStateOf(options, call, asked, path.suffix), (paymentState) =>
      andThen(knownAgent(options, call), (agent) => {
        const isLatest = agent === asked.agent || Bun.deepEquals(agent, asked.agent);
        if (isLatest || paymentState.kind === "earlier") return { ...asked, url, warning, paymentState };
        if (tries === AGENT_CHANGES_MAX) {
          throw new Fault("unavailable", "the agent is being changed", { retryAfterSeconds: 1 });
        }
        return andThen(path.formOf(agent, asked.body, call), (form) =>
          judgedByLatest(options, call, path, { ...asked, agent, form }, tries + 1, { ...asked, warning }),
        );
      }),
    ),
  );
}

/** Changes of an agent while one call is judged. */
const AGENT_CHANGES_MAX = 5;

function calledBefore<F extends Form>(
  asked: Omit<CheckedCall<F>, "url" | "warning" | "paymentState">,
  id: string,
): CheckedCall<F> {
  return {
    ...asked,
    url: asked.agent.upstream_url ?? "",
    warning: null,
    paymentState: { kind: "earlier", id },
  };
}

/** The call that this one repeats: by its key; or by its payment, where it is still owed. */
async function earlierCall(
  options: CheckOptions,
  call: ProxyCall,
  { body, idempotency }: Pick<CheckedCall<Form>, "body" | "idempotency">,
): Promise<string | null> {
  const byKey = await firstWithKey(options, call, idempotency);
  if (byKey !== null) return byKey;
  const { caller, agentId, headers } = call;
  const { tenant, user } = caller;
  const id = await options.payments.usedFor({ tenant, caller: user, agent_id: agentId, headers, body });
  return id === null || (await options.refusals.isRefused({ tenant, id })) ? null : id;
}

/**
 * Returns at once when the agent is cached.
 *
 * @throws Fault `not_found`, at once or as rejection
 */
export function knownAgent(
  { findAgent }: Pick<CheckOptions, "findAgent">,
  { caller, agentId }: Pick<ProxyCall, "caller" | "agentId">,
): Bun.MaybePromise<InvocableAgent> {
  const agent = findAgent(caller.tenant, agentId);
  return agent instanceof Promise ? agent.then(existing) : existing(agent);
}

function existing(agent: InvocableAgent | null): InvocableAgent {
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

/** Null at once for a call without a key. */
function readIdempotency(options: CheckOptions, call: ProxyCall, body: CallBody): Bun.MaybePromise<Idempotency | null> {
  const key = idempotencyKey(call.headers);
  return key === null ? null : idempotencyOf(options, call, key, body);
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

/** The call that took this key; null at once without one. */
function firstWithKey(
  options: CheckOptions,
  call: ProxyCall,
  idempotency: Idempotency | null,
): Bun.MaybePromise<string | null> {
  return idempotency === null ? null : callWithKey(options, call, idempotency);
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

export type JudgedCall = Pick<CheckedCall<Form>, "agent" | "body" | "form">;
