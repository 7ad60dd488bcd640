// The agents of a tenant in the database. Uniqueness of names is the schema's to keep, a change of an agent
// is made under its lock, and an agent begins to name a credential only while that is there.
import { and, count, desc, eq, isNotNull, isNull, type SQL, sql } from "drizzle-orm";
import type { Caller } from "../../core/caller.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault, invalidField } from "../../core/fault.ts";
import type { AllowList } from "../../core/host.ts";
import { isId, newId } from "../../core/id.ts";
import type { AgentStatus, Protocol } from "../../core/states.ts";
import { bind, prepared, type Reader, type Store, type Tx, UniqueViolation } from "../../storage/store.ts";
import { holdCredential } from "../credentials/service.ts";
import { type AgentCreate, type AgentPatch, type AgentRow, decodePricing, tagNeedle } from "./model.ts";
import { createdFields, patchedFields } from "./rules.ts";
import { fold, searchText } from "./search.ts";

export interface AgentDeps {
  readonly store: Store;
  readonly clock: Clock;
  /** Hosts that are exempt from the rules for upstream URLs. */
  readonly allow: AllowList;
  /** Told of each write that may have changed an agent, before it is acknowledged. */
  changed?(): void;
}

export interface AgentFilter {
  /** Null: all but the inactive ones. */
  readonly status: AgentStatus | null;
  readonly protocol: Protocol | null;
  readonly tag: string | null;
  /** Part of the name or the description, in any case. */
  readonly q: string | null;
  readonly limit: number;
  readonly offset: number;
}

const invocableQuery = prepared(({ db, tables: { agents } }: Reader) =>
  db
    .select({
      id: agents.id,
      upstream_url: agents.upstream_url,
      credential_ref: agents.credential_ref,
      suspended: agents.suspended,
      invocation_rate_limit: agents.invocation_rate_limit,
      invocation_burst: agents.invocation_burst,
      rate_revision: agents.rate_revision,
      emit_receipts: agents.emit_receipts,
      capture_body: agents.capture_body,
      protocol: agents.protocol,
      mcp_protocol_version: agents.mcp_protocol_version,
      pricing: agents.pricing,
      deleted_at: agents.deleted_at,
    })
    .from(agents)
    .where(and(eq(agents.tenant, bind(agents.tenant, "tenant")), eq(agents.id, bind(agents.id, "id")))),
);

/** What a call needs of its agent: everything but the catalog's texts. `pricing` is in its stored form. */
export type InvocableAgent = Awaited<ReturnType<ReturnType<typeof invocableQuery>["execute"]>>[number];

/** The agent, inactive ones too; null when the tenant has none of this ID. For the path of every call. */
export async function findAgent(reader: Reader, tenant: string, id: string): Promise<InvocableAgent | null> {
  if (!isId("agt", id)) return null;
  const [agent] = await invocableQuery(reader).execute({ tenant, id });
  return agent ?? null;
}

export interface Price {
  /** In the asset's smallest unit; above zero. */
  readonly amount: bigint;
  /** As the agent's owner wrote it. */
  readonly pay_to: string;
}

/**
 * What a call of the agent costs; null when it is free.
 *
 * @param tool the MCP tool that is called; null for every other call
 */
export function priceOf(agent: InvocableAgent, tool: string | null): Price | null {
  const pricing = decodePricing(agent.pricing);
  if (pricing === null) return null;
  const { tools = {}, pay_to } = pricing;
  const own = tool !== null && Object.hasOwn(tools, tool) ? tools[tool] : undefined;
  const amount = BigInt(own ?? pricing.amount);
  return amount === 0n ? null : { amount, pay_to };
}

/** Whether a live agent names the credential. */
export async function agentNamesCredential(reader: Reader, tenant: string, id: string): Promise<boolean> {
  const { agents } = reader.tables;
  const found = await reader.db
    .select({ id: agents.id })
    .from(agents)
    .where(and(eq(agents.tenant, tenant), eq(agents.credential_ref, id), isNull(agents.deleted_at)))
    .limit(1);
  return found.length > 0;
}

const noSuchAgent = () => new Fault("not_found", "no such agent");

async function findRow(reader: Reader, tenant: string, id: string): Promise<AgentRow> {
  const { agents } = reader.tables;
  if (!isId("agt", id)) throw noSuchAgent();
  const [row] = await reader.db
    .select()
    .from(agents)
    .where(and(eq(agents.tenant, tenant), eq(agents.id, id)));
  if (row === undefined) throw noSuchAgent();
  return row;
}

async function requireCredential(tx: Tx, tenant: string, id: string): Promise<void> {
  if (await holdCredential(tx, tenant, id)) return;
  throw invalidField("credential_ref", "names no credential of this tenant");
}

/** Runs a write in which only the name of an agent can break a uniqueness rule. */
async function withFreeName<T>(write: () => Promise<T>): Promise<T> {
  try {
    return await write();
  } catch (cause) {
    if (!(cause instanceof UniqueViolation)) throw cause;
    throw new Fault("conflict", "name: already used by another agent", { cause });
  }
}

function conditionOf({ agents }: Reader["tables"], tenant: string, filter: AgentFilter): SQL | undefined {
  const { status, protocol, tag, q } = filter;
  return and(
    eq(agents.tenant, tenant),
    status === "inactive" ? isNotNull(agents.deleted_at) : isNull(agents.deleted_at),
    status === "pending" ? isNull(agents.upstream_url) : undefined,
    status === "active" ? isNotNull(agents.upstream_url) : undefined,
    protocol === null ? undefined : eq(agents.protocol, protocol),
    tag === null ? undefined : contains(agents.tags, tagNeedle(tag)),
    q === null || q === "" ? undefined : contains(agents.search_text, fold(q)),
  );
}

/** `like` minds case or not by database and knows wildcards; replace() compares bytes in both. */
function contains(column: AgentColumn, needle: string): SQL {
  return sql`replace(${column}, ${needle}, '') <> ${column}`;
}

type AgentColumn = Reader["tables"]["agents"]["tags" | "search_text"];

export function agentService({ store, clock, allow, changed }: AgentDeps) {
  /** A write that fails may have been made all the same. */
  const change = <T>(work: (tx: Tx) => Promise<T>): Promise<T> => store.write(work).finally(changed);

  return {
    async create({ tenant, user }: Caller, body: AgentCreate): Promise<AgentRow> {
      const fields = createdFields(body, allow);
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
        search_text: searchText(fields),
      };
      await withFreeName(() =>
        store.write(async (tx) => {
          if (row.credential_ref !== null) await requireCredential(tx, tenant, row.credential_ref);
          await tx.db.insert(tx.tables.agents).values(row);
        }),
      );
      return row;
    },

    get({ tenant }: Caller, id: string): Promise<AgentRow> {
      return findRow(store.read, tenant, id);
    },

    async list({ tenant }: Caller, filter: AgentFilter): Promise<{ rows: AgentRow[]; total: number }> {
      const { db, tables } = store.read;
      const condition = conditionOf(tables, tenant, filter);
      const [rows, totals] = await Promise.all([
        db
          .select()
          .from(tables.agents)
          .where(condition)
          // The ID carries the time of creation.
          .orderBy(desc(tables.agents.id))
          .limit(filter.limit)
          .offset(filter.offset),
        db.select({ total: count() }).from(tables.agents).where(condition),
      ]);
      return { rows, total: totals[0]?.total ?? 0 };
    },

    async patch({ tenant }: Caller, id: string, body: AgentPatch): Promise<AgentRow> {
      if (!isId("agt", id)) throw noSuchAgent();
      return withFreeName(() =>
        change(async (tx) => {
          // Two changes that are each valid may not be so together, so they are made one after the other.
          await tx.lock(`agent:${tenant}:${id}`);
          const row = await findRow(tx, tenant, id);
          if (row.deleted_at !== null) throw noSuchAgent();
          const fields = patchedFields(row, body, allow);
          if (fields.credential_ref != null) await requireCredential(tx, tenant, fields.credential_ref);
          return Object.keys(fields).length === 0 ? row : updated(tx, row, fields, clock.now());
        }),
      );
    },

    async remove({ tenant }: Caller, id: string): Promise<void> {
      if (!isId("agt", id)) throw noSuchAgent();
      return change(async (tx) => {
        await tx.lock(`agent:${tenant}:${id}`);
        const row = await findRow(tx, tenant, id);
        if (row.deleted_at !== null) return;
        const { agents } = tx.tables;
        const now = clock.now();
        await tx.db
          .update(agents)
          .set({ deleted_at: now, updated_at: now })
          .where(and(eq(agents.tenant, tenant), eq(agents.id, id)));
      });
    },
  };
}

type Changes = ReturnType<typeof patchedFields>;

async function updated(tx: Tx, row: AgentRow, fields: Changes, now: number): Promise<AgentRow> {
  const { agents } = tx.tables;
  const setsRate = "invocation_rate_limit" in fields || "invocation_burst" in fields;
  const next: AgentRow = {
    ...row,
    ...fields,
    rate_revision: row.rate_revision + (setsRate ? 1 : 0),
    updated_at: now,
  };
  next.search_text = searchText(next);
  await tx.db
    .update(agents)
    .set(next)
    .where(and(eq(agents.tenant, row.tenant), eq(agents.id, row.id)));
  return next;
}
