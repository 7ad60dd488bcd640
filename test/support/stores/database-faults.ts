// What happens to a gateway's database from outside: another process that holds its lock, writes that it refuses,
// commits that it tells of late, and rows as an old clock would have left them. It works on the gateway's own
// database while the gateway runs, or while it is down.
import { Database } from "bun:sqlite";
import { join } from "node:path";
import { SQL } from "bun";

/** The database of a gateway: that of this URL, or the one in its data directory. */
export interface Target {
  readonly gateway: { readonly dataDir: string };
  readonly databaseUrl: string | undefined;
}

type Row = Readonly<Record<string, unknown>>;

const BUSY_MS = 5_000;

function openSqlite({ gateway }: Target): Database {
  const database = new Database(join(gateway.dataDir, "tollgate.db"), { readwrite: true });
  database.run(`pragma busy_timeout = ${BUSY_MS}`);
  return database;
}

async function onPostgres(url: string, ...statements: readonly string[]): Promise<Row[]> {
  await using client = new SQL(url, { max: 1 });
  let rows: Row[] = [];
  for (const statement of statements) rows = await client.unsafe(statement);
  return rows;
}

/** Runs one statement, in words that both databases understand. */
export async function runSql(target: Target, statement: string): Promise<Row[]> {
  if (target.databaseUrl !== undefined) return onPostgres(target.databaseUrl, statement);
  const database = openSqlite(target);
  try {
    return database.query<Row, []>(statement).all();
  } finally {
    database.close();
  }
}

export interface Refusal extends AsyncDisposable {
  /**
   * Resolves when so many changes of calls have been refused. On SQLite whoever waits for the lock is refused
   * together with the first, so there it is enough that the caller has seen one refusal.
   */
  met(times: number): Promise<void>;
  end(): Promise<void>;
}

/**
 * From now on no call is stored or changed: on SQLite another process holds the write lock, for which the gateway
 * waits for some seconds; on Postgres the disk is full.
 */
export function refuseWrites(target: Target): Promise<Refusal> {
  return target.databaseUrl === undefined ? Promise.resolve(holdLock(target)) : fillDisk(target.databaseUrl);
}

function holdLock(target: Target): Refusal {
  const database = openSqlite(target);
  database.run("begin immediate");
  let isHeld = true;
  const end = async () => {
    if (!isHeld) return;
    isHeld = false;
    database.run("rollback");
    database.close();
  };
  return { met: async () => {}, end, [Symbol.asyncDispose]: end };
}

/** Of a trigger that stays, for the one that is dropped may be about to run. */
const triggered = (steps: string) =>
  `create or replace function fault() returns trigger language plpgsql as $$ begin ${steps} return null; end $$`;

async function fillDisk(url: string): Promise<Refusal> {
  await onPostgres(
    url,
    // What a sequence has counted is not undone with the transaction that counted it.
    "create sequence if not exists fault_met",
    "select setval('fault_met', 1, false)",
    triggered("perform nextval('fault_met'); raise 'no space left on device' using errcode = '53100';"),
    // For each statement: one that matches no row is refused as well.
    `create or replace trigger fault before insert or update or delete on open_invocations
       for each statement execute function fault()`,
  );
  const end = async () => void (await onPostgres(url, triggered("")));
  return {
    async met(times) {
      await using client = new SQL(url, { max: 1 });
      for (;;) {
        const [row] = await client.unsafe("select last_value, is_called from fault_met");
        if (row?.is_called === true && Number(row.last_value) >= times) return;
        await Bun.sleep(10);
      }
    },
    end,
    [Symbol.asyncDispose]: end,
  };
}

const TIME = /_(at|since)$/;

/** Makes rows as old as if they had been stored so much earlier; what was signed stays as it is. */
export async function age(target: Target, table: string, ms: number, condition: string): Promise<void> {
  const columns =
    target.databaseUrl === undefined
      ? await runSql(target, `select name from pragma_table_info('${table}')`)
      : await runSql(
          target,
          `select column_name as name from information_schema.columns where table_name = '${table}'`,
        );
  const times = columns.map(({ name }) => String(name)).filter((name) => TIME.test(name));
  const changes = times.map((name) => `${name} = ${name} - ${ms}`);
  await runSql(target, `update ${table} set ${changes.join(", ")} where ${condition}`);
}

/**
 * From now on a Postgres database tells of a commit which stores or changes a call of one of these agents so many
 * seconds late. Gives what ends that; commits under way stay late.
 */
export async function delayCommits(
  url: string,
  event: "insert" | "update",
  agentIds: readonly string[],
  seconds: number,
): Promise<() => Promise<void>> {
  const late = (steps: string) =>
    `create or replace function fault_${event}_late() returns trigger language plpgsql
       as $$ begin ${steps} return null; end $$`;
  const ids = agentIds.map((id) => `'${id}'`).join(", ");
  await onPostgres(
    url,
    late(`perform pg_sleep(${seconds});`),
    // Deferred: it runs when the transaction commits, and no time limit of a statement holds for that.
    `create constraint trigger fault_${event}_late after ${event} on open_invocations deferrable initially deferred
       for each row when (new.agent_id in (${ids})) execute function fault_${event}_late()`,
  );
  return async () => void (await onPostgres(url, late("")));
}

/** Keeps everybody from reading or writing a table of a Postgres database until it is told to let go. */
export async function holdTable(url: string, table: string): Promise<() => Promise<void>> {
  const client = new SQL(url, { max: 1 });
  const held = await client.reserve();
  await held.unsafe("begin");
  await held.unsafe(`lock table ${table} in access exclusive mode`);
  return async () => {
    // Named here, or else it is collected as garbage, and its lock goes with it.
    await held.unsafe("rollback");
    await client.close({ timeout: 0 });
  };
}
