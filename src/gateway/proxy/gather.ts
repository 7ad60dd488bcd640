// Finds out what the order of checks asks for, one fact after the other, until the call is refused or passes. The agent is
// looked at again after each wait, so a call is judged by its latest state. A call that was paid for but not made was accepted
// before: when its caller comes back, it is let in even if the agent or the policy has changed since.

import { and, eq } from "drizzle-orm";
import type { Caller } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Clock, TimeBounds } from "../../core/time.ts";
import type { Store } from "../../storage/store.ts";
import { type CallBody, hashOf } from "../../wire/body.ts";
import { type Price, priceOf } from "../agents/service.ts";
import type { AgentCache, InvocableAgent, RateLimiter } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { findByIdempotencyKey, findKey, type Idempotency } from "../invocations/idempotency.ts";
import type { LostCommits } from "../invocations/lost-commits.ts";
import type { InvocationRow } from "../invocations/service.ts";
import { PaymentRefused, type PaymentSource, type Payments, type PricedCall } from "../payment/service.ts";
import type { DecisionRow } from "../policy/decisions.ts";
import type { PolicyCall, PolicyService } from "../policy/service.ts";
import { idempotencyKey, serviceModel } from "../upstream/headers.ts";
import { type Decided, type Fact, judge, KnownCall, type Need, type ParsedRequest, warningOf } from "./judge.ts";

export interface ProxyCall {
  readonly caller: Caller;
  readonly agentId: string;
  readonly headers: Headers;
  readonly requestId: string;
  readBody(): Promise<CallBody>;
  /** Adds a field to the request's line in the log. */
  note(name: string, value: string): void;
}

export interface GatherOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly time: TimeBounds;
  readonly refusals: Pick<LostCommits, "isRefused" | "wasStored">;
  readonly log: Log;
  readonly payments: Pick<Payments, "check" | "usedFor" | "presentedIn">;
  readonly policy: Pick<PolicyService, "readAhead" | "decideNow" | "decide" | "recordNow" | "record">;
  readonly agents: Pick<AgentCache, "cached" | "find">;
  readonly rates: RateLimiter;
  readonly pseudonym: string;
}

/** What differs between the paths. */
export interface CallKind<P extends ParsedRequest> {
  /** Of the call's URL, after the agent's ID. */
  readonly suffix: string;
  /** For an http agent, whose bodies the gateway does not read. */
  readonly plain: P;
  /** For an mcp agent. @throws Fault `invalid_request` */
  parse(agent: InvocableAgent, body: CallBody, call: ProxyCall): Promise<P>;
  /** For a call that was accepted before: it is not judged again, even if its agent has changed. */
  parseAny(body: CallBody, call: ProxyCall): Promise<P>;
  readonly payment: PaymentSource;
  refused(refusal: PaymentRefused): Fault;
}

export interface CheckedCall<P extends ParsedRequest> {
  readonly agent: InvocableAgent;
  readonly model: string | null;
  readonly body: CallBody;
  readonly parsed: P;
  /** The ID, if the call has been made before. */
  readonly earlier: string | null;
  readonly payment: Fact<"payment">;
  readonly idempotency: Idempotency | null;
  readonly warning: string | null;
}

interface Gathering {
  readonly options: GatherOptions;
  readonly call: ProxyCall;
  readonly kind: CallKind<ParsedRequest>;
  readonly known: KnownCall;
  idempotency: Idempotency | null;
  /** Keeps the paid call for which the caller comes back. */
  kept: Disposable | null;
}

const AGENT_CHANGES_MAX = 5;

/** @throws Fault of every kind that the order of checks names; `unavailable` when the agent changes all the time */
export async function gatherCall<P extends ParsedRequest>(
  options: GatherOptions,
  call: ProxyCall,
  kind: CallKind<P>,
): Promise<CheckedCall<P>> {
  const { caller, agentId, headers } = call;
  const known = new KnownCall<P>(headers, options.pseudonym, kind.payment(headers));
  const gathering: Gathering = { options, call, kind, known: known as KnownCall, idempotency: null, kept: null };
  let changes = 0;
  try {
    for (let need = judge(known); need !== "pass"; need = judge(known)) {
      if (need instanceof Fault) throw need;
      if (isAtHand(gathering, need)) continue;
      take(known, need, await FINDING[need]?.(gathering));
      const { cached, find } = options.agents;
      const latest = cached(caller.tenant, agentId) ?? (await find(caller.tenant, agentId));
      if (hasChanged(known, latest) && ++changes === AGENT_CHANGES_MAX) throw beingChanged();
    }
    return checkedCall(known, gathering.idempotency);
  } finally {
    gathering.kept?.[Symbol.dispose]();
  }
}

export const beingChanged = () => new Fault("unavailable", "the agent is being changed", { retryAfterSeconds: 1 });

function take(known: Partial<Record<Need, unknown>>, need: Need, fact: unknown): void {
  known[need] = fact;
}

/** Takes up the agent as it is now, and drops what hangs on how it was. */
function hasChanged(known: KnownCall, latest: InvocableAgent | null): boolean {
  const { agent = latest } = known;
  known.agent = latest;
  if (agent === latest || Bun.deepEquals(agent, latest)) return false;
  if (agent?.protocol === "mcp" || latest?.protocol === "mcp") known.parsed = undefined;
  known.payment = undefined;
  return true;
}

function checkedCall<P extends ParsedRequest>(known: KnownCall<P>, idempotency: Idempotency | null): CheckedCall<P> {
  const { earlier = null, decided, payment = null } = known;
  return {
    agent: agentIn(known),
    model: had(known.model),
    body: had(known.body),
    parsed: had(known.parsed),
    idempotency,
    earlier,
    warning: earlier === null ? warningOf(had(decided).rows) : null,
    payment,
  };
}

/** What the list has asked for by now. */
function had<T>(fact: T | undefined): T {
  if (fact === undefined) throw new Fault("internal", "a fact that was not asked for");
  return fact;
}

const agentIn = ({ agent }: KnownCall): InvocableAgent => had(agent ?? undefined);

/** The fast path: a cached agent, a bucket and a policy in memory, headers, and the form of a body that nobody reads. */
function isAtHand(gathering: Gathering, need: Need): boolean {
  const fact = AT_HAND[need]?.(gathering);
  if (fact !== undefined) take(gathering.known, need, fact);
  return fact !== undefined;
}

const AT_HAND: { readonly [N in Need]?: (gathering: Gathering) => KnownCall[N] } = {
  agent: ({ options, call }) => options.agents.cached(call.caller.tenant, call.agentId),
  wait: ({ options, call, known }) => options.rates.takeNow(call.caller.tenant, agentIn(known)),
  model: ({ call }) => serviceModel(call.headers),
  key: ({ call }) => idempotencyKey(call.headers),
  parsed: ({ kind, known }) =>
    agentIn(known).protocol === "http" && typeof known.earlier !== "string" ? kind.plain : undefined,
  decided({ options, call, known }) {
    const rows = options.policy.decideNow(policyCall(call, known));
    return rows === undefined ? undefined : aboutCall(known, rows);
  },
  recorded({ options, known }) {
    const decided = had(known.decided);
    return options.policy.recordNow(decided.rows) ? decided : undefined;
  },
};

const FINDING: { readonly [N in Need]?: (gathering: Gathering) => Promise<KnownCall[N]> } = {
  async agent({ options, call }) {
    // It is read next, and the policy meanwhile, so that the call waits for the longer of the two reads only.
    options.policy.readAhead(call.caller.tenant);
    return undefined;
  },
  wait: ({ options, call, known }) => options.rates.take(call.caller.tenant, agentIn(known)),
  async paidCall(gathering) {
    const paidCall = await findPaidCall(gathering);
    if (paidCall !== null) gathering.kept = keepResumablePaidCall(gathering.options, paidCall);
    return paidCall;
  },
  body: ({ call }) => call.readBody(),
  parsed({ call, kind, known }) {
    const body = had(known.body);
    return typeof known.earlier === "string" ? kind.parseAny(body, call) : kind.parse(agentIn(known), body, call);
  },
  earlier: earlierCall,
  decided: async ({ options, call, known }) => aboutCall(known, await options.policy.decide(policyCall(call, known))),
  async recorded({ options, known }) {
    const decided = had(known.decided);
    await options.policy.record(decided.rows);
    return decided;
  },
  payment: checkedPayment,
};

function aboutCall(known: KnownCall, rows: readonly DecisionRow[]): Decided {
  return { protocol: agentIn(known).protocol, calls: had(known.parsed).calls, rows };
}

function policyCall({ caller }: ProxyCall, known: KnownCall): PolicyCall {
  const { tenant, user } = caller;
  const { id: agent_id, protocol } = agentIn(known);
  const tools = had(known.parsed).calls.map(({ tool }) => tool);
  return { tenant, user, agent_id, protocol, tools, body_bytes: had(known.body).byteLength };
}

// A call that was made before: the caller names it by its idempotency key, or by the payment.

const ownerOf = ({ caller, agentId }: ProxyCall) => ({
  tenant: caller.tenant,
  caller: caller.user,
  agent_id: agentId,
});

const timesOf = ({ time }: GatherOptions) => ({ asked_at: time.earliest(), latest: time.latest() });

async function earlierCall(gathering: Gathering): Promise<string | null> {
  const { options, call, known } = gathering;
  const { key = null, paidCall = null, presented } = known;
  const [body, owner] = [had(known.body), ownerOf(call)];
  let id: string | null = null;
  if (key !== null) {
    const body_sha256 = await hashOf(body, owner.tenant);
    gathering.idempotency = { key, body_sha256, ...timesOf(options) };
    id = await findByIdempotencyKey(options.store, owner, gathering.idempotency);
    id = await notRefused(options, owner.tenant, id);
  }
  if (id !== null || paidCall === null) return id;
  return notRefused(options, owner.tenant, await options.payments.usedFor({ ...owner, payment: presented, body }));
}

async function notRefused({ refusals }: GatherOptions, tenant: string, id: string | null): Promise<string | null> {
  return id === null || (await refusals.isRefused({ tenant, id })) ? null : id;
}

/** Well within the time for which an unfetched call is kept. */
const TOUCH_EVERY_MS = 30_000;

/**
 * The call for which the caller seems to come back: it is paid for, or may be, and has not been made. Whether the rest is
 * the same is checked later.
 */
async function findPaidCall({ options, call, known: { presented } }: Gathering): Promise<InvocationRow | null> {
  const { store, payments } = options;
  const owner = ownerOf(call);
  const used = presented === null ? null : await payments.presentedIn(presented);
  const payment = used?.tenant === owner.tenant ? used : null;
  // An invalid key is refused later, by its own check.
  const key = payment === null ? call.headers.get("idempotency-key") : null;
  const found = key === null ? payment : await findKey(store, owner, { key, ...timesOf(options) });
  if (found === null) return null;
  const row = await findInvocation(store.read, owner.tenant, found.invocation_id).catch((error) => {
    if (error instanceof Fault && error.kind === "not_found") return null;
    throw error;
  });
  const isResumable = row?.status === "pending" && row.payment_nonce !== null;
  return isResumable && row.caller === owner.caller && row.agent_id === owner.agent_id ? row : null;
}

/** Keeps a resumable paid call while its caller is here: the time to come back counts from the caller's last try. */
export function keepResumablePaidCall(
  { store, clock, log }: Pick<GatherOptions, "store" | "clock" | "log">,
  paidCall: InvocationRow,
): Disposable {
  if (paidCall.mode !== "streaming") return { [Symbol.dispose]() {} };
  const { tenant, id } = paidCall;
  const keep = () => {
    store
      .write(async ({ db, tables: { openInvocations: t } }) => {
        const isOpen = and(eq(t.tenant, tenant), eq(t.id, id), eq(t.status, "pending"));
        await db.update(t).set({ updated_at: clock.now() }).where(isOpen);
      })
      .catch((error) => log.warn("resumable_paid_call_not_kept", { invocation_id: id, error }));
  };
  keep();
  const timer = setInterval(keep, TOUCH_EVERY_MS);
  return { [Symbol.dispose]: () => clearInterval(timer) };
}

/** Undefined when it has made a call before. @throws Fault `payment_required`, `unavailable` */
async function checkedPayment({ options, call, kind, known }: Gathering): Promise<KnownCall["payment"]> {
  const { caller, headers, note } = call;
  const [agent, body, { tenant, user }] = [agentIn(known), had(known.body), caller];
  const price = sumOf(had(known.parsed).calls.map(({ tool }) => priceOf(agent, tool)));
  const path = `/v1/proxy/${agent.id}${kind.suffix}`;
  const called = { tenant, caller: user, agent_id: agent.id, host: headers.get("host") ?? "", path, price, body };
  const asked: PricedCall = { ...called, payment: known.presented, note };
  for (;;) {
    const checked = await shownBy(kind, options.payments.check(asked));
    if (checked.kind === "charge") return { charge: checked.charge, asked };
    if (checked.kind === "free") return null;
    known.earlier = await notRefused(options, tenant, checked.invocation_id);
    if (known.earlier !== null) return undefined;
  }
}

/** What comes of a payment, where it is refused as this kind of call shows that. */
export async function shownBy<T>({ refused }: Pick<CallKind<ParsedRequest>, "refused">, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    throw error instanceof PaymentRefused ? refused(error) : error;
  }
}

/** The sum of the prices. All calls are of one agent, so there is one payee. */
function sumOf(prices: readonly (Price | null)[]): Price | null {
  return prices.reduce((sum, price) => {
    if (sum === null || price === null) return sum ?? price;
    return { ...price, amount: price.amount + sum.amount };
  }, null);
}
