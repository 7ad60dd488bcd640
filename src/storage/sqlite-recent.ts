// Calls that ended just now, on SQLite. The history is ordered by tenant, in five trees or more and one for the bodies, so
// when many tenants' calls end together, each end writes pages that no other needs: measured with 1,000 tenants, 43 KB and
// 104 µs for a whole call, against 3.3 KB and 34 µs with one. So the ends of many tenants are written one after another
// into a table of their own, and moved into the history in the order of its trees when there are many of each tenant.
// Readers see both: by ID in a view, and in pages through what is kept in memory of the recent ones. A call in here never
// changes, so those with a payment go into the history at once.
import type { Database } from "bun:sqlite";
import { asBuffer } from "../core/bytes.ts";
import type { RecentBodies, RecentCall, RecentCalls } from "./recent.ts";

/** So many of each tenant are worth moving: their rows then fill a page of most trees. */
const OF_EACH_TENANT = 16;
/** They are moved when there are so many, whatever their tenants: 350 bytes of memory each, and 1 KB of the disk. */
const [CALLS_LEAST, CALLS_MOST] = [1_024, 16_384];
/** What one group moves, and what it forgets when all have been moved: 2 ms. */
const [MOVED_AT_ONCE, FORGOTTEN_AT_ONCE] = [200, 1_000];
/** Of so many ends the tenants are counted. */
const SAMPLE = 64;
/** With more ends of each tenant than that, they go into the history at once: it is written in groups anyway. */
const ENDS_OF_ONE = 4;

const MOVED =
  "tenant, id, agent_id, caller, mode, status, error_class, model, mcp_method, mcp_tool, upstream_status, latency_ms, " +
  "ttft_ms, req_size, resp_size, req_sha256, resp_sha256, response_content_type, response_truncated, body_captured, " +
  "emit_receipt, accepted_by, claim, updated_at, completed_at";
const GIVEN = "from json_each(?) as given cross join recent_invocations as r on r.n = given.value";

function statements(writer: Database) {
  const selected = MOVED.replaceAll(/\w+/g, "r.$&");
  return {
    moveCalls: writer.prepare<never, [string]>(`insert into ended_invocations (${MOVED}) select ${selected} ${GIVEN}`),
    moveBodies: writer.prepare<never, [string]>(
      `insert into invocation_bodies (tenant, invocation_id, request, response)
       select r.tenant, r.id, r.request, r.response ${GIVEN} where r.body_captured`,
    ),
    mark: writer.prepare<never, [number, string, string]>("update recent_moved set n = ?, tenant = ?, id = ?"),
    forget: writer.prepare<never, [number, number]>(
      "delete from recent_invocations where n in (select n from recent_invocations where n <= ? order by n limit ?)",
    ),
    all: writer.prepare<RecentCall & { isMoved: number }, []>(
      `select r.n, r.tenant, r.id, r.agent_id, r.mode, r.status, r.error_class, r.model,
        r.n <= m.n and (r.tenant, r.id) <= (m.tenant, m.id) as isMoved
       from recent_invocations r, recent_moved m`,
    ),
    moved: writer.prepare<{ n: number }, []>("select n from recent_moved"),
    // Another number after each commit of another connection.
    others: writer.prepare<{ data_version: number }, []>("pragma data_version"),
  };
}

/** The first calls, up to number n, on their way into the history. When all are there, they are forgotten here. */
interface Move {
  readonly n: number;
  readonly calls: readonly RecentCall[];
  readonly done: number;
}

/** By code point, as the database compares texts. Comparing strings would put what stands in two units below U+E000. */
function inTextOrder(a: string, b: string): number {
  let same = 0;
  while (same < a.length && a.charCodeAt(same) === b.charCodeAt(same)) same += 1;
  return (a.codePointAt(same) ?? -1) - (b.codePointAt(same) ?? -1);
}

interface Connections {
  /** Its transactions call `begin` first, and `write` last of all. */
  readonly writer: Database;
  readonly reader: Database;
}

export interface RecentSizes {
  readonly ofEachTenant?: number;
  readonly callsLeast?: number;
  readonly movedAtOnce?: number;
  readonly sampled?: number;
}

/** The calls that are here, which of them are on their way, and the highest number, which may be of one that was moved. */
function stands(sql: ReturnType<typeof statements>) {
  const n = sql.moved.get()?.n ?? 0;
  const rows = sql.all.all();
  const calls = rows.flatMap(({ isMoved, ...call }) => (isMoved ? [] : [call]));
  // The last that was moved may be forgotten already, and what has a lower number is taken for moved.
  return { n, calls, numbers: rows.reduce((most, row) => Math.max(most, row.n), n) };
}

export type SqliteRecent = ReturnType<typeof createSqliteRecent>;

export function createSqliteRecent(
  { writer, reader }: Connections,
  {
    ofEachTenant = OF_EACH_TENANT,
    callsLeast = CALLS_LEAST,
    movedAtOnce = MOVED_AT_ONCE,
    sampled = SAMPLE,
  }: RecentSizes = {},
) {
  const sql = statements(writer);
  const tenants = createByTenant();
  const isSpread = createSample(sampled);
  /** The last number that was given, and the last one that is committed. */
  let [last, stored] = [0, 0];
  let version = 0;
  let move: Move | null = null;
  let others = Number.NaN;
  /** All up to this number are to be moved, however few they are. */
  let asked = 0;
  readOthers();

  function readOthers(): void {
    const now = sql.others.get()?.data_version ?? 0;
    if (now === others) return;
    others = now;
    version += 1;
    tenants.clear();
    const { n, calls, numbers } = stands(sql);
    for (const call of calls) tenants.add(call);
    const moving = tenants.all().filter((call) => call.n <= n);
    move = n === 0 ? null : { n, calls: moving, done: 0 };
    last = numbers;
    stored = last;
    asked = Math.min(asked, stored);
  }

  function begun(): Move | null {
    if (move !== null) return move;
    const enough = Math.min(Math.max(tenants.count() * ofEachTenant, callsLeast), CALLS_MOST);
    if (tenants.total() < enough && (asked === 0 || tenants.total() === 0)) return null;
    // The calls that end in this very transaction are not among them.
    return { n: stored, calls: tenants.all(), done: 0 };
  }

  /** Takes a move one step on, in a transaction. Returns what to do after its commit. */
  function goOn(current: Move, ended: number): () => void {
    const { n, calls, done } = current;
    // Faster than new ones come, however large the groups are.
    if (done === calls.length) return forgetSome(n, Math.max(FORGOTTEN_AT_ONCE, ended * 4));
    const moved = calls.slice(done, done + Math.max(movedAtOnce, ended * 2));
    const numbers = JSON.stringify(moved.map((call) => call.n));
    sql.moveCalls.run(numbers);
    sql.moveBodies.run(numbers);
    const next = { n, calls, done: done + moved.length };
    const end = moved.at(-1);
    sql.mark.run(n, end?.tenant ?? "", end?.id ?? "");
    return () => {
      for (const call of moved) tenants.remove(call);
      version += 1;
      move = next;
    };
  }

  function forgetSome(n: number, limit: number): () => void {
    const isDone = sql.forget.run(n, limit).changes < limit;
    if (isDone) sql.mark.run(0, "", "");
    return () => {
      if (!isDone) return;
      move = null;
      if (n >= asked) asked = 0;
    };
  }

  return {
    version() {
      readOthers();
      return version;
    },
    of: tenants.of,
    rows: rowsIn(reader),
    bodies: bodiesIn(reader),
    begin: readOthers,
    /** The number of the next call that ends; null when it is to go into the history at once. */
    next: (tenant: string): number | null => (isSpread(tenant) ? ++last : null),
    /** As a part of a transaction in which these calls have ended. Call what it returns right after the commit. */
    write(ended: readonly RecentCall[]): () => void {
      const current = begun();
      const moved = current === null ? null : goOn(current, ended.length);
      return () => {
        moved?.();
        for (const call of ended) {
          tenants.add(call);
          stored = Math.max(stored, call.n);
        }
        if (ended.length > 0) version += 1;
      };
    },
    /** From now on each group moves on what is here. Returns whether all of it has been moved. */
    hurry(): () => boolean {
      asked = move === null && tenants.total() === 0 ? 0 : stored;
      return () => asked === 0;
    },
  } satisfies RecentCalls & Record<string, unknown>;
}

const VISIBLE = "from recent_invocations r, recent_moved m where (r.n > m.n or (r.tenant, r.id) > (m.tenant, m.id))";

function rowsIn(reader: Database): RecentCalls["rows"] {
  type Row = ReturnType<RecentCalls["rows"]>[number];
  const flags = ["response_truncated", "body_captured", "emit_receipt"] as const;
  const nothing = ["payment_network", "payment_asset", "payment_amount", "payment_payer", "payment_nonce"];
  const nulls = [...nothing, "settlement_status", "settlement", "owner"].map((column) => `null as ${column}`);
  const select = reader.prepare<Row, [string, string]>(
    `select ${MOVED.replaceAll(/\w+/g, "r.$&")}, ${nulls.join(", ")} ${VISIBLE}
     and r.tenant = ? and r.id in (select value from json_each(?)) order by r.id desc`,
  );
  return (tenant, ids) =>
    select.all(tenant, JSON.stringify(ids)).map((row) => {
      for (const flag of flags) row[flag] = Boolean(row[flag]);
      return row;
    });
}

function bodiesIn(reader: Database): RecentCalls["bodies"] {
  const select = reader.prepare<Record<keyof RecentBodies, Uint8Array | null>, [string, string]>(
    `select request, response ${VISIBLE} and r.id = ? and r.tenant = ?`,
  );
  return (tenant, id) => {
    const row = select.get(id, tenant);
    return row === null ? null : { request: bufferOf(row.request), response: bufferOf(row.response) };
  };
}

const bufferOf = (bytes: Uint8Array | null): Buffer | null => (bytes === null ? null : asBuffer(bytes));

/** The place of the first of them that is not before this ID. Most often that is the end, where new ones come. */
function placeOf(own: readonly RecentCall[], id: string): number {
  let [from, to] = [0, own.length];
  if ((own.at(-1)?.id ?? "") < id) return to;
  while (from < to) {
    const middle = (from + to) >> 1;
    if ((own[middle]?.id ?? "") < id) from = middle + 1;
    else to = middle;
  }
  return from;
}

/**
 * Each tenant's calls in the order of their IDs, in which they come, nearly, and in which they go. Calls that were
 * accepted long ago may end all at once, so no place is looked for by passing all the others.
 */
function createByTenant() {
  const byTenant = new Map<string, RecentCall[]>();
  let total = 0;
  return {
    total: () => total,
    count: () => byTenant.size,
    /** In the order of the database. */
    all: () => [...byTenant].sort(([a], [b]) => inTextOrder(a, b)).flatMap(([, own]) => own),
    of: (tenant: string): readonly RecentCall[] => byTenant.get(tenant) ?? [],
    add(call: RecentCall): void {
      total += 1;
      const own = byTenant.get(call.tenant);
      if (own === undefined) {
        byTenant.set(call.tenant, [call]);
        return;
      }
      own.splice(placeOf(own, call.id), 0, call);
    },
    remove({ tenant, id }: RecentCall): void {
      const own = byTenant.get(tenant) ?? [];
      const place = placeOf(own, id);
      if (own[place]?.id !== id) return;
      total -= 1;
      if (own.length === 1) byTenant.delete(tenant);
      else own.splice(place, 1);
    },
    clear(): void {
      byTenant.clear();
      total = 0;
    },
  };
}

/** Takes the tenant of each end, and says whether those of the ends before it were many. */
function createSample(size: number): (tenant: string) => boolean {
  let tenants: string[] = [];
  let isSpread = false;
  return (tenant) => {
    if (tenants.push(tenant) === size) {
      isSpread = new Set(tenants).size * ENDS_OF_ONE > size;
      tenants = [];
    }
    return isSpread;
  };
}
