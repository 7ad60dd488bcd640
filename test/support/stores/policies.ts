// Policies over a store of a test, with callers whose tenants are new.
import { expect } from "bun:test";
import type { Caller } from "../../../src/core/call.ts";
import { Fault } from "../../../src/core/fault.ts";
import { type Log, silentLog } from "../../../src/core/log.ts";
import type { PolicyAction } from "../../../src/core/states.ts";
import { newestDecisions } from "../../../src/gateway/policy/decisions.ts";
import type { PolicyReplace, Rule } from "../../../src/gateway/policy/document.ts";
import type { PolicyVerdict } from "../../../src/gateway/policy/evaluate.ts";
import { createPolicyService, type PolicyCall, type PolicyService } from "../../../src/gateway/policy/service.ts";
import type { Store } from "../../../src/storage/store.ts";
import type { OpenPlace } from "./one-store.ts";

export const clock = { time: 1_790_000_000_000, now: () => clock.time };
export const AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
let serial = 0;

export const document = (rules: Rule[] = [], changes: Partial<PolicyReplace> = {}): PolicyReplace => ({
  default: "allow",
  on_error: "warn",
  rules,
  ...changes,
});
export const all = (action: PolicyAction): PolicyReplace => document([{ action, match: {} }]);

export function caller() {
  const tenant = `tenant ${++serial}`;
  const call = (changes: Partial<PolicyCall> = {}): PolicyCall => ({
    ...{ tenant, user: "alice", agent_id: AGENT, protocol: "mcp" as const, tools: ["read_file"] },
    ...{ body_bytes: 10, ...changes },
  });
  return { tenant, me: { tenant, user: "alice", scopes: new Set<string>() }, call };
}

export const faultOf = async (work: unknown) => {
  const error = await Promise.resolve(work).then(
    () => null,
    (thrown) => thrown,
  );
  expect(error).toBeInstanceOf(Fault);
  return error as Fault;
};

/** Counts and judges a call, and records the decisions on its messages, as a call of an agent does; none without a policy. */
export async function allJudged(policy: PolicyService, call: PolicyCall): Promise<readonly PolicyVerdict[]> {
  const rows = policy.decideNow(call) ?? (await policy.decide(call));
  if (!policy.recordNow(rows)) await policy.record(rows);
  return rows.map(({ action, matched_rule, reason }) => ({ action, matched_rule, reason }));
}

export const judged = async (policy: PolicyService, call: PolicyCall) => (await allJudged(policy, call))[0] ?? null;

/** @param opened the store, once it is open */
export function policiesOn(opened: () => OpenPlace) {
  const service = (changes: { now?: () => number; log?: Log } = {}) =>
    createPolicyService({ store: opened().store, clock, log: silentLog, ...changes });
  const read = async (policy: ReturnType<typeof service>, me: Caller) => {
    const found = await policy.get(me);
    if (found === null) return null;
    const { compiled, ...fields } = found;
    return { ...fields, rules: JSON.parse(found.rules) };
  };
  const stored = (tenant: string) => newestDecisions(opened().store.read, tenant, 1_000_000);

  /** The store, but nobody hears how the write of this number ended. */
  function losingAnswer(number: number): Store {
    const { store } = opened();
    let writes = 0;
    const write: Store["write"] = async (work) => {
      const value = await store.write(work);
      if (++writes === number) throw new Fault("unavailable", "the answer was lost");
      return value;
    };
    return { ...store, write };
  }

  /** While `work` runs, the table is not there: the rest of the store works on. */
  async function without(table: string, work: () => Promise<void>): Promise<void> {
    const { place } = opened();
    await place.execute(`alter table ${table} rename to ${table}_away`);
    try {
      await work();
    } finally {
      await place.execute(`alter table ${table}_away rename to ${table}`);
    }
  }

  return { service, read, stored, losingAnswer, without };
}
