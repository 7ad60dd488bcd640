// Creates, reads, lists, changes and deletes the agents of a tenant, and computes prices. A change is made under the agent's
// lock, and an agent can only name a credential that exists. The schema keeps the names of live agents unique.
import { and, eq, gt, isNull } from "drizzle-orm";
import type { Caller } from "../../core/call.ts";
import { invalidField, noSuch, overQuota } from "../../core/fault.ts";
import type { HostRules } from "../../core/host.ts";
import { isId, newId } from "../../core/id.ts";
import type { Clock } from "../../core/time.ts";
import { hasKey, type Reader, type Store, type Tx, withFreeName } from "../../storage/store.ts";
import { totalOf } from "../../storage/totals.ts";
import { type CredentialUses, holdCredential, mayGoTo, NOT_ALLOWED } from "../credentials/service.ts";
import { type AgentFilter, findAgents, LIVE, moveBetweenLists, readAgents } from "./lists.ts";
import type { AgentCreate, AgentPatch, AgentRow } from "./model.ts";
import { createdFields, decodePricing, patchedFields } from "./model.ts";
import type { InvocableAgent } from "./store.ts";

export interface AgentDeps {
  readonly store: Store;
  readonly clock: Clock;
  readonly rules: HostRules;
  /** How many live agents (active or pending) a tenant may have. */
  readonly agentsMax: number;
  /** Called for each agent that a write may have changed, before the write is acknowledged. */
  changed?(tenant: string, id: string): void;
}

export interface Price {
  /** In the asset's smallest units; above zero. */
  readonly amount: bigint;
  /** As the agent's owner wrote it. */
  readonly pay_to: string;
}

/** The price of one call; null when it is free. @param tool the MCP tool that is called; null for any other call */
export function priceOf(agent: InvocableAgent, tool: string | null): Price | null {
  const pricing = decodePricing(agent.pricing);
  if (pricing === null) return null;
  const { tools = {}, pay_to } = pricing;
  const own = tool !== null && Object.hasOwn(tools, tool) ? tools[tool] : undefined;
  const amount = BigInt(own ?? pricing.amount);
  return amount === 0n ? null : { amount, pay_to };
}

/** The live agents that have a credential. */
export const agentsOfCredential: CredentialUses = async (reader, { tenant, credentialId }, after, limit) => {
  const { agents: t } = reader.tables;
  const usesIt = and(eq(t.tenant, tenant), eq(t.credential_ref, credentialId), isNull(t.deleted_at));
  const found = await reader.db
    .select({ id: t.id, name: t.name, url: t.upstream_url })
    .from(t)
    .where(and(usesIt, gt(t.id, after)))
    .orderBy(t.id)
    .limit(limit);
  return found.map(({ id, name, url }) => ({ id, url, name: `the agent ${JSON.stringify(name)} (${id})` }));
};

async function findRow(reader: Reader, tenant: string, id: string): Promise<AgentRow> {
  const { agents } = reader.tables;
  if (!isId("agt", id)) throw noSuch("agt", id);
  const [row] = await reader.db.select().from(agents).where(hasKey(agents, { tenant, id }));
  if (row === undefined) throw noSuch("agt", id);
  return row;
}

/**
 * Locks the credential that the agent will name, if any.
 * @param changes the fields that the caller set; the error names one of these
 * @throws Fault `invalid_request` when there is no such credential, or its `allowed_hosts` leave out the upstream's host
 */
async function requireCredential(tx: Tx, agent: AgentRow, changes: Partial<AgentRow>): Promise<void> {
  const { tenant, credential_ref, upstream_url } = agent;
  if (credential_ref === null) return;
  const held = await holdCredential(tx, tenant, credential_ref);
  if (held === null) throw invalidField("credential_ref", "names no credential of this tenant");
  if (upstream_url === null || mayGoTo(held, upstream_url)) return;
  throw invalidField(changes.upstream_url == null ? "credential_ref" : "upstream_url", NOT_ALLOWED);
}

export function createAgentService({ store, clock, rules, agentsMax, changed }: AgentDeps) {
  /** Calls `changed` after a failed write too, since that write may have been committed after all. */
  const change = <T>(tenant: string, id: string, work: (tx: Tx) => Promise<T>): Promise<T> =>
    store.write(work).finally(() => changed?.(tenant, id));

  return {
    async create({ tenant, user }: Caller, body: AgentCreate): Promise<AgentRow> {
      const fields = createdFields(body, rules);
      const now = clock.now();
      const row: AgentRow = {
        tenant,
        id: newId("agt", now),
        ...fields,
        rate_revision: 0,
        created_by: user,
        created_at: now,
        updated_at: now,
        deleted_at: null,
      };
      const refused = overQuota(agentsMax, "agents, deleted ones not counted");
      // Only the check inside the write is exact, but a write that fails slows down the others of its group commit.
      if ((await totalOf(store.read, tenant, LIVE)) >= agentsMax) throw refused;
      await withFreeName("agent", () =>
        store.write(async (tx) => {
          await requireCredential(tx, row, row);
          await tx.db.insert(tx.tables.agents).values(row);
          const totals = await moveBetweenLists(tx, null, row);
          if ((totals.get(LIVE) ?? 0) > agentsMax) throw refused;
        }),
      );
      return row;
    },

    get({ tenant }: Caller, id: string): Promise<AgentRow> {
      return findRow(store.read, tenant, id);
    },

    async list({ tenant }: Caller, filter: AgentFilter, callerSignal?: AbortSignal) {
      const { ids, total } = await findAgents(store.read, tenant, filter, callerSignal);
      return { rows: () => readAgents(store.read, tenant, ids), total };
    },

    async patch({ tenant }: Caller, id: string, body: AgentPatch): Promise<AgentRow> {
      if (!isId("agt", id)) throw noSuch("agt", id);
      return withFreeName("agent", () =>
        change(tenant, id, async (tx) => {
          // Two changes may each be valid but not both together, so the lock makes one wait for the other.
          await tx.lock(`agent:${tenant}:${id}`);
          const row = await findRow(tx, tenant, id);
          if (row.deleted_at !== null) throw noSuch("agt", id);
          const fields = patchedFields(row, body, rules);
          if (fields.credential_ref != null || fields.upstream_url != null) {
            await requireCredential(tx, { ...row, ...fields }, fields);
          }
          return Object.keys(fields).length === 0 ? row : updated(tx, row, fields, clock.now());
        }),
      );
    },

    async remove({ tenant }: Caller, id: string): Promise<void> {
      if (!isId("agt", id)) throw noSuch("agt", id);
      return change(tenant, id, async (tx) => {
        await tx.lock(`agent:${tenant}:${id}`);
        const row = await findRow(tx, tenant, id);
        if (row.deleted_at !== null) return;
        const now = clock.now();
        await updated(tx, row, { deleted_at: now }, now);
      });
    },
  };
}

async function updated(tx: Tx, row: AgentRow, fields: Partial<AgentRow>, now: number): Promise<AgentRow> {
  const { agents } = tx.tables;
  const setsRate = "invocation_rate_limit" in fields || "invocation_burst" in fields;
  const next = { ...row, ...fields, rate_revision: row.rate_revision + (setsRate ? 1 : 0), updated_at: now };
  await tx.db.update(agents).set(next).where(hasKey(agents, row));
  await moveBetweenLists(tx, row, next);
  return next;
}
