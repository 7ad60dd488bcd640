// The policy of a tenant. It is replaced as a whole, and judges each call that has passed the earlier checks. When the
// policy cannot be read or evaluated, its on_error decides: that of the stored document, else that of the last one that was
// read here. A replica that never could read it does not know whether there is a policy, so it lets no call pass (503).

import { eq, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Caller } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { Log } from "../../core/log.ts";
import type { Meters } from "../../core/meters.ts";
import type { PolicyAction } from "../../core/states.ts";
import { createBatcher } from "../../kernel/batch.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import { inTurn } from "../../kernel/turns.ts";
import { within } from "../../storage/failures.ts";
import {
  type Command,
  foundBy,
  GIVEN_KEY,
  inputRows,
  prepared,
  type Reader,
  type Store,
  type StoreTools,
  type Tx,
} from "../../storage/store.ts";
import { findAgent } from "../agents/store.ts";
import { createDecisionLog, type DecisionRow, newestDecisions } from "./decisions.ts";
import { checkRules, formatRules, type PolicyReplace, parseRules, type Rule } from "./document.ts";
import {
  asksForRate,
  type CompiledPolicy,
  compile,
  type EvaluatedCall,
  evaluate,
  type PolicyVerdict,
  toolsDeniedToAll,
} from "./evaluate.ts";
import { type CallingUser, createObservedRates, type ObservedRates } from "./observed-rate.ts";

/** Rules up to this length are written to a caller at once. */
const SHORT_CHARACTERS = 16_384;
/**
 * How long a call waits to be counted if on_error decides after that. An answer is due within 10 s, and the store may take 9
 * s of these for the accepted call, or for the record of the refusal.
 */
const COUNT_MS_MAX = 750;
/** When on_error says deny, nothing is lost by waiting longer: after that the call is refused without a record. */
const COUNT_MS_MAX_OR_DENY = 9_000;

/** A call that the policy judges: each message of a batch has a decision of its own, by the tool that it calls. */
export interface PolicyCall extends Omit<EvaluatedCall, "rate" | "mcp_tool"> {
  readonly tenant: string;
  readonly user: string;
  readonly tools: readonly (string | null)[];
}

/** A call to try. */
interface DryRun extends Omit<EvaluatedCall, "protocol"> {
  /** Null: the tenant's own. */
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

  /** Counts a call here alone, which gives its rate as far as nobody asks for what other replicas have counted. */
  function decideHere(call: PolicyCall, policy: KnownPolicy | null): DecisionRow[] {
    const counted = call.tools.map(() => rates.observe(callerOf(call)));
    return policy === null ? [] : decisionsOf(call, policy, counted);
  }

  const isCountedTogether = (policy: KnownPolicy | null, { agent_id }: PolicyCall): policy is KnownPolicy =>
    rates.isShared && policy?.compiled != null && asksForRate(policy.compiled, agent_id);

  async function decideTogether(call: PolicyCall, policy: KnownPolicy): Promise<DecisionRow[]> {
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
    /** The fast path of `decide`: a policy in memory, without a rule that asks what other replicas have counted; else undefined. */
    decideNow(call: PolicyCall): DecisionRow[] | undefined {
      if (call.tools.length === 0) return [];
      const policy = cache.cached(call.tenant);
      return policy === undefined || isCountedTogether(policy, call) ? undefined : decideHere(call, policy);
    },

    /**
     * The decision on each message of a call, to be recorded; none when the tenant has no policy. When the call can't be
     * counted, on_error decides.
     * @throws Fault `unavailable` when the policy cannot be known, or a denial by on_error could not be recorded in time
     */
    async decide(call: PolicyCall): Promise<DecisionRow[]> {
      const policy = await cache.inForce(call.tenant).catch((error) => {
        decideHere(call, null);
        throw error;
      });
      return isCountedTogether(policy, call) ? decideTogether(call, policy) : decideHere(call, policy);
    },
  };
}

export function createPolicyService(deps: PolicyDeps) {
  const { store, clock, log, now } = deps;
  const cache = createPolicyCache({ store, log, ...(now && { now }) });
  const decisions = createDecisionLog(deps);
  const { decideNow, decide } = createDecider(deps, createObservedRates(store, now), cache);

  return {
    /** Begins to read the policy for a call that waits for another read first, so that the call waits for the longer one only. */
    readAhead: cache.readAhead,
    decideNow,
    decide,
    recordNow: decisions.recordNow,
    record: decisions.record,

    /** Which tools are denied to everyone, whatever a call's size and rate; null without a policy. @throws Fault `unavailable` */
    async deniedTools(tenant: string, agentId: string): Promise<((tool: string) => boolean) | null> {
      const policy = await cache.inForce(tenant);
      if (policy === null) return null;
      const { compiled, on_error } = policy;
      if (compiled === null) return () => on_error === "deny";
      return toolsDeniedToAll(compiled, agentId);
    },

    /** What the policy, or another document, would say of a call. Nothing is counted or recorded. */
    async dryRun({ tenant }: Caller, { agent_id, document, ...conditions }: DryRun): Promise<PolicyVerdict> {
      if (document !== null) await checkRules(document.rules, tenant, "document.");
      const agent = await findAgent(store, tenant, agent_id);
      if (agent === null) throw new Fault("not_found", "no such agent");
      const call = { agent_id, protocol: agent.protocol, ...conditions };
      if (document !== null) return evaluate(await compile(document, tenant), call);
      const policy = await cache.inForce(tenant);
      return policy === null ? NO_POLICY : verdictOf(policy, call);
    },

    /** Null when the tenant has none. The rules are JSON already, and known to be rules. */
    async get({ tenant }: Caller): Promise<KnownPolicy | null> {
      const policy = await cache.newest(tenant);
      if (policy?.compiled === null) throw new Fault("internal", "a stored policy that makes no sense");
      if (policy === null || policy.rules.length <= SHORT_CHARACTERS) return policy;
      // Writing long rules to a caller takes time, and many callers may have waited for this moment.
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

    /** To be called when no calls come any more, before the store is closed: it waits so long for one that is away. */
    close: () => decisions.close(10_000),
  };
}

type Replaced = Pick<StoredPolicy, "version" | "updated_at">;
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

// A cache of compiled policies for the path of every call. A policy that was put here is in force when it is acknowledged, one
// put on another replica when the cached policy expires (decisions.md, section 4, allows 2 s). After that only the version is
// read, and the rest if it has changed. Expired entries are kept for when the store fails: then their on_error applies.

const REMEMBERED_MS = 1_000;
/** Bytes of a compiled policy, a rule and a list entry, without their characters (measured). */
const POLICY_BYTES = 512;
const RULE_BYTES = 512;
const ENTRY_BYTES = 96;

interface StoredPolicy {
  readonly version: number;
  readonly default: PolicyAction;
  readonly on_error: PolicyAction;
  /** In their stored form. */
  readonly rules: string;
  readonly updated_at: number;
}

export interface KnownPolicy extends StoredPolicy {
  /** Null when this program cannot make sense of the rules. */
  readonly compiled: CompiledPolicy | null;
}

interface CachedPolicy {
  /** Null: the tenant has none. */
  readonly policy: KnownPolicy | null;
  readonly weight: number;
  readonly until: number;
}

const INPUT = inputRows<string>({ tenant: ["text", (tenant) => tenant] });

/** Null when the tenant has no policy. Many tenants are read at once, since each policy is looked at every second. */
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

const policyQuery = prepared(({ db, tables: { policies: t } }: Reader) =>
  db.select().from(t).where(eq(t.tenant, GIVEN_KEY.tenant)),
);

interface PolicyCacheOptions {
  readonly store: Pick<Store, "execute" | "read">;
  readonly log: Log;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

export function createPolicyCache({ store, log, now = () => performance.now() }: PolicyCacheOptions) {
  const known = boundedCache<string, CachedPolicy>(MAX.policyBytes);
  /** Whose policies are being read, if nobody has doubted meanwhile that they are as they were. */
  const reading = new Set<string>();
  const few = createLimiter({ size: MAX.policiesCompiled, tooMany: "too many policies are being read" });

  function fresh(tenant: string): CachedPolicy | undefined {
    const entry = known.get(tenant);
    return entry !== undefined && now() < entry.until ? entry : undefined;
  }

  async function stored(tenant: string): Promise<CachedPolicy> {
    const until = now() + REMEMBERED_MS;
    const newest = await store.execute(versionLookUp, tenant);
    if (newest === null) return { policy: null, weight: POLICY_BYTES, until };
    const last = known.get(tenant);
    if (last?.policy?.version === newest) return { ...last, until };
    const [row] = await policyQuery(store.read.urgent).execute({ tenant });
    if (row === undefined) return { policy: null, weight: POLICY_BYTES, until };
    const { default_action, version, on_error, rules, updated_at } = row;
    return few(tenant, async () => {
      const other = known.get(tenant);
      if (other?.policy?.version === version) return { ...other, until };
      return compiledEntry(tenant, { version, default: default_action, on_error, rules, updated_at }, until);
    });
  }

  /** As it is stored now, and kept. */
  async function read(tenant: string): Promise<CachedPolicy> {
    reading.add(tenant);
    let isSure = false;
    const entry = await stored(tenant).finally(() => {
      isSure = reading.delete(tenant);
    });
    const put = known.get(tenant);
    // A policy that was put here meanwhile is newer.
    if (put !== undefined && (put.policy?.version ?? 0) > (entry.policy?.version ?? 0)) return put;
    if (isSure) known.set(tenant, entry, entry.weight);
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
    /** The fast path of nearly every call: a policy that was read a moment ago; undefined when it has to be read. */
    cached: (tenant: string): KnownPolicy | null | undefined => fresh(tenant)?.policy,
    /** The policy in force, null when the tenant has none. @throws Fault `unavailable` when that cannot be known */
    async inForce(tenant: string): Promise<KnownPolicy | null> {
      const kept = fresh(tenant);
      if (kept !== undefined) return kept.policy;
      const last = known.get(tenant)?.policy ?? null;
      try {
        const entry = reads.join(tenant, tenant);
        // How long a call waits for its policy if on_error can decide instead. An answer is due within 10 s, and the store
        // may take 9 s of those for the call itself.
        return (await (last === null ? entry : within(750, entry))).policy;
      } catch (cause) {
        const before = known.get(tenant)?.policy ?? last;
        if (before === null) {
          throw new Fault("unavailable", "the policy cannot be read now", { retryAfterSeconds: 5, cause });
        }
        log.warn("policy_not_readable", { tenant, on_error: before.on_error, error: cause });
        return { ...before, compiled: null };
      }
    },
    /** Begins to read the policy for an `inForce` that follows, which reports a failure. */
    readAhead(tenant: string): void {
      if (fresh(tenant) === undefined) reads.join(tenant, tenant).catch(() => {});
    },
    /** As it is stored now; null when the tenant has none. */
    newest: async (tenant: string): Promise<KnownPolicy | null> => (await read(tenant)).policy,
    /** To be called when a policy has been put, before that is acknowledged. */
    took(tenant: string, policy: KnownPolicy, rules: readonly Rule[]) {
      // Of two policies put at once, the newer one may be reported first.
      if ((known.get(tenant)?.policy?.version ?? 0) > policy.version) return;
      const weight = weightOf(policy.rules, rules);
      known.set(tenant, { policy, weight, until: now() + REMEMBERED_MS }, weight);
    },
    /** To be called when it is unknown whether a policy has been put. */
    forget(tenant: string) {
      reading.delete(tenant);
      const last = known.get(tenant);
      if (last !== undefined) known.set(tenant, { ...last, until: Number.NEGATIVE_INFINITY }, last.weight);
    },
  };
}

type PolicyCache = ReturnType<typeof createPolicyCache>;

function weightOf(stored: string, rules: readonly Rule[]): number {
  const entries = rules.flatMap(({ match: { agents = [], tools = [] } }) => [agents, tools].flat());
  const characters = entries.reduce((sum, entry) => sum + entry.length, 0);
  return POLICY_BYTES + RULE_BYTES * rules.length + ENTRY_BYTES * entries.length + characters + stored.length;
}
