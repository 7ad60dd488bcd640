// Creates, reads, lists, changes and deletes the agents of a tenant, and computes prices. A change is made under the agent's
// lock, and an agent can only name a credential that exists. The schema keeps the names of live agents unique.
import { and, eq, gt, isNotNull, isNull } from "drizzle-orm";
import type { Caller } from "../../core/call.ts";
import { invalidField, noSuch, overQuota } from "../../core/fault.ts";
import type { HostRules } from "../../core/host.ts";
import { isId, newId } from "../../core/id.ts";
import type { Clock } from "../../core/time.ts";
import { hasKey, type Reader, type Store, type Tx, withFreeName } from "../../storage/store.ts";
import { totalOf } from "../../storage/totals.ts";
import { holdCredential, mayGoTo, NOT_ALLOWED, usedAtInTurns } from "../credentials/service.ts";
import { type AgentFilter, findAgents, LIVE, moveBetweenLists, readAgents } from "./lists.ts";
import {
  type AgentCreate,
  type AgentPatch,
  type AgentRow,
  createdFields,
  decodePricing,
  patchedFields,
} from "./model.ts";
import type { InvocableAgent } from "./store.ts";

export interface AgentDeps {
  readonly store: Store;
  readonly clock: Clock;
  /** The hosts that upstream URLs may name. */
  readonly rules: HostRules;
  /** How many agents that are not inactive a tenant may have. */
  readonly agentsMax: number;
  /** Called for each agent that a write may have changed, before the write is acknowledged. */
  changed?(tenant: string, id: string): void;
}

export interface Price {
  /** In the asset's smallest unit; above zero. */
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

/** Names, for the tenant, a live agent that has the credential; null when none does. */
export async function agentOfCredential(reader: Reader, tenant: string, id: string): Promise<string | null> {
  const { agents } = reader.tables;
  const [found] = await reader.db
    .select({ id: agents.id, name: agents.name })
    .from(agents)
    .where(and(eq(agents.tenant, tenant), eq(agents.credential_ref, id), isNull(agents.deleted_at)))
    .limit(1);
  return found === undefined ? null : shownAgent(found);
}

function shownAgent({ id, name }: Pick<AgentRow, "id" | "name">): string {
  return `the agent ${JSON.stringify(name)} (${id})`;
}

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
      const refused = overQuota(agentsMax, "agents that are not inactive");
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

export const agentShutOut = usedAtInTurns({
  pageAfter: ({ db, tables: { agents } }, { tenant, credentialId }, after, limit) =>
    db
      .select({ id: agents.id, name: agents.name, url: agents.upstream_url })
      .from(agents)
      .where(
        and(
          eq(agents.tenant, tenant),
          eq(agents.credential_ref, credentialId),
          isNull(agents.deleted_at),
          isNotNull(agents.upstream_url),
          gt(agents.id, after),
        ),
      )
      .orderBy(agents.id)
      .limit(limit),
  urlOf: ({ url }) => url,
  nameOf: (agent) => shownAgent(agent),
});
