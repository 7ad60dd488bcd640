// Policies as the path of every call needs them: compiled, and remembered for a moment. A policy that was put here
// is in force with its acknowledgement, one put on another replica within the time that it is remembered
// (decisions.md, section 4, allows 2 s). After that only the version is read, and the rest when it is another one.
// What is remembered longest is kept for when the store fails: the last known on_error applies then.
import { eq } from "drizzle-orm";
import { boundedCache } from "../../core/bounded-cache.ts";
import type { Log } from "../../core/log.ts";
import type { PolicyAction } from "../../core/states.ts";
import { within } from "../../storage/deadline.ts";
import { bind, prepared, type Reader } from "../../storage/store.ts";
import { type PolicyReplace, parseRules } from "./document.ts";
import { type CompiledPolicy, compile } from "./evaluate.ts";

const REMEMBERED_MS = 1_000;
/**
 * A call waits for its policy no longer when on_error can decide instead: an answer is due within 10 s, and the
 * store takes up to 9 s of those for the call itself.
 */
const READ_MS_MAX = 750;
const CHARACTERS_MAX = 64 * 1024 * 1024;
const POLICY_CHARACTERS = 512;

export interface KnownPolicy {
  readonly version: number;
  readonly on_error: PolicyAction;
  /** Null when this program cannot make sense of the rules. */
  readonly compiled: CompiledPolicy | null;
}

interface Entry {
  /** Null: the tenant has none. */
  readonly policy: KnownPolicy | null;
  readonly weight: number;
  readonly until: number;
}

/** `failed` when it cannot be read now: with what it was when it last could, or null when it never could. */
export type Found =
  | { readonly failed: false; readonly policy: KnownPolicy | null }
  | { readonly failed: true; readonly last: KnownPolicy | null; readonly cause: unknown };

export interface RememberedPolicies {
  find(tenant: string): Promise<Found>;
  /** To be called when a policy has been put, before that is acknowledged. */
  took(tenant: string, version: number, document: PolicyReplace): void;
  /** To be called when nobody can tell whether a policy has been put. */
  forget(tenant: string): void;
}

const versionQuery = prepared(({ db, tables: { policies: t } }: Reader) =>
  db
    .select({ version: t.version })
    .from(t)
    .where(eq(t.tenant, bind(t.tenant, "tenant"))),
);

const policyQuery = prepared(({ db, tables: { policies: t } }: Reader) =>
  db
    .select()
    .from(t)
    .where(eq(t.tenant, bind(t.tenant, "tenant"))),
);

interface Options {
  readonly reader: Reader;
  readonly log: Log;
  /** Milliseconds of a clock that never goes back. */
  readonly now?: () => number;
}

export function rememberedPolicies({
  reader,
  log,
  now = () => performance.now(),
}: Options): RememberedPolicies {
  const known = boundedCache<string, Entry>(CHARACTERS_MAX);
  const reading = new Map<string, Promise<Entry>>();

  async function read(tenant: string, last: Entry | undefined): Promise<Entry> {
    const until = now() + REMEMBERED_MS;
    const [newest] = await versionQuery(reader).execute({ tenant });
    if (newest === undefined) return { policy: null, weight: POLICY_CHARACTERS, until };
    if (last?.policy?.version === newest.version) return { ...last, until };
    const [row] = await policyQuery(reader).execute({ tenant });
    if (row === undefined) return { policy: null, weight: POLICY_CHARACTERS, until };
    const { version, on_error, rules } = row;
    const weight = POLICY_CHARACTERS + rules.length;
    try {
      const compiled = compile({ default: row.default_action, rules: parseRules(rules) });
      return { policy: { version, on_error, compiled }, weight, until };
    } catch (error) {
      log.error("the policy cannot be evaluated", { tenant, version, error });
      return { policy: { version, on_error, compiled: null }, weight, until };
    }
  }

  /** One read at a time for all who ask meanwhile, unless the policy changed since it began. */
  function readOnce(tenant: string, last: Entry | undefined): Promise<Entry> {
    const underWay = reading.get(tenant);
    if (underWay !== undefined) return underWay;
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

  return {
    async find(tenant) {
      const last = known.get(tenant);
      if (last !== undefined && now() < last.until) return { failed: false, policy: last.policy };
      const entry = readOnce(tenant, last);
      try {
        const { policy } = await (last?.policy ? within(READ_MS_MAX, entry) : entry);
        return { failed: false, policy };
      } catch (cause) {
        return { failed: true, last: last?.policy ?? null, cause };
      }
    },
    took(tenant, version, document) {
      reading.delete(tenant);
      // Of two that were put at once, the newer one may have been told first.
      if ((known.get(tenant)?.policy?.version ?? 0) > version) return;
      const policy = { version, on_error: document.on_error, compiled: compile(document) };
      const weight = POLICY_CHARACTERS + JSON.stringify(document.rules).length;
      known.set(tenant, { policy, weight, until: now() + REMEMBERED_MS }, weight);
    },
    forget(tenant) {
      reading.delete(tenant);
      const last = known.get(tenant);
      if (last !== undefined) known.set(tenant, { ...last, until: Number.NEGATIVE_INFINITY }, last.weight);
    },
  };
}
