// Gathers the facts that the order of checks (judge.ts) asks for, one by one, until the call is refused or passes. The agent
// is read again after each wait, so that a call is judged by its agent's latest state. A paid call that was accepted but not
// made yet is admitted when its caller retries it, even if the agent or the policy has changed since.
import { and, eq } from "drizzle-orm";
import type { Caller } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { Meters } from "../../core/meters.ts";
import type { TimeBounds } from "../../core/time.ts";
import { outlastRequest } from "../../kernel/wait.ts";
import type { StoreTools } from "../../storage/store.ts";
import { type CallBody, hashOf } from "../../wire/body.ts";
import { type Price, priceOf } from "../agents/service.ts";
import type { AgentCache, InvocableAgent, RateLimiter } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { findByIdempotencyKey, findKey, type Idempotency } from "../invocations/idempotency.ts";
import type { LostCommits } from "../invocations/lost-commits.ts";
import type { InvocationRow } from "../invocations/service.ts";
import { PaymentRefused, type Payments, type PaymentTexts, type PricedCall } from "../payment/service.ts";
import type { DecisionRow } from "../policy/decisions.ts";
import type { PolicyCall, PolicyService } from "../policy/service.ts";
import { idempotencyKey, serviceModel } from "../upstream/headers.ts";
import { type Decided, judge, KnownCall, type Need, type ParsedRequest, warningOf } from "./judge.ts";

export interface ProxyCall {
  readonly caller: Caller;
  readonly agentId: string;
  readonly headers: Headers;
  readonly requestId: string;
  readBody(): Promise<CallBody>;
  /** Adds a field to the request's line in the access log. */
  note(name: string, value: string): void;
}

/** What both kinds of calls need, to be checked and recorded. */
export interface CallOptions extends StoreTools {
  readonly replica: string;
  readonly time: TimeBounds;
  readonly refusals: Pick<LostCommits, "removeIfRefused" | "wasStored">;
  readonly meters: Pick<Meters, "accepted" | "payment">;
  readonly payments: Payments;
  readonly policy: Pick<PolicyService, "readAhead" | "decideNow" | "decide" | "recordNow" | "record">;
  readonly agents: Pick<AgentCache, "cached" | "find">;
  readonly rates: RateLimiter;
  readonly pseudonym: string;
}

/** What differs between polled and streamed calls. */
export interface CallKind<P extends ParsedRequest> {
  /** The path of the call's URL after the agent's ID. */
  readonly suffix: string;
  /** The parsed request for an http agent, whose bodies the gateway does not parse. */
  readonly plain: P;
  /** Parses a body for an mcp agent. @throws Fault `invalid_request` */
  parse(agent: InvocableAgent, body: CallBody, call: ProxyCall): Promise<P>;
  /** Parses the body of a call that was accepted before. Such a call is not judged again, so no body is refused. */
  parseAny(body: CallBody, call: ProxyCall): Promise<P>;
  /** The call's payment headers; null when it has none. */
  payment(headers: Headers): PaymentTexts | null;
  refused(refusal: PaymentRefused): Fault;
}

export interface CheckedCall<P extends ParsedRequest> {
  readonly agent: InvocableAgent;
  readonly model: string | null;
  readonly body: CallBody;
  readonly parsed: P;
  /** The call that this request repeats; null for a new call. */
  readonly earlierId: string | null;
  readonly payment: Exclude<KnownCall["payment"], undefined>;
  readonly idempotency: Idempotency | null;
  readonly warning: string | null;
}

interface Gathering {
  readonly options: CallOptions;
  readonly call: ProxyCall;
  readonly kind: CallKind<ParsedRequest>;
  readonly known: KnownCall;
  idempotency: Idempotency | null;
  /** Keeps a resumed paid call from expiring while this request is checked. */
  keepAlive: Disposable | null;
}

const AGENT_CHANGES_MAX = 5;

/** @throws Fault of every kind that the order of checks names; `unavailable` when the agent keeps changing */
export async function gatherCall<P extends ParsedRequest>(options: CallOptions, call: ProxyCall, kind: CallKind<P>) {
  const { caller, agentId, headers } = call;
  const known = new KnownCall<P>(agentId, headers, options.pseudonym, kind.payment(headers));
  const gathering: Gathering = { options, call, kind, known: known as KnownCall, idempotency: null, keepAlive: null };
  let changes = 0;
  try {
    for (let need = judge(known); need !== "pass"; need = judge(known)) {
      if (need instanceof Fault) throw need;
      if (setFastFact(gathering, need)) continue;
      setFact(known, need, await FETCH[need]?.(gathering));
      const { cached, find } = options.agents;
      const latest = cached(caller.tenant, agentId) ?? (await find(caller.tenant, agentId));
      if (refreshAgent(known, latest) && ++changes === AGENT_CHANGES_MAX) throw agentIsChanging();
    }
    return checkedCall(known, gathering.idempotency);
  } finally {
    gathering.keepAlive?.[Symbol.dispose]();
  }
}

export const agentIsChanging = () => new Fault("unavailable", "the agent is being changed", { retryAfterSeconds: 1 });

function setFact(known: Partial<Record<Need, unknown>>, need: Need, fact: unknown): void {
  known[need] = fact;
}

/** Sets the agent to its latest state. Returns whether it has changed; the facts that depend on it are then dropped. */
function refreshAgent(known: KnownCall, latest: InvocableAgent | null): boolean {
  const { agent = latest } = known;
  known.agent = latest;
  if (agent === latest || Bun.deepEquals(agent, latest)) return false;
  if (agent?.protocol === "mcp" || latest?.protocol === "mcp") known.parsed = undefined;
  known.payment = undefined;
  return true;
}

function checkedCall<P extends ParsedRequest>(known: KnownCall<P>, idempotency: Idempotency | null): CheckedCall<P> {
  const { earlierId = null, decided, payment = null } = known;
  return {
    agent: agentIn(known),
    model: required(known.model),
    body: required(known.body),
    parsed: required(known.parsed),
    idempotency,
    earlierId,
    warning: earlierId === null ? warningOf(required(decided).rows) : null,
    payment,
  };
}

/** A fact that the order of checks has already asked for. */
function required<T>(fact: T | undefined): T {
  if (fact === undefined) throw new Fault("internal", "a fact of the call was used before it was gathered");
  return fact;
}

const agentIn = ({ agent }: KnownCall): InvocableAgent => required(agent ?? undefined);

/** Sets a fact that is in memory: a cached agent, a rate limit or policy kept here, a header, a body that nobody parses. */
function setFastFact(gathering: Gathering, need: Need): boolean {
  const fact = FAST_FACTS[need]?.(gathering);
  if (fact !== undefined) setFact(gathering.known, need, fact);
  return fact !== undefined;
}

const FAST_FACTS: { readonly [N in Need]?: (gathering: Gathering) => KnownCall[N] } = {
  agent: ({ options, call }) => options.agents.cached(call.caller.tenant, call.agentId),
  rateWait: ({ options, call, known }) => options.rates.takeNow(call.caller.tenant, agentIn(known)),
  model: ({ call }) => serviceModel(call.headers),
  key: ({ call }) => idempotencyKey(call.headers),
  parsed: ({ kind, known }) =>
    agentIn(known).protocol === "http" && typeof known.earlierId !== "string" ? kind.plain : undefined,
  decided({ options, call, known }) {
    const rows = options.policy.decideNow(policyCall(call, known));
    return rows === undefined ? undefined : decidedOn(known, rows);
  },
  recorded({ options, known }) {
    const decided = required(known.decided);
    return options.policy.recordNow(decided.rows) ? decided : undefined;
  },
};

const FETCH: { readonly [N in Need]?: (gathering: Gathering) => Promise<KnownCall[N]> } = {
  async agent({ options, call }) {
    // `gatherCall` reads the agent next. The policy is read meanwhile, so the call waits only for the longer of the two reads.
    options.policy.readAhead(call.caller.tenant);
    return undefined;
  },
  rateWait: ({ options, call, known }) => options.rates.take(call.caller.tenant, agentIn(known)),
  async paidCall(gathering) {
    const paidCall = await findPaidCall(gathering);
    if (paidCall !== null) gathering.keepAlive = keepResumablePaidCall(gathering.options, paidCall);
    return paidCall;
  },
  body: ({ call }) => call.readBody(),
  parsed({ call, kind, known }) {
    const body = required(known.body);
    return typeof known.earlierId === "string" ? kind.parseAny(body, call) : kind.parse(agentIn(known), body, call);
  },
  earlierId: findEarlierCall,
  decided: async ({ options, call, known }) => decidedOn(known, await options.policy.decide(policyCall(call, known))),
  async recorded({ options, known }) {
    const decided = required(known.decided);
    await options.policy.record(decided.rows);
    return decided;
  },
  payment: checkedPayment,
};

function decidedOn(known: KnownCall, rows: readonly DecisionRow[]): Decided {
  return { protocol: agentIn(known).protocol, calls: required(known.parsed).calls, rows };
}

function policyCall({ caller }: ProxyCall, known: KnownCall): PolicyCall {
  const { tenant, user } = caller;
  const { id: agent_id, protocol } = agentIn(known);
  const tools = required(known.parsed).calls.map(({ tool }) => tool);
  return { tenant, user, agent_id, protocol, tools, body_bytes: required(known.body).byteLength };
}

// Calls that were accepted before. A caller repeats such a call by its idempotency key or its payment.

const ownerOf = ({ caller: { tenant, user }, agentId }: ProxyCall) => ({ tenant, caller: user, agent_id: agentId });

const timesOf = ({ time }: CallOptions) => ({ asked_at: time.earliest(), latest: time.latest() });

async function findEarlierCall(gathering: Gathering): Promise<string | null> {
  const { options, call, known } = gathering;
  const { key = null, paidCall = null, presentedPayment } = known;
  const body = required(known.body);
  const owner = ownerOf(call);
  let id: string | null = null;
  if (key !== null) {
    const body_sha256 = await hashOf(body, owner.tenant);
    gathering.idempotency = { key, body_sha256, ...timesOf(options) };
    id = await findByIdempotencyKey(options.store, owner, gathering.idempotency);
    id = await unlessRefused(options, owner.tenant, id);
  }
  if (id !== null || paidCall === null) return id;
  const used = await options.payments.usedFor({ ...owner, payment: presentedPayment, body });
  return unlessRefused(options, owner.tenant, used);
}

const unlessRefused = async ({ refusals }: CallOptions, tenant: string, id: string | null): Promise<string | null> =>
  id === null || (await refusals.removeIfRefused({ tenant, id })) ? null : id;

/** Well within the time after which a paid call that its caller does not fetch is given up. */
const TOUCH_EVERY_MS = 30_000;

/** The pending call, paid for or perhaps paid for, that the caller seems to retry. Later checks compare the whole request. */
async function findPaidCall({ options, call, known }: Gathering): Promise<InvocationRow | null> {
  const { store, payments } = options;
  const owner = ownerOf(call);
  const used = known.presentedPayment === null ? null : await payments.presentedIn(known.presentedPayment);
  const payment = used?.tenant === owner.tenant ? used : null;
  // The check of the key itself comes later and refuses an invalid one.
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

/** Puts off the expiry of a streamed paid call while its caller is connected: the time to resume counts from the last try. */
export function keepResumablePaidCall({ store, clock, log }: StoreTools, paidCall: InvocationRow): Disposable {
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
  // The request waits for none of these writes.
  outlastRequest(keep);
  const timer = outlastRequest(() => setInterval(keep, TOUCH_EVERY_MS));
  return { [Symbol.dispose]: () => clearInterval(timer) };
}

/** Undefined, with `earlierId` set, when an earlier call used the payment. @throws Fault `payment_required`, `unavailable` */
async function checkedPayment({ options, call, kind, known }: Gathering): Promise<KnownCall["payment"]> {
  const { caller, headers, note } = call;
  const [agent, body, { tenant, user }] = [agentIn(known), required(known.body), caller];
  const price = sumOf(required(known.parsed).calls.map(({ tool }) => priceOf(agent, tool)));
  const path = `/v1/proxy/${agent.id}${kind.suffix}`;
  const called = { tenant, caller: user, agent_id: agent.id, host: headers.get("host") ?? "", path, price, body };
  const priced: PricedCall = { ...called, payment: known.presentedPayment, note };
  for (;;) {
    const checked = await shownBy(kind, options.payments.check(priced));
    if (checked.kind === "charge") return { charge: checked.charge, priced };
    if (checked.kind === "free") return null;
    known.earlierId = await unlessRefused(options, tenant, checked.invocation_id);
    if (known.earlierId !== null) return undefined;
  }
}

/** Waits for work on a payment and reports its refusal in the form of this kind of call. @throws Fault */
export async function shownBy<T>({ refused }: Pick<CallKind<ParsedRequest>, "refused">, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    throw error instanceof PaymentRefused ? refused(error) : error;
  }
}

/** Adds up the prices. All calls go to one agent, so there is one payee. */
function sumOf(prices: readonly (Price | null)[]): Price | null {
  return prices.reduce((sum, price) => {
    if (sum === null || price === null) return sum ?? price;
    return { ...price, amount: price.amount + sum.amount };
  }, null);
}
