// The order of checks on a proxy call, for polled and streamed calls alike: agent → invocable → rate → model → body → parsed
// body → idempotency → policy → payment. `judge` is pure: it names the next fact that it needs, gather.ts fetches that fact
// and asks again, until the call is refused or passes. Fetching a fact may itself refuse the call: a body that is too large, a
// malformed JSON-RPC message, an invalid payment.
import { Fault, noSuch } from "../../core/fault.ts";
import { agentStatus, type Protocol } from "../../core/states.ts";
import { viaProblem } from "../../core/via.ts";
import type { CallBody } from "../../wire/body.ts";
import type { InvocableAgent } from "../agents/store.ts";
import type { InvocationRow } from "../invocations/service.ts";
import type { Charge, PaymentTexts, PricedCall } from "../payment/service.ts";
import type { DecisionRow } from "../policy/decisions.ts";

export interface ParsedRequest {
  /** The JSON-RPC method and the tool of a `tools/call`, as the history shows them. */
  readonly method: string | null;
  readonly tool: string | null;
  /** The messages that are judged and charged one by one, each with the tool that it calls. May be empty. */
  readonly calls: readonly Pick<ParsedRequest, "tool">[];
  /** Whether headers that repeat parts of the body are passed on. */
  readonly echoedMcpHeaders: boolean;
}

/** Stands for a body that the gateway does not read; headers can't repeat parts of such a body. */
export const PLAIN: ParsedRequest = { method: null, tool: null, calls: [{ tool: null }], echoedMcpHeaders: false };

/** The policy's decisions on the calls of a request, with what they were based on. No rows when the tenant has no policy. */
export interface Decided {
  readonly protocol: Protocol;
  readonly calls: ParsedRequest["calls"];
  readonly rows: readonly DecisionRow[];
}

/** The facts of a call, each undefined until gathered. A class, so that all have one shape: 0.6 µs less a call (measured). */
export class KnownCall<P extends ParsedRequest = ParsedRequest> {
  /** The agent's latest state; null when there is no such agent. */
  agent: InvocableAgent | null | undefined;
  /** Whole seconds until the agent's bucket has a token; null when one was taken. */
  rateWait: number | null | undefined;
  /** The paid call, not made yet, that this request seems to resume. */
  paidCall: InvocationRow | null | undefined;
  model: string | null | undefined;
  body: CallBody | undefined;
  parsed: P | undefined;
  key: string | null | undefined;
  /** The call that this request repeats, by its idempotency key or its payment; null for none. */
  earlierId: string | null | undefined;
  decided: Decided | undefined;
  /** The decisions that have been written to the tenant's record. */
  recorded: Decided | undefined;
  /** Null for a call that costs nothing. */
  payment: { readonly charge: Charge; readonly priced: PricedCall } | null | undefined;
  /** The refusal of a call whose `Via` shows that it has passed through this gateway too often; else null. */
  readonly loop: Fault | null;
  /** The payment headers, not decoded yet; null when the request has none. */
  readonly presentedPayment: PaymentTexts | null;
  readonly hasIdempotencyKey: boolean;
  readonly agentId: string;

  constructor(agentId: string, headers: Headers, pseudonym: string, presentedPayment: PaymentTexts | null) {
    this.agentId = agentId;
    this.loop = loopProblem(headers, pseudonym);
    this.presentedPayment = presentedPayment;
    this.hasIdempotencyKey = headers.has("idempotency-key");
  }
}

export type Need = Exclude<keyof KnownCall, "agentId" | "loop" | "presentedPayment" | "hasIdempotencyKey">;

/** The next fact to gather, the Fault that refuses the call, or "pass". */
// biome-ignore lint/complexity/noExcessiveCognitiveComplexity: one list has as many checks as the specification.
export function judge(call: KnownCall): Need | Fault | "pass" {
  const { agent, parsed, earlierId, decided } = call;
  if (agent === undefined) return "agent";
  if (agent === null) return noSuch("agt", call.agentId);
  if (call.loop !== null) return call.loop;
  const state = stateProblem(agent);
  // A side effect that the specification wants here: each call to an invocable agent spends a token, even if refused later.
  if (state === null && call.rateWait === undefined) return "rateWait";
  const refusal = state ?? rateProblem(call.rateWait ?? null);
  // A request that resumes a paid call is admitted whatever the agent's state, its rate limit and the policy say.
  const isPriced = agent.pricing !== null;
  const mayResume = call.presentedPayment !== null || (call.hasIdempotencyKey && (refusal !== null || isPriced));
  if (mayResume && call.paidCall === undefined) return "paidCall";
  const resumes = (call.paidCall ?? earlierId ?? null) !== null;
  if (refusal !== null && !resumes) return refusal;
  if (call.model === undefined) return "model";
  if (call.body === undefined) return "body";
  if (resumes && earlierId === undefined) return call.key === undefined ? "key" : "earlierId";
  if (parsed === undefined) return "parsed";
  if (call.key === undefined) return "key";
  if (call.key !== null && earlierId === undefined) return "earlierId";
  if (typeof earlierId === "string") return "pass";
  if (refusal !== null) return refusal;
  // Two side effects that the specification wants here: a call that gets this far counts for the policy even if it is denied,
  // and the decision is recorded before the caller is answered, even if the payment is then refused.
  if (decided !== undefined && call.recorded !== decided) return "recorded";
  if (decided === undefined || !isAbout(decided, agent, parsed)) return "decided";
  const denied = decided.rows.find(({ action }) => action === "deny");
  if (denied !== undefined) return new Fault("denied", `denied by policy (${denied.reason})`);
  if (call.payment === undefined && (isPriced || call.presentedPayment !== null)) return "payment";
  return "pass";
}

/** Whether the decisions still apply: to decide on the same calls again would count and record them twice. */
const isAbout = ({ protocol, calls }: Decided, agent: InvocableAgent, parsed: ParsedRequest): boolean =>
  protocol === agent.protocol && (calls === parsed.calls || Bun.deepEquals(calls, parsed.calls));

/** The value of the header X-Service-Policy-Warning for a call that passes; null when nothing warns. */
export function warningOf(rows: readonly DecisionRow[]): string | null {
  if (rows.length === 0) return null;
  const warnings = new Set(rows.filter(({ action }) => action === "warn").map(({ reason }) => reason));
  return warnings.size === 0 ? null : [...warnings].join(", ");
}

const notInvocable = (why: string) => new Fault("agent_not_invocable", why);

export function loopProblem(headers: Headers, pseudonym: string): Fault | null {
  const why = viaProblem(headers, pseudonym);
  return why === null ? null : notInvocable(`the call ${why}`);
}

/** Why the agent can't be called in its present state; null when it can. */
export function stateProblem(agent: InvocableAgent): Fault | null {
  if (agentStatus(agent) === "inactive") return notInvocable("the agent is inactive");
  if (agent.suspended) return notInvocable("the agent is suspended");
  return agent.upstream_url === null ? notInvocable("the agent has no upstream_url") : null;
}

/** @param retryAfterSeconds null when the bucket had a token */
export function rateProblem(retryAfterSeconds: number | null): Fault | null {
  if (retryAfterSeconds === null) return null;
  return new Fault("rate_limited", "the agent's invocation rate limit is exceeded", { retryAfterSeconds });
}
