// Reading invocations: by ID, with their bodies, and as pages of the history. IDs rise with time, so newest
// first is the order of IDs, and a time window is a range of them.
import { and, desc, eq, gte, lt, type SQL, sql } from "drizzle-orm";
import type { CountDimension } from "../../../db/schema.ts";
import { Fault } from "../../core/fault.ts";
import { idFloor, isId } from "../../core/id.ts";
import { INVOCATION_STATUSES, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { dateTime, oneOf, page, type Query } from "../../edge/input.ts";
import { counted } from "../../storage/counts.ts";
import { prepared, type Reader } from "../../storage/store.ts";
import type { CapturedBodies } from "./model.ts";
import { firstBytes, type InvocationRow } from "./service.ts";

const byId = prepared(({ db, tables: { invocations: t } }: Reader) =>
  db
    .select()
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.id, sql.placeholder("id")))),
);

/** @throws Fault `not_found` */
export async function findInvocation(reader: Reader, tenant: string, id: string): Promise<InvocationRow> {
  const [row] = isId("inv", id) ? await byId(reader).execute({ tenant, id }) : [];
  if (row === undefined) throw new Fault("not_found", "no such invocation");
  return row;
}

/** Until the call has been made its whole body is stored; what is shown of it is capped all the same. */
const bodiesById = prepared(({ db, tables: { invocationBodies: t } }: Reader) =>
  db
    .select({ request: firstBytes(t.request), response: t.response })
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

const responseById = prepared(({ db, tables: { invocationBodies: t } }: Reader) =>
  db
    .select({ response: t.response })
    .from(t)
    .where(and(eq(t.tenant, sql.placeholder("tenant")), eq(t.invocation_id, sql.placeholder("id")))),
);

/** The captured bodies; both null when capture was off, or when they have been cleaned up. */
export async function capturedBodies(reader: Reader, row: InvocationRow): Promise<CapturedBodies> {
  if (!row.body_captured) return { request: null, response: null };
  const [bodies] = await bodiesById(reader).execute({ tenant: row.tenant, id: row.id });
  return bodies ?? { request: null, response: null };
}

export async function capturedResponse(reader: Reader, row: InvocationRow): Promise<Uint8Array | null> {
  if (!row.body_captured || row.completed_at === null) return null;
  const [bodies] = await responseById(reader).execute({ tenant: row.tenant, id: row.id });
  return bodies?.response ?? null;
}

/** The filters of a query, as far as a total is kept for them. */
function readFilters(query: Query): [CountDimension, string][] {
  const filters: [CountDimension, string | null][] = [
    ["agent", query.get("agent_id")],
    ["status", oneOf(query, "status", INVOCATION_STATUSES)],
    ["mode", oneOf(query, "mode", MODES)],
    ["error_class", query.get("error_class")],
    ["model", query.get("model")],
    ["settlement", oneOf(query, "settlement", SETTLEMENT_STATUSES)],
  ];
  return filters.filter((filter): filter is [CountDimension, string] => filter[1] !== null);
}

function condition(reader: Reader, [dimension, value]: [CountDimension, string]): SQL {
  const { invocations: t } = reader.tables;
  const column = {
    all: t.tenant,
    agent: t.agent_id,
    status: t.status,
    mode: t.mode,
    error_class: t.error_class,
    model: t.model,
    settlement: t.settlement_status,
  }[dimension];
  return sql`${column} = ${value}`;
}

export interface HistoryPage {
  readonly rows: InvocationRow[];
  readonly total: number;
  readonly limit: number;
  readonly offset: number;
}

/** @throws Fault `invalid_request`, naming the parameter */
export async function readHistory(reader: Reader, tenant: string, query: Query): Promise<HistoryPage> {
  const { invocations: t } = reader.tables;
  const { limit, offset } = page(query);
  const filters = readFilters(query);
  const since = dateTime(query, "since");
  const until = dateTime(query, "until");
  const window = [
    ...(since === null ? [] : [gte(t.id, idFloor("inv", since))]),
    // Inclusive to the millisecond: up to, and not with, the next one.
    ...(until === null ? [] : [lt(t.id, idFloor("inv", until + 1))]),
  ];
  // No stored text holds U+0000, and Postgres refuses a parameter that does.
  if (filters.some(([, value]) => value.includes("\0"))) return { rows: [], total: 0, limit, offset };
  const where = and(eq(t.tenant, tenant), ...filters.map((filter) => condition(reader, filter)), ...window);
  const rows = await reader.db.select().from(t).where(where).orderBy(desc(t.id)).limit(limit).offset(offset);
  const [dimension, value] = filters[0] ?? ["all", ""];
  if (window.length === 0 && filters.length <= 1) {
    return { rows, total: await counted(reader, tenant, dimension, value), limit, offset };
  }
  const [matches] = await reader.db
    .select({ count: sql<number>`count(*)`.mapWith(Number) })
    .from(t)
    .where(where);
  return { rows, total: matches?.count ?? 0, limit, offset };
}
