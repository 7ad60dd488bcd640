// The policy of a tenant. It is replaced as a whole, and judges each call that has passed the earlier checks. Without a
// policy every call passes. When the policy cannot be read or evaluated, its on_error decides: that of the stored
// document, else that of the last one that was read here. A replica that never could read it does not know whether
// there is a policy, nor its on_error, so it lets no call pass (503).
import { sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Caller } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import { type Meters, silentMeters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import { andThen } from "../../kernel/and-then.ts";
import { inOneStep, inSteps } from "../../kernel/turns.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { findAgent } from "../agents/store.ts";
import { createPolicyCache, type KnownPolicy, type PolicyLookup } from "./cache.ts";
import { createDecisionLog, type DecisionRow, newestDecisions } from "./decisions.ts";
import { checkRules, formatRules, type PolicyReplace } from "./document.ts";
import {
  asksForRate,
  compile,
  type EvaluatedCall,
  evaluate,
  type PolicyVerdict,
  toolsDeniedToAll,
} from "./evaluate.ts";
import { createObservedRates } from "./observed-rate.ts";

const RETRY_AFTER_SECONDS = 5;
/** Rules up to this length are written to a caller at once. */
const SHORT_CHARACTERS = 16_384;
/**
 * How long a call waits to be counted if on_error decides after that. An answer is due within 10 s, and the store may take
 * 9 s of these for the accepted call, or for the record of the refusal.
 */
const COUNT_MS_MAX = 750;
/** When on_error says deny, nothing is lost by waiting longer: after that the call is refused without a record. */
const COUNT_MS_MAX_OR_DENY = 9_000;

/** A call that the policy judges. */
export interface PolicyCall extends Omit<EvaluatedCall, "rate"> {
  readonly tenant: string;
  readonly user: string;
}

/** A call to try. */
interface DryRun {
  readonly agent_id: string;
  readonly mcp_tool: string | null;
  readonly body_bytes: number;
  readonly rate: number;
  /** Null: the tenant's own. */
  readonly document: PolicyReplace | null;
}

interface PolicyDeps {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly meters?: Pick<Meters, "policyDecided">;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

export type PolicyService = ReturnType<typeof createPolicyService>;

/**
 * What the header X-Service-Policy-Warning says of a call with this verdict; null when it says nothing.
 *
 * @throws Fault `denied`
 */
export function warningOf(verdict: PolicyVerdict | null): string | null {
  if (verdict === null || verdict.action === "allow") return null;
  if (verdict.action === "warn") return verdict.reason;
  throw new Fault("denied", `denied by policy (${verdict.reason})`);
}

function onError({ on_error: action }: Pick<KnownPolicy, "on_error">): PolicyVerdict {
  return { action, matched_rule: null, reason: `on_error: ${action}` };
}

function decisionOf(call: PolicyCall, verdict: PolicyVerdict, now: number): DecisionRow {
  const { tenant, agent_id, protocol, mcp_tool } = call;
  return { tenant, id: newId("pdec", now), agent_id, protocol, mcp_tool, ...verdict };
}

const callerOf = ({ tenant, agent_id: agentId, user }: PolicyCall) => ({ tenant, agentId, user });

const NO_POLICY: PolicyVerdict = { action: "allow", matched_rule: null, reason: "no policy" };

function createJudge(rates: ReturnType<typeof createObservedRates>, log: Log) {
  function verdictOf(tenant: string, policy: KnownPolicy, call: EvaluatedCall): PolicyVerdict {
    if (policy.compiled === null) return onError(policy);
    try {
      return evaluate(policy.compiled, call);
    } catch (error) {
      log.error("policy_not_evaluable", { tenant, version: policy.version, error });
      return onError(policy);
    }
  }

  return {
    verdictOf,
    /**
     * The verdict on a call, which is counted with it. When it can't be counted, on_error decides.
     *
     * @throws Fault `unavailable` when on_error would deny it, and it is too late to record that
     */
    judged(call: PolicyCall, policy: KnownPolicy): Bun.MaybePromise<PolicyVerdict> {
      const { tenant, agent_id } = call;
      const isAskedFor = policy.compiled !== null && asksForRate(policy.compiled, agent_id);
      const msMax = policy.on_error === "deny" ? COUNT_MS_MAX_OR_DENY : COUNT_MS_MAX;
      const startedAt = performance.now();
      const observed = rates.observe(callerOf(call), isAskedFor ? msMax : null);
      const verdictAt = (rate: number) => verdictOf(tenant, policy, { ...call, rate });
      if (!(observed instanceof Promise)) return verdictAt(observed);
      return observed.then(verdictAt, (error) => {
        log.warn("policy_rate_not_counted", { tenant, on_error: policy.on_error, error });
        if (policy.on_error === "deny" && performance.now() - startedAt > COUNT_MS_MAX) throw error;
        return onError(policy);
      });
    },
  };
}

/** @throws Fault `unavailable` when it was never read */
function lastKnown(log: Log, tenant: string, { last, cause }: Extract<PolicyLookup, { failed: true }>): KnownPolicy {
  if (last === null) {
    const detail = { retryAfterSeconds: RETRY_AFTER_SECONDS, cause };
    throw new Fault("unavailable", "the policy cannot be read now", detail);
  }
  log.warn("policy_not_readable", { tenant, on_error: last.on_error, error: cause });
  return { ...last, compiled: null };
}

export function createPolicyService({ store, clock, log, meters = silentMeters, now }: PolicyDeps) {
  const rates = createObservedRates(store, now);
  const { verdictOf, judged } = createJudge(rates, log);
  const cache = createPolicyCache({ store, log, ...(now && { now }) });
  const decisions = createDecisionLog({ store, log });

  /**
   * The policy in force, null when the tenant has none.
   *
   * @throws Fault `unavailable` when that cannot be known
   */
  function inForce(tenant: string): Bun.MaybePromise<KnownPolicy | null> {
    return andThen(cache.find(tenant), (found) => (found.failed ? lastKnown(log, tenant, found) : found.policy));
  }

  /** Judges a call and counts it; null when the tenant has no policy. */
  function verdictFor(call: PolicyCall): Bun.MaybePromise<PolicyVerdict | null> {
    const countAlone = () => void rates.observe(callerOf(call), null);
    const known = inForce(call.tenant);
    if (known instanceof Promise) known.catch(countAlone);
    return andThen(known, (policy) => {
      if (policy === null) countAlone();
      return policy === null ? null : judged(call, policy);
    });
  }

  return {
    /** Begins to read the policy for a call that waits for another read first, so that the call waits for the longer one only. */
    readAhead: cache.readAhead,

    /**
     * Judges a call, counts it and records the decision; null, and at once where that is known, when the tenant has no
     * policy. A deny is durable when this resolves.
     *
     * @throws Fault `unavailable` when the policy cannot be known, the call not be counted, or a decision that must be
     * recorded first cannot be
     */
    judge(call: PolicyCall): Bun.MaybePromise<PolicyVerdict | null> {
      return andThen(verdictFor(call), (verdict) => {
        if (verdict === null) return null;
        return andThen(decisions.record(decisionOf(call, verdict, clock.now())), () => {
          meters.policyDecided(verdict.action);
          return verdict;
        });
      });
    },

    /** Judges the messages of one batch: each is a call of its own, and all are counted and recorded together. */
    async judgeAll(calls: readonly PolicyCall[]): Promise<PolicyVerdict[]> {
      const judged = await Promise.all(calls.map(async (call) => ({ call, verdict: await verdictFor(call) })));
      const decided = judged.flatMap(({ call, verdict }) => (verdict === null ? [] : [{ call, verdict }]));
      await decisions.record(...decided.map(({ call, verdict }) => decisionOf(call, verdict, clock.now())));
      for (const { verdict } of decided) meters.policyDecided(verdict.action);
      return decided.map(({ verdict }) => verdict);
    },

    /**
     * Which tools of an mcp agent are denied to everyone, whatever the size and rate of the call; null when the
     * tenant has no policy.
     *
     * @throws Fault `unavailable` when the policy cannot be known
     */
    async deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null> {
      const policy = await inForce(tenant);
      if (policy === null) return null;
      const { compiled, on_error } = policy;
      if (compiled === null) return () => on_error === "deny";
      return toolsDeniedToAll(compiled, agentId);
    },

    /** What the policy, or another document, would say of a call. Nothing is counted or recorded. */
    async dryRun({ tenant }: Caller, { agent_id, document, ...conditions }: DryRun): Promise<PolicyVerdict> {
      if (document !== null) await inSteps(checkRules(document.rules, "document."), tenant);
      const agent = await findAgent(store, tenant, agent_id);
      if (agent === null) throw new Fault("not_found", "no such agent");
      const call = { agent_id, protocol: agent.protocol, ...conditions };
      if (document !== null) return evaluate(await inSteps(compile(document), tenant), call);
      const policy = await inForce(tenant);
      return policy === null ? NO_POLICY : verdictOf(tenant, policy, call);
    },

    /** Null when the tenant has none. The rules are JSON already, and known to be rules. */
    async get({ tenant }: Caller): Promise<KnownPolicy | null> {
      const policy = await cache.newest(tenant);
      if (policy?.compiled === null) throw new Fault("internal", "a stored policy that makes no sense");
      if (policy === null || policy.rules.length <= SHORT_CHARACTERS) return policy;
      // Writing long rules to a caller takes time, and many callers may have waited for this moment.
      return inOneStep(() => policy, tenant);
    },

    async put({ tenant }: Caller, document: PolicyReplace): Promise<Replaced> {
      const { default: default_action, on_error } = document;
      await inSteps(checkRules(document.rules), tenant);
      const compiled = await inSteps(compile(document), tenant);
      const rules = await inSteps(formatRules(document.rules), tenant);
      const fields = { default_action, on_error, rules, updated_at: clock.now() };
      try {
        const replaced = await store.write((tx) => replacePolicy(tx, tenant, fields));
        cache.took(tenant, { ...document, ...replaced, rules, compiled }, document.rules);
        return replaced;
      } catch (error) {
        // A write that fails may have been made nevertheless.
        cache.forget(tenant);
        throw error;
      }
    },

    /** The newest decisions first, with all that this replica has recorded until now. */
    async newest({ tenant }: Caller, limit: number) {
      // Decisions that are being stored are waited for so long.
      await decisions.settle(2_000);
      return newestDecisions(store.read, tenant, limit);
    },

    /** To be called when no calls come any more, before the store is closed. */
    // A stop waits so long for a store that is away.
    close: () => decisions.close(10_000),
  };
}

interface Replaced {
  readonly version: number;
  readonly updated_at: number;
}

type PolicyFields = Omit<Tables["policies"]["$inferInsert"], "tenant" | "version">;

/** Replaces the policy in one statement, so that each of two replacements at once gets a version of its own. */
async function replacePolicy(tx: Tx, tenant: string, fields: PolicyFields): Promise<Replaced> {
  const { policies: t } = tx.tables;
  const [row] = await tx.db
    .insert(t)
    .values({ tenant, version: 1, ...fields })
    .onConflictDoUpdate({ target: t.tenant, set: { version: sql`${t.version} + 1`, ...fields } })
    .returning({ version: t.version, updated_at: t.updated_at });
  if (row === undefined) throw new Fault("internal", "a policy that was put is not there");
  return row;
}
