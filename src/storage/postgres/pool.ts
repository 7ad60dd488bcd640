// Pools of Postgres connections: bounded, long-lived, each connection with one Drizzle handle of its own, so that queries are
// prepared once per connection. A connection that fails or is late is closed and never used again.
import { type ReservedSQL, SQL } from "bun";
import { PgDatabase, PgDialect, type PreparedQueryConfig } from "drizzle-orm/pg-core";
import { PgRemoteSession, type RemoteCallback } from "drizzle-orm/pg-proxy";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { MAX } from "../../kernel/limits.ts";
import { createReservedShare } from "../../kernel/share.ts";
import { clientError, isConnectionLost, isServerReadOnly, unavailable, within } from "../failures.ts";
import type { Queries, Reader } from "../store.ts";

/** After this time, which is a little longer than the client's, the server cancels a statement or an idle transaction. */
const SERVER_MS_MAX = 10_000;

// A connection keeps no state between two transactions, since a pooler may use another server connection for each. So the limits
// are set in every transaction, in one message with `begin`, which costs no more than `begin` alone (measured on loopback). A
// read is such a transaction too: it costs 2.7 times the CPU of a bare statement (172 µs instead of 63 in this process, 165
// instead of 65 in the server), but a bare statement that hangs would have no time limit in the server.
const LIMITS = `set local statement_timeout = ${SERVER_MS_MAX}; set local idle_in_transaction_session_timeout = ${SERVER_MS_MAX}`;
/**
 * Writes find their rows by index, whatever the statistics say: a plan made while a table was empty would go on scanning all of
 * it. Where there is no index the cost that Postgres assumes must not start the JIT, which took 145 ms for a row (measured).
 */
const ALONG_INDEXES =
  "set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off; set local jit = off";
/** Begins a write, at the database's default isolation. */
export const BEGIN_WRITE = `begin; ${LIMITS}; ${ALONG_INDEXES}`;
/**
 * Begins a batch of commands. It is a transaction, although an autocommit statement would save 31 µs of the server and 20 of this
 * process (on idle cores; on busy ones 9 and 7 for each of 20 accepts, 1.5 and 2 for each of 64): limits and planner settings
 * would be session state, which a pooler loses; a server without limits goes on waiting for a lock when nobody waits for the
 * response; and claims and ends that are written together would be two commits. Sending all statements at once saves nothing,
 * since the client does not pipeline after `begin`.
 *
 * Plans are generic, made once per connection: for a few commands Postgres would judge a custom plan cheaper and plan each time,
 * which took 0.37 ms for a claim that runs 0.13 ms (measured).
 */
export const BEGIN_COMMANDS = `${BEGIN_WRITE}; set local plan_cache_mode = force_generic_plan`;
/**
 * Begins an update of shared counters (`createSharedCounters`): read committed, so that a statement that has waited for a row
 * continues with its new value; and the commit does not wait for the disk.
 */
export const BEGIN_COUNTS = `begin isolation level read committed; ${LIMITS}; ${ALONG_INDEXES}; set local synchronous_commit = off`;
/** Begins a batch of look-ups by key. */
export const BEGIN_LOOK_UP = `begin isolation level read committed read only; ${LIMITS}; ${ALONG_INDEXES}; set local enable_sort = off; set local plan_cache_mode = force_generic_plan`;
/**
 * Begins a read. Ordered reads use an index with that order, since a sort would read all rows. Without such an index Postgres
 * sorts all the same, and the cost that it assumes must not start the JIT. Plans are generic, since with values that make a
 * custom plan look cheaper Postgres would plan each run again.
 */
export const BEGIN_READ = `begin isolation level read committed read only; ${LIMITS}; set local enable_sort = off; set local jit = off; set local plan_cache_mode = force_generic_plan`;

export interface DatabaseConnection {
  readonly db: Queries;
  readonly query: RunQuery;
  run(statement: string, values?: unknown[]): Promise<void>;
  /** The first error of a statement since this was last cleared. After an error a transaction can only be rolled back. */
  failed: unknown;
  /** Closes the connection at once; a running statement fails. */
  abandon(): void;
  readonly abandoned: boolean;
}

export type ConnectionPool = ReturnType<ReturnType<typeof createConnectionPools>>;

/**
 * A client with one connection: Bun's own pool would open all connections at once, and hand out lost ones. The database is given
 * as an option too, since PGDATABASE would override the one in the URL.
 * @param parameters startup parameters; a pooler refuses them, by which it can be detected
 */
export function postgresClient(databaseUrl: string, parameters: Readonly<Record<string, number>> = {}): SQL {
  const { url, database, prepare } = parseDatabaseUrl(databaseUrl);
  return new SQL(url, {
    adapter: "postgres",
    ...(database === undefined ? {} : { database }),
    max: 1,
    prepare,
    // Seconds.
    connectionTimeout: 4,
    // Every pooler accepts this parameter, and most refuse others.
    connection: { application_name: "tollgate", ...parameters },
  });
}

/** A connection as its pool sees it. Times are by performance.now(). */
interface PooledConnection extends DatabaseConnection {
  readonly madeAt: number;
  /** When a statement last succeeded. */
  answeredAt: number;
}

function hold(client: SQL, reserved: ReservedSQL): PooledConnection {
  const query: RunQuery = async (text, values, rows) => {
    try {
      const running = reserved.unsafe(text, values);
      const answer = await (rows === "arrays" ? running.values() : running);
      connection.answeredAt = performance.now();
      return answer;
    } catch (error) {
      connection.failed ??= error;
      // A server that has become read-only is no longer the primary, and a new connection may lead to another server.
      if (isConnectionLost(error) || isServerReadOnly(error)) connection.abandon();
      throw error;
    }
  };
  const connection = {
    db: postgresQueries(query),
    query,
    run: async (statement: string, values: unknown[] = []) => void (await query(statement, values, "objects")),
    failed: undefined as unknown,
    madeAt: performance.now(),
    answeredAt: performance.now(),
    abandoned: false,
    abandon() {
      connection.abandoned = true;
      client.close({ timeout: 0 }).catch(() => {});
    },
  };
  return connection;
}

/** Stands for the process itself. No tenant has this name. */
const OWN = "";

/** At most `max` permits at a time. The process's own work gets the next free one; tenants share the others and take turns. */
export function createPermits(max: number) {
  const shares = createReservedShare(max, Math.ceil);
  /** The waiting tasks by tenant. The first tenant has the next turn. */
  const waiting = new Map<string, Set<() => void>>();

  const takeNow = (tenant: string) => shares.take(tenant, tenant === OWN);

  function stopWaiting(tenant: string, grant: () => void): void {
    const queue = waiting.get(tenant);
    queue?.delete(grant);
    if (queue?.size === 0) waiting.delete(tenant);
  }

  /** Gives a free permit to the next tenant. Tenants at their limit are skipped; they are few, since each holds a permit. */
  function serve(): void {
    const tenants = waiting.has(OWN) ? [OWN] : waiting.keys();
    for (const tenant of tenants) {
      const [grant] = waiting.get(tenant) ?? [];
      if (grant === undefined || !takeNow(tenant)) continue;
      const queue = waiting.get(tenant);
      waiting.delete(tenant);
      if (queue !== undefined) waiting.set(tenant, queue);
      stopWaiting(tenant, grant);
      grant();
      return;
    }
  }

  return {
    /** @throws Fault `unavailable` when no permit is free in time, or too many tasks of the tenant wait */
    async take(until: number, tenant: string = OWN): Promise<void> {
      const queue = waiting.get(tenant) ?? new Set<() => void>();
      if (queue.size === 0 && takeNow(tenant)) return;
      if (queue.size >= MAX.storeWaiting) throw unavailable(new Error("too many tasks wait for a connection"));
      const turn = Promise.withResolvers<void>();
      waiting.set(tenant, queue.add(turn.resolve));
      await within(until - performance.now(), turn.promise, () => stopWaiting(tenant, turn.resolve));
    },
    give(tenant: string = OWN): void {
      shares.giveBack(tenant);
      serve();
    },
  };
}

/** A server that has answered on any older connection within this time counts as alive. */
const ALIVE_MS = 2_000;

const IS_READ_ONLY = "select current_setting('transaction_read_only') = 'on' as is_read_only";

/**
 * Opens a connection to a server that takes writes. Readers need one too: just after a failover, a connection to the old primary
 * would go on reading old data, and no error would ever reveal it.
 */
async function connect(databaseUrl: string, until: number): Promise<PooledConnection> {
  const client = postgresClient(databaseUrl);
  try {
    const reserved = await within(until - performance.now(), client.reserve());
    const [server] = await within(until - performance.now(), reserved.unsafe(IS_READ_ONLY));
    if (server?.is_read_only === true) throw unavailable(new Error("the server is read-only"));
    return hold(client, reserved);
  } catch (error) {
    client.close({ timeout: 0 }).catch(() => {});
    // Bun has retried for a while already. A connection that was lost while idle is retried by the caller instead.
    throw isConnectionLost(error) ? unavailable(error) : error;
  }
}

/**
 * Opens pools of connections to one server. When a connection is lost, finds the server read-only, or is late while no other
 * connection of its time gets responses, the other connections probably lead to the same failed server: after a failover they
 * would hang, or read old data. So they are all abandoned, in all pools.
 */
export function createConnectionPools(databaseUrl: string) {
  const idleOfAll: PooledConnection[][] = [];
  /** The connections that may be used again. */
  const good = new Set<PooledConnection>();

  function forgetAll(): void {
    good.clear();
    for (const idle of idleOfAll) for (const connection of idle.splice(0)) connection.abandon();
  }

  /** Whether other connections show that the server is alive, which has not answered on one connection since `begunAt`. */
  function livesSince(begunAt: number): boolean {
    const since = performance.now() - ALIVE_MS;
    return [...good].some(({ madeAt, answeredAt }) => madeAt < begunAt && answeredAt > since);
  }

  return (max: number) => {
    const permits = createPermits(max);
    const idle: PooledConnection[] = [];
    idleOfAll.push(idle);
    let closed = false;

    /** @param isSlow whether the task was late while the server answered on other connections, so that the task is to blame */
    function giveBack(connection: PooledConnection, isSlow: boolean): void {
      const wasGood = good.has(connection);
      if (!connection.abandoned && wasGood && !closed) {
        idle.push(connection);
        return;
      }
      connection.abandon();
      good.delete(connection);
      if (wasGood && !isSlow && !closed) forgetAll();
    }

    return {
      /**
       * Runs `task` with a connection of its own. On one that was lost while idle the first statement fails; a retry gets a new one.
       * @param until deadline by performance.now(), at which the connection is closed
       * @param tenant the tenant whose turn it takes; null for the process's own work, which comes first
       * @throws Fault `unavailable` when no connection is available in time
       */
      async use<T>(
        until: number,
        task: (connection: DatabaseConnection) => Promise<T>,
        tenant: string | null = null,
      ): Promise<T> {
        if (closed) throw unavailable(new Error("the store is closed"));
        const name = tenant === null ? undefined : `tenant ${tenant}`;
        await permits.take(until, name);
        try {
          const connection = idle.pop() ?? (await connect(databaseUrl, until));
          good.add(connection);
          const begunAt = performance.now();
          let isSlow = false;
          const onLate = () => {
            // What had little time itself says nothing of the server.
            isSlow = until - begunAt < ALIVE_MS || livesSince(begunAt);
            connection.abandon();
          };
          try {
            return await within(until - begunAt, task(connection), onLate);
          } finally {
            giveBack(connection, isSlow);
          }
        } finally {
          permits.give(name);
        }
      },
      /** Refuses further tasks, and waits for running ones until `until`. */
      async close(until: number): Promise<void> {
        closed = true;
        const all = Array.from({ length: max }, () => permits.take(until));
        await Promise.allSettled(all);
        for (const connection of idle.splice(0)) connection.abandon();
      },
    };
  };
}

/** DATABASE_URL, split into the client's URL and our own options. */
interface DatabaseUrl {
  /** Without our own parameters: the client passes unknown ones to the server, which would refuse them. */
  readonly url: string;
  /** Undefined when the URL names none, in which case it is named as the user. */
  readonly database: string | undefined;
  /**
   * Whether statements are prepared once per connection; `?prepare=false` switches that off. A transaction pooler that does not
   * track prepared statements (PgBouncer before 1.21) would find one missing, or existing already.
   */
  readonly prepare: boolean;
}

export function parseDatabaseUrl(databaseUrl: string): DatabaseUrl {
  const url = new URL(databaseUrl);
  const prepare = url.searchParams.get("prepare") !== "false";
  url.searchParams.delete("prepare");
  const database = decodeURIComponent(url.pathname.slice(1));
  return { url: url.href, database: database === "" ? undefined : database, prepare };
}

export const postgresTables = defineSchema(columns.postgres);

/** Runs one statement with the values of $1, $2 and so on. */
type RunQuery = (query: string, values: unknown[], rows: "arrays" | "objects") => Promise<unknown[]>;

type NoSchema = Record<string, never>;
type PrepareArguments = Parameters<PgRemoteSession<NoSchema, NoSchema>["prepareQuery"]>;

/** Drizzle's session over a callback. It unwraps the errors of the client, since Drizzle's wrapper shows all values. */
class PlainErrorSession extends PgRemoteSession<NoSchema, NoSchema> {
  override prepareQuery<T extends PreparedQueryConfig>(...parameters: PrepareArguments) {
    const query = super.prepareQuery<T>(...parameters);
    const execute = query.execute.bind(query);
    query.execute = async (values) => {
      try {
        return await execute(values);
      } catch (thrown) {
        throw clientError(thrown);
      }
    };
    return query;
  }
}

/** Drizzle's query builders for Postgres in the types of SQLite, so that a query written once runs on both databases. */
export function postgresQueries(run: RunQuery): Queries {
  const callback: RemoteCallback = async (query, values, method) => ({
    rows: await run(query, values, method === "all" ? "arrays" : "objects"),
  });
  const dialect = new PgDialect();
  return new PgDatabase(dialect, new PlainErrorSession(callback, dialect, undefined), undefined) as unknown as Queries;
}

export const postgresReader = (run: RunQuery): Reader => ({ db: postgresQueries(run), tables: postgresTables });
