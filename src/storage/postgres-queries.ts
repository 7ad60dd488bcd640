// How queries that are written once, with Drizzle, run on Postgres: its builders over whatever runs a statement.
import { PgDatabase, PgDialect, type PreparedQueryConfig } from "drizzle-orm/pg-core";
import { PgRemoteSession, type RemoteCallback } from "drizzle-orm/pg-proxy";
import { columns } from "../../db/columns.ts";
import { defineSchema } from "../../db/schema.ts";
import { clientError } from "./failures.ts";
import type { Queries, Reader } from "./store.ts";

export const postgresTables = defineSchema(columns.postgres);

/** Runs one statement, its values at $1, $2 and so on. */
export type RunQuery = (query: string, values: unknown[], rows: "arrays" | "objects") => Promise<unknown[]>;

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
