// A cache of compiled policies for the path of every call. A policy that was put here is in force when it is
// acknowledged, one put on another replica when the cached policy expires (decisions.md, section 4, allows 2 s). After
// that only the version is read, and the rest if the version has changed. Expired entries are kept for when the store
// fails: then the last known on_error applies.

import { eq } from "drizzle-orm";
import type { Log } from "../../core/log.ts";
import type { PolicyAction } from "../../core/states.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { MAX } from "../../kernel/limits.ts";
import { createLimiter } from "../../kernel/share.ts";
import { afterShared, inSteps } from "../../kernel/turns.ts";
import { within } from "../../storage/failures.ts";
import { bind, type Command, inputRows, prepared, type Reader, type Store } from "../../storage/store.ts";
import { parseRules, type Rule } from "./document.ts";
import { type CompiledPolicy, compile } from "./evaluate.ts";

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

/** `failed` when the policy can't be read now; `last` is the policy that was read last, null when none ever was. */
export type PolicyLookup =
  | { readonly failed: false; readonly policy: KnownPolicy | null }
  | { readonly failed: true; readonly last: KnownPolicy | null; readonly cause: unknown };

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
    outputsOf(inputs, rows) {
      const found: (number | null)[] = inputs.map(() => null);
      for (const { n, version } of rows) found[Number(n) - 1] = Number(version);
      return found;
    },
  },
};

const policyQuery = prepared(({ db, tables: { policies: t } }: Reader) =>
  db
    .select()
    .from(t)
    .where(eq(t.tenant, bind(t.tenant, "tenant"))),
);

interface PolicyCacheOptions {
  readonly store: Pick<Store, "execute" | "read">;
  readonly log: Log;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

export function createPolicyCache({ store, log, now = () => performance.now() }: PolicyCacheOptions) {
  const known = boundedCache<string, CachedPolicy>(MAX.policyBytes);
  const reading = new Map<string, Promise<CachedPolicy>>();
  const forgotten = new WeakSet<Promise<CachedPolicy>>();
  const few = createLimiter({ size: MAX.policiesCompiled, tooMany: "too many policies are being read" });

  async function read(tenant: string, last: CachedPolicy | undefined): Promise<CachedPolicy> {
    const until = now() + REMEMBERED_MS;
    const newest = await store.execute(versionLookUp, tenant);
    if (newest === null) return { policy: null, weight: POLICY_BYTES, until };
    if (last?.policy?.version === newest) return { ...last, until };
    const [row] = await policyQuery(store.read.urgent).execute({ tenant });
    if (row === undefined) return { policy: null, weight: POLICY_BYTES, until };
    const { default_action, version, on_error, rules, updated_at } = row;
    const stored = { version, default: default_action, on_error, rules, updated_at };
    return few(tenant, () => compiledEntry(tenant, stored, until));
  }

  async function compiledEntry(tenant: string, stored: StoredPolicy, until: number): Promise<CachedPolicy> {
    const { version, default: default_action, rules } = stored;
    try {
      const parsed = await inSteps(parseRules(rules), tenant);
      const compiled = await inSteps(compile({ default: default_action, rules: parsed }), tenant);
      return { policy: { ...stored, compiled }, weight: weightOf(rules, parsed), until };
    } catch (error) {
      log.error("policy_not_evaluable", { tenant, version, error });
      return { policy: { ...stored, compiled: null }, weight: weightOf(rules, []), until };
    }
  }

  /** Shares one read among all requests at the same time, unless the policy changed since the read began. */
  function readOnce(tenant: string, last: CachedPolicy | undefined): Promise<CachedPolicy> {
    const inFlight = reading.get(tenant);
    if (inFlight !== undefined) return inFlight;
    const own = read(tenant, last)
      .then((entry) => {
        if (reading.get(tenant) === own) known.set(tenant, entry, entry.weight);
        return entry;
      })
      .finally(() => {
        if (reading.get(tenant) === own) reading.delete(tenant);
      });
    reading.set(tenant, own);
    return own;
  }

  /** A policy that was put while this one was read or waited for is newer. */
  function newestOf(tenant: string, { policy }: CachedPolicy): KnownPolicy | null {
    const put = known.get(tenant)?.policy ?? null;
    return (put?.version ?? 0) > (policy?.version ?? 0) ? put : policy;
  }

  async function lookUp(tenant: string, last: CachedPolicy | undefined): Promise<PolicyLookup> {
    // The time limit is for the read only, not for the wait that lets other requests go first.
    // How long a call waits for its policy if on_error can decide instead. An answer is due within 10 s, and the store
    // may take 9 s of those for the call itself.
    const inTime = (entry: Promise<CachedPolicy>) => (last?.policy ? within(750, entry) : entry);
    const shared = reading.get(tenant);
    try {
      if (shared === undefined) return { failed: false, policy: (await inTime(readOnce(tenant, last))).policy };
      const entry = await afterShared(inTime(shared), tenant);
      const isOld = forgotten.has(shared) || now() >= entry.until;
      // A read of its own, so that no other request waits for it.
      const newest = isOld ? await inTime(read(tenant, known.get(tenant))) : entry;
      return { failed: false, policy: newestOf(tenant, newest) };
    } catch (cause) {
      return { failed: true, last: known.get(tenant)?.policy ?? last?.policy ?? null, cause };
    }
  }

  const isFresh = (last: CachedPolicy | undefined): last is CachedPolicy => last !== undefined && now() < last.until;

  return {
    /** At once while the policy is cached. Never rejects. */
    find(tenant: string): Bun.MaybePromise<PolicyLookup> {
      const last = known.get(tenant);
      return isFresh(last) ? { failed: false, policy: last.policy } : lookUp(tenant, last);
    },
    /** Begins to read the policy for a `find` that follows, which reports a failure. */
    readAhead(tenant: string): void {
      const last = known.get(tenant);
      if (!isFresh(last) && !reading.has(tenant)) readOnce(tenant, last).catch(() => {});
    },
    /** As it is stored now; null when the tenant has none. */
    async newest(tenant: string): Promise<KnownPolicy | null> {
      const { policy } = await readOnce(tenant, known.get(tenant));
      return policy;
    },
    /** To be called when a policy has been put, before that is acknowledged. */
    took(tenant: string, policy: KnownPolicy, rules: readonly Rule[]) {
      reading.delete(tenant);
      // Of two policies put at once, the newer one may be reported first.
      if ((known.get(tenant)?.policy?.version ?? 0) > policy.version) return;
      const weight = weightOf(policy.rules, rules);
      known.set(tenant, { policy, weight, until: now() + REMEMBERED_MS }, weight);
    },
    /** To be called when it is unknown whether a policy has been put. */
    forget(tenant: string) {
      const inFlight = reading.get(tenant);
      if (inFlight !== undefined) forgotten.add(inFlight);
      reading.delete(tenant);
      const last = known.get(tenant);
      if (last !== undefined) known.set(tenant, { ...last, until: Number.NEGATIVE_INFINITY }, last.weight);
    },
  };
}

function weightOf(stored: string, rules: readonly Rule[]): number {
  const entries = rules.flatMap(({ match: { agents = [], tools = [] } }) => [agents, tools].flat());
  const characters = entries.reduce((sum, entry) => sum + entry.length, 0);
  return POLICY_BYTES + RULE_BYTES * rules.length + ENTRY_BYTES * entries.length + characters + stored.length;
}
