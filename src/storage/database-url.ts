// The parts of DATABASE_URL that are ours, apart from those of the database client.

export interface DatabaseUrl {
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
