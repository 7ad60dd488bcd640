// Postgres connections: a bounded number, each held for long and with one Drizzle handle of its own, so that
// queries are prepared once per connection. A connection that fails or is late is closed, never used again.
import { type ReservedSQL, SQL } from "bun";
import { PgDatabase, PgDialect, type PreparedQueryConfig } from "drizzle-orm/pg-core";
import { PgRemoteSession, type RemoteCallback } from "drizzle-orm/pg-proxy";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { MAX } from "../../kernel/limits.ts";
import { createReservedShare } from "../../kernel/share.ts";
import { clientError, isConnectionLost, isServerReadOnly, unavailable, within } from "../failures.ts";
import type { Queries, Reader } from "../store.ts";

/** The server gives up a statement, or a transaction whose client is gone, a little after the client has. */
const SERVER_MS_MAX = 10_000;

// A connection keeps no state between two transactions, since a pooler may hand out another one with each. So the limits
// are set in every transaction, in one message with its beginning: measured on loopback, that costs no more than the
// beginning alone. A read is such a transaction too. It costs 2.7 times the CPU of a bare statement (172 µs instead of
// 63 in this process, 165 instead of 65 in the server), and without it a read that hangs would have no limit in the server.
const LIMITS = `set local statement_timeout = ${SERVER_MS_MAX}; set local idle_in_transaction_session_timeout = ${SERVER_MS_MAX}`;
/**
 * Writes find their rows along indexes, whatever the statistics say: a plan that was made for a table that was empty a
 * moment ago would read all of it from then on.
 */
const ALONG_INDEXES =
  "set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off";
/** At the isolation that the database has by default. */
export const BEGIN_WRITE = `begin; ${LIMITS}; ${ALONG_INDEXES}`;
/**
 * A batch of commands is a transaction, and not one autocommit statement. That would save 31 µs of the server and 20 of
 * this process (measured on idle cores; 9 and 7 for each of 20 accepts on busy ones, 1.5 and 2 of 64). But its limits and
 * the way it is planned would be state of the session, which a pooler loses; a server without limits goes on waiting for
 * a lock when nobody waits for the answer any more; and claims and ends that are written together would be two commits.
 * To send all of it at once without waiting in between costs as much as one by one: the client does not pipeline `begin`.
 *
 * The statements of commands are planned once on a connection: for few commands Postgres would take a plan for these very
 * ones to be cheaper, and plan each time. Measured: 0.37 ms of a claim that takes 0.13 ms.
 */
export const BEGIN_COMMANDS = `${BEGIN_WRITE}; set local plan_cache_mode = force_generic_plan`;
/**
 * What replicas count together (`createSharedCounters`): at the isolation at which a statement that has waited for a row goes on
 * with what that row is then, and nobody waits for the disk.
 */
export const BEGIN_COUNTS = `begin isolation level read committed; ${LIMITS}; ${ALONG_INDEXES}; set local synchronous_commit = off`;
/** Rows that are looked up by their keys, as many in one statement as wait. */
export const BEGIN_LOOK_UP = `begin isolation level read committed read only; ${LIMITS}; ${ALONG_INDEXES}; set local enable_sort = off; set local plan_cache_mode = force_generic_plan`;
/**
 * Ordered reads go along an index that has the order, from the end that is asked for; a sort would read all rows. Without
 * such an index Postgres sorts all the same, and that cost must not start the JIT. A statement keeps its plan, whatever the
 * values: for what looks cheaper with some of them Postgres would plan each run again.
 */
export const BEGIN_READ = `begin isolation level read committed read only; ${LIMITS}; set local enable_sort = off; set local jit = off; set local plan_cache_mode = force_generic_plan`;

export interface DatabaseConnection {
  readonly db: Queries;
  readonly query: RunQuery;
  run(statement: string, values?: unknown[]): Promise<void>;
  /** The first error of a statement since this was last cleared: after one, a transaction can only be undone. */
  failed: unknown;
  /** Ends the connection at once; what runs on it fails. */
  abandon(): void;
  readonly abandoned: boolean;
}

export type ConnectionPool = ReturnType<ReturnType<typeof createConnectionPools>>;

/**
 * A client of one connection: Bun's own pool would open all at once, and hand out those that are gone.
 * Bun lets PGDATABASE override the URL's database, so that is said again as an option.
 *
 * @param parameters settings that the connection begins with, which a pooler refuses: for finding out whether there is one
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
    // Every pooler passes this one on, and refuses most others.
    connection: { application_name: "tollgate", ...parameters },
  });
}

/** What a pool knows of a connection beside that. Times are by performance.now(). */
interface PooledConnection extends DatabaseConnection {
  readonly madeAt: number;
  /** When a statement last went well. */
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
      // One that has become read-only is no longer the primary, and whatever leads there may lead elsewhere by now.
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

/** The process itself, which no tenant is called. */
const OWN = "";

/**
 * Permits that at most `max` hold at once. The process's own work gets the next one that is free; tenants share the others
 * out, and wait by turns.
 */
export function createPermits(max: number) {
  const shares = createReservedShare(max, Math.ceil);
  /** Who waits, by tenant. The first tenant has the next turn. */
  const waiting = new Map<string, Set<() => void>>();

  const takeNow = (tenant: string) => shares.take(tenant, tenant === OWN);

  function leave(tenant: string, enter: () => void): void {
    const line = waiting.get(tenant);
    line?.delete(enter);
    if (line?.size === 0) waiting.delete(tenant);
  }

  /** Those that may have no more hold one each at least, so few are passed over. */
  function serve(): void {
    const tenants = waiting.has(OWN) ? [OWN] : waiting.keys();
    for (const tenant of tenants) {
      const [enter] = waiting.get(tenant) ?? [];
      if (enter === undefined || !takeNow(tenant)) continue;
      const line = waiting.get(tenant);
      waiting.delete(tenant);
      if (line !== undefined) waiting.set(tenant, line);
      leave(tenant, enter);
      enter();
      return;
    }
  }

  return {
    /** @throws Fault `unavailable` when none is free in time, or too many of the tenant wait */
    async take(until: number, tenant: string = OWN): Promise<void> {
      const line = waiting.get(tenant) ?? new Set<() => void>();
      if (line.size === 0 && takeNow(tenant)) return;
      if (line.size >= MAX.storeWaiting) throw unavailable(new Error("too many wait for a connection"));
      const turn = Promise.withResolvers<void>();
      waiting.set(tenant, line.add(turn.resolve));
      await within(until - performance.now(), turn.promise, () => leave(tenant, turn.resolve));
    },
    give(tenant: string = OWN): void {
      shares.giveBack(tenant);
      serve();
    },
  };
}

const IS_READ_ONLY = "select current_setting('transaction_read_only') = 'on' as is_read_only";

/**
 * Also what only reads needs a server that takes writes: one that is made just before clients are led elsewhere would go on
 * reading what an old primary still has, and nothing would ever tell.
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
    // Bun has tried for a while already, so another attempt is not worth it, unlike after a connection lost while idle.
    throw isConnectionLost(error) ? unavailable(error) : error;
  }
}

/**
 * Opens pools that lead to one server. When a connection is lost, finds a server that is read-only, or is late while no other
 * of its time has had an answer, the others most likely have the same server: after a failover they would hang, or read
 * what the old primary still has. So none of them begins another task, in any of the pools.
 */
export function createConnectionPools(databaseUrl: string) {
  const idleOfAll: PooledConnection[][] = [];
  /** Those that may be used again. */
  const good = new Set<PooledConnection>();

  function forgetAll(): void {
    good.clear();
    for (const idle of idleOfAll) for (const connection of idle.splice(0)) connection.abandon();
  }

  /** Whether another connection shows that a server lives which has not answered on one since `begunAt`. */
  function livesSince(begunAt: number): boolean {
    // A server whose connections have answered within this time is taken to live.
    const since = performance.now() - 2_000;
    return [...good].some(({ madeAt, answeredAt }) => madeAt < begunAt && answeredAt > since);
  }

  return (max: number) => {
    const permits = createPermits(max);
    const idle: PooledConnection[] = [];
    idleOfAll.push(idle);
    let closed = false;

    /** @param isSlow whether it was late while others had answers: then it is the task that takes long */
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
       * Runs `task` with a connection of its own. It may have been lost while it lay idle: then the first statement
       * fails, and the next connection will be a new one.
       *
       * @param until by performance.now(): a task that is late then loses its connection.
       * @param tenant whose turn it takes; null for the process's own work, which comes first
       * @throws Fault `unavailable` when no connection can be had in time.
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
            isSlow = livesSince(begunAt);
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
      /** Refuses further tasks, and waits for those that run as long as `until`. */
      async close(until: number): Promise<void> {
        closed = true;
        const all = Array.from({ length: max }, () => permits.take(until));
        await Promise.allSettled(all);
        for (const connection of idle.splice(0)) connection.abandon();
      },
    };
  };
}

/** The parts of DATABASE_URL that are ours, apart from those of the database client. */
interface DatabaseUrl {
  /** Without what is ours: the client sends a parameter that it does not know to the server, which then refuses. */
  readonly url: string;
  /** Undefined when the URL names none: then it is the user's. */
  readonly database: string | undefined;
  /**
   * Whether statements are prepared once per connection. `?prepare=false` says no: behind a pooler that hands out another
   * connection with each transaction, and does not follow prepared statements (PgBouncer before 1.21), one is missing
   * or already there.
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

/** Runs one statement, its values at $1, $2 and so on. */
type RunQuery = (query: string, values: unknown[], rows: "arrays" | "objects") => Promise<unknown[]>;

type NoSchema = Record<string, never>;
type PrepareArguments = Parameters<PgRemoteSession<NoSchema, NoSchema>["prepareQuery"]>;

/** Drizzle's session over a callback, without the error that Drizzle wraps around the client's, which shows values. */
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

/** The Postgres builders, in the types of the port, so that a query written once runs on both databases. */
export function postgresQueries(run: RunQuery): Queries {
  const callback: RemoteCallback = async (query, values, method) => ({
    rows: await run(query, values, method === "all" ? "arrays" : "objects"),
  });
  const dialect = new PgDialect();
  return new PgDatabase(dialect, new PlainErrorSession(callback, dialect, undefined), undefined) as unknown as Queries;
}

export const postgresReader = (run: RunQuery): Reader => ({ db: postgresQueries(run), tables: postgresTables });
