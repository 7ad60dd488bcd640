// A tenant's policy: it is replaced as a whole, and judges each call that has passed the earlier checks. When the policy can't
// be read or evaluated, on_error decides: that of the stored document, else that of the last one read here. A replica that
// has never read the policy does not know whether there is one, so it refuses every call (503).
import { eq, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Caller } from "../../core/call.ts";
import { Fault, noSuch } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Meters } from "../../core/meters.ts";
import type { PolicyAction } from "../../core/states.ts";
import { createBatcher } from "../../kernel/batch.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import { inTurn } from "../../kernel/turns.ts";
import { askTogether, within } from "../../storage/failures.ts";
import type { Command, StoreTools, Tx } from "../../storage/store.ts";
import { foundBy, GIVEN_KEY, inputRows, preparedRow } from "../../storage/store.ts";
import { findAgent } from "../agents/store.ts";
import { createDecisionLog, type DecisionRow, newestDecisions } from "./decisions.ts";
import { checkRules, formatRules, type PolicyReplace, parseRules, type Rule } from "./document.ts";
import type { CompiledPolicy, EvaluatedCall, PolicyVerdict } from "./evaluate.ts";
import { asksForRate, compile, evaluate, toolsDeniedToAll } from "./evaluate.ts";
import { type CallingUser, createObservedRates, type ObservedRates } from "./observed-rate.ts";

/** Rules up to this length are returned without waiting for a turn. */
const SHORT_CHARACTERS = 16_384;
/**
 * How long a call waits to be counted before on_error decides. An answer is due within 10 s, and the store may need 9 s of
 * those to store the accepted call, or the record of the refusal.
 */
const COUNT_MS_MAX = 750;
/** When on_error is deny, waiting longer loses nothing: the call is then refused without a record of the decision. */
const COUNT_MS_MAX_OR_DENY = 9_000;

/** A call to be judged: each message of a batch gets a decision of its own, by the tool that it calls. */
export interface PolicyCall extends Omit<EvaluatedCall, "rate" | "mcp_tool"> {
  readonly tenant: string;
  readonly user: string;
  readonly tools: readonly (string | null)[];
}

interface DryRun extends Omit<EvaluatedCall, "protocol"> {
  /** The document to judge by; null: the tenant's policy. */
  readonly document: PolicyReplace | null;
}

interface PolicyDeps extends StoreTools {
  readonly meters?: Pick<Meters, "policyDecided">;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

export type PolicyService = ReturnType<typeof createPolicyService>;

const callerOf = ({ tenant, agent_id: agentId, user }: PolicyCall): CallingUser => ({ tenant, agentId, user });

const NO_POLICY: PolicyVerdict = { action: "allow", matched_rule: null, reason: "no policy" };

function verdictOf({ compiled, on_error }: KnownPolicy, call: EvaluatedCall): PolicyVerdict {
  if (compiled !== null) return evaluate(compiled, call);
  return { action: on_error, matched_rule: null, reason: `on_error: ${on_error}` };
}

function createDecider({ log, clock }: PolicyDeps, rates: ObservedRates, cache: PolicyCache) {
  /** @param rates of each message */
  function decisionsOf(call: PolicyCall, policy: KnownPolicy, rates: readonly number[]): DecisionRow[] {
    const { tenant, agent_id, protocol } = call;
    return call.tools.map((mcp_tool, at) => {
      const verdict = verdictOf(policy, { ...call, mcp_tool, rate: rates[at] ?? 0 });
      return { tenant, id: newId("pdec", clock.now()), agent_id, protocol, mcp_tool, ...verdict };
    });
  }

  /** Counts a call in memory only: enough unless a rule needs the rate of all replicas. */
  function decideLocally(call: PolicyCall, policy: KnownPolicy | null): DecisionRow[] {
    const counted = call.tools.map(() => rates.observe(callerOf(call)));
    return policy === null ? [] : decisionsOf(call, policy, counted);
  }

  const needsSharedRate = (policy: KnownPolicy | null, { agent_id }: PolicyCall): policy is KnownPolicy =>
    rates.isShared && policy?.compiled != null && asksForRate(policy.compiled, agent_id);

  async function decideShared(call: PolicyCall, policy: KnownPolicy): Promise<DecisionRow[]> {
    const { tenant } = call;
    const { on_error } = policy;
    const msMax = on_error === "deny" ? COUNT_MS_MAX_OR_DENY : COUNT_MS_MAX;
    const startedAt = performance.now();
    const counting = call.tools.map(() => rates.observeShared(callerOf(call), msMax));
    try {
      return decisionsOf(call, policy, await Promise.all(counting));
    } catch (error) {
      log.warn("policy_rate_not_counted", { tenant, on_error, error });
      if (on_error === "deny" && performance.now() - startedAt > COUNT_MS_MAX) throw error;
      return decisionsOf(call, { ...policy, compiled: null }, []);
    }
  }

  return {
    /** The synchronous fast path of `decide`, for a cached policy without a rule on the shared rate; else undefined. */
    decideNow(call: PolicyCall): DecisionRow[] | undefined {
      if (call.tools.length === 0) return [];
      const policy = cache.cached(call.tenant);
      return policy === undefined || needsSharedRate(policy, call) ? undefined : decideLocally(call, policy);
    },

    /**
     * A decision for each message, to be recorded; none without a policy. If counting fails, on_error decides.
     * @throws Fault `unavailable` when the policy is unknown, or a denial by on_error could not be recorded in time
     */
    async decide(call: PolicyCall): Promise<DecisionRow[]> {
      const policy = await cache.inForce(call.tenant).catch((error) => {
        decideLocally(call, null);
        throw error;
      });
      return needsSharedRate(policy, call) ? decideShared(call, policy) : decideLocally(call, policy);
    },
  };
}

export function createPolicyService(deps: PolicyDeps) {
  const { store, clock, log, now } = deps;
  const cache = createPolicyCache({ store, log, ...(now && { now }) });
  const decisions = createDecisionLog(deps);
  const { decideNow, decide } = createDecider(deps, createObservedRates(store, now), cache);

  return {
    /** Prefetches the policy for a call that must wait for another read first, so that both reads overlap. */
    readAhead: cache.readAhead,
    decideNow,
    decide,
    recordNow: decisions.recordNow,
    record: decisions.record,

    /** Tells which tools are denied whatever the call's size and rate; null without a policy. @throws Fault `unavailable` */
    async deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null> {
      const policy = await cache.inForce(tenant);
      if (policy === null) return null;
      const { compiled, on_error } = policy;
      if (compiled === null) return () => on_error === "deny";
      return toolsDeniedToAll(compiled, agentId);
    },

    /** How the policy, or another document, would judge a call. Nothing is counted or recorded. */
    async dryRun({ tenant }: Caller, { agent_id, document, ...conditions }: DryRun): Promise<PolicyVerdict> {
      if (document !== null) await checkRules(document.rules, tenant, "document.");
      const agent = await findAgent(store, tenant, agent_id);
      if (agent === null) throw noSuch("agt", agent_id);
      const call = { agent_id, protocol: agent.protocol, ...conditions };
      if (document !== null) return evaluate(await compile(document, tenant), call);
      const policy = await cache.inForce(tenant);
      return policy === null ? NO_POLICY : verdictOf(policy, call);
    },

    /** The stored policy, its rules as validated JSON; null when the tenant has none. */
    async get({ tenant }: Caller): Promise<KnownPolicy | null> {
      const policy = await cache.newest(tenant);
      if (policy?.compiled === null) throw new Fault("internal", "the stored policy can't be understood");
      if (policy === null || policy.rules.length <= SHORT_CHARACTERS) return policy;
      // Writing long rules to a caller takes time, and many callers may have waited for this one read.
      return inTurn(tenant, () => policy);
    },

    async put({ tenant }: Caller, document: PolicyReplace): Promise<Replaced> {
      const { default: default_action, on_error } = document;
      await checkRules(document.rules, tenant);
      const compiled = await compile(document, tenant);
      const rules = await formatRules(document.rules, tenant);
      const fields = { default_action, on_error, rules, updated_at: clock.now() };
      try {
        const replaced = await store.write((tx) => replacePolicy(tx, tenant, fields));
        cache.replaced(tenant, { ...document, ...replaced, rules, compiled }, document.rules);
        return replaced;
      } catch (error) {
        // A write that reports a failure may have been committed all the same.
        cache.forget(tenant);
        throw error;
      }
    },

    /** The newest decisions first, including all that this replica has recorded until now. */
    async newest({ tenant }: Caller, limit: number) {
      // Waits at most this long for buffered decisions to be stored.
      await decisions.flush(2_000);
      return newestDecisions(store.read, tenant, limit);
    },

    /** Call this after the last call and before the store is closed: it waits at most 10 s for a store that is away. */
    close: () => decisions.close(10_000),
  };
}

type Replaced = Pick<StoredPolicy, "version" | "updated_at">;
type PolicyFields = Omit<Tables["policies"]["$inferInsert"], "tenant" | "version">;

/** Replaces the policy in one statement, so that two concurrent replacements get different versions. */
async function replacePolicy(tx: Tx, tenant: string, fields: PolicyFields): Promise<Replaced> {
  const { policies: t } = tx.tables;
  const [row] = await tx.db
    .insert(t)
    .values({ tenant, version: 1, ...fields })
    .onConflictDoUpdate({ target: t.tenant, set: { version: sql`${t.version} + 1`, ...fields } })
    .returning({ version: t.version, updated_at: t.updated_at });
  if (row === undefined) throw new Fault("internal", "the policy that was put is missing");
  return row;
}

// The cache of compiled policies, which every call reads. A policy put on this replica is in force once it is acknowledged, one
// put on another replica when the cached entry expires (at most 2 s are allowed). An expired entry is revalidated by its
// version, and read again only if that changed. Expired entries stay for a failing store: then their on_error applies.

const FRESH_MS = 1_000;
/** Bytes in memory of a compiled policy, a rule and a list entry, without their characters (measured). */
const POLICY_BYTES = 512;
const RULE_BYTES = 512;
const ENTRY_BYTES = 96;

/** A policy with its rules in their stored form. */
interface StoredPolicy extends Omit<Tables["policies"]["$inferSelect"], "tenant" | "default_action"> {
  readonly default: PolicyAction;
}

export interface KnownPolicy extends StoredPolicy {
  /** Null when this program can't understand the rules. */
  readonly compiled: CompiledPolicy | null;
}

interface CachedPolicy {
  /** Null when the tenant has none. */
  readonly policy: KnownPolicy | null;
  readonly weight: number;
  readonly until: number;
}

const INPUT = inputRows<string>({ tenant: ["text", (tenant) => tenant] });

/** The version of the policy; null when there is none. Batched over tenants, since each policy is revalidated every second. */
const versionLookUp: Command<string, number | null> = {
  name: "policy",
  kind: "look_up",
  tenantOf: (tenant) => tenant,
  bytesOf: () => 64,
  sqlite(prepare) {
    const find = prepare("select version from policies where tenant = ?");
    return (tenant) => (find.get(tenant)?.["version"] as number | undefined) ?? null;
  },
  postgres: {
    text: `select input.n, p.version from ${INPUT.source}, policies p where p.tenant = input.tenant`,
    valuesOf: INPUT.values,
    outputsOf: foundBy(({ version }) => Number(version)),
  },
};

const policyByTenant = preparedRow(({ db, tables: { policies: t } }) =>
  db.select().from(t).where(eq(t.tenant, GIVEN_KEY.tenant)),
);

export function createPolicyCache({
  store,
  log,
  now = () => performance.now(),
}: Pick<PolicyDeps, "store" | "log" | "now">) {
  const entries = boundedCache<string, CachedPolicy>(MAX.policyBytes);
  /** Tenants whose policy is being read. `forget` removes a tenant, so that a read from before it is not cached. */
  const reading = new Set<string>();
  const limitCompiles = createLimiter({ size: MAX.policiesCompiled, tooMany: "too many policies are being read" });

  function fresh(tenant: string): CachedPolicy | undefined {
    const entry = entries.get(tenant);
    return entry !== undefined && now() < entry.until ? entry : undefined;
  }

  async function stored(tenant: string): Promise<CachedPolicy> {
    const until = now() + FRESH_MS;
    const newest = await store.execute(versionLookUp, tenant);
    if (newest === null) return { policy: null, weight: POLICY_BYTES, until };
    const last = entries.get(tenant);
    if (last?.policy?.version === newest) return { ...last, until };
    const row = await policyByTenant(store.read.urgent, { tenant });
    if (row === null) return { policy: null, weight: POLICY_BYTES, until };
    const { default_action, version, on_error, rules, updated_at } = row;
    return limitCompiles(tenant, async () => {
      const other = entries.get(tenant);
      if (other?.policy?.version === version) return { ...other, until };
      return compiledEntry(tenant, { version, default: default_action, on_error, rules, updated_at }, until);
    });
  }

  async function read(tenant: string): Promise<CachedPolicy> {
    reading.add(tenant);
    let isSure = false;
    const entry = await stored(tenant).finally(() => {
      isSure = reading.delete(tenant);
    });
    const put = entries.get(tenant);
    // A policy that was put on this replica meanwhile is newer.
    if (put !== undefined && (put.policy?.version ?? 0) > (entry.policy?.version ?? 0)) return put;
    if (isSure) entries.set(tenant, entry, entry.weight);
    return entry;
  }

  const reads = createBatcher(async (tenant: string) => {
    const entry = fresh(tenant) ?? (await read(tenant));
    return () => entry;
  });

  async function compiledEntry(tenant: string, stored: StoredPolicy, until: number): Promise<CachedPolicy> {
    const { version, default: default_action, rules } = stored;
    try {
      const parsed = await parseRules(rules, tenant);
      const compiled = await compile({ default: default_action, rules: parsed }, tenant);
      return { policy: { ...stored, compiled }, weight: weightOf(rules, parsed), until };
    } catch (error) {
      log.error("policy_not_evaluable", { tenant, version, error });
      return { policy: { ...stored, compiled: null }, weight: weightOf(rules, []), until };
    }
  }

  return {
    /** The fast path of nearly every call: a fresh entry's policy; undefined when it has to be read. */
    cached: (tenant: string): KnownPolicy | null | undefined => fresh(tenant)?.policy,
    /** The policy in force; null when the tenant has none. @throws Fault `unavailable` when it is unknown */
    async inForce(tenant: string): Promise<KnownPolicy | null> {
      const kept = fresh(tenant);
      if (kept !== undefined) return kept.policy;
      const last = entries.get(tenant)?.policy ?? null;
      try {
        const entry = askTogether(reads.join(tenant, tenant));
        // A call waits 750 ms if on_error can decide: of 10 s for the answer, the store may need 9 for the call.
        return (await (last === null ? entry : within(750, entry))).policy;
      } catch (cause) {
        const before = entries.get(tenant)?.policy ?? last;
        if (before === null) {
          throw new Fault("unavailable", "the policy cannot be read now", { retryAfterSeconds: 5, cause });
        }
        log.warn("policy_not_readable", { tenant, on_error: before.on_error, error: cause });
        return { ...before, compiled: null };
      }
    },
    /** Prefetches the policy for a later `inForce`, which reports a failure. */
    readAhead(tenant: string): void {
      if (fresh(tenant) === undefined) reads.join(tenant, tenant).catch(() => {});
    },
    /** The policy as it is stored now; null when the tenant has none. */
    newest: async (tenant: string): Promise<KnownPolicy | null> => (await read(tenant)).policy,
    /** Call this when a policy has been put, before that is acknowledged. */
    replaced(tenant: string, policy: KnownPolicy, rules: readonly Rule[]) {
      // When two policies are put at once, the newer one may be reported first.
      if ((entries.get(tenant)?.policy?.version ?? 0) > policy.version) return;
      const weight = weightOf(policy.rules, rules);
      entries.set(tenant, { policy, weight, until: now() + FRESH_MS }, weight);
    },
    /** Call this when it is unknown whether a policy has been put: it expires the entry. */
    forget(tenant: string) {
      reading.delete(tenant);
      const last = entries.get(tenant);
      if (last !== undefined) entries.set(tenant, { ...last, until: Number.NEGATIVE_INFINITY }, last.weight);
    },
  };
}

type PolicyCache = ReturnType<typeof createPolicyCache>;

function weightOf(stored: string, rules: readonly Rule[]): number {
  const entries = rules.flatMap(({ match: { agents = [], tools = [] } }) => [agents, tools].flat());
  const characters = entries.reduce((sum, entry) => sum + entry.length, 0);
  return POLICY_BYTES + RULE_BYTES * rules.length + ENTRY_BYTES * entries.length + characters + stored.length;
}
