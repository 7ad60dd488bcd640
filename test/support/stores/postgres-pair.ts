// A primary Postgres and a standby that follows it by streaming, for tests of a failover: version 18 from npm's binaries.
// The standby begins as a copy of the primary's files from before its first start, for which no pg_basebackup is needed.
// Clients reach whichever is the primary through a relay, as through an operator's proxy or virtual address.

import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { SQL } from "bun";
import { freePorts } from "../free-ports.ts";
import { type Relay, startRelay } from "../http/relay.ts";
import { until } from "../until.ts";
import { FORGETFUL, initialise, launch, PASSWORD, programsFor, type ServerPlace, USER } from "./postgres.ts";
import { handOver, openDirectory, run, type Served } from "./server.ts";

const STANDBY = "standby";

export interface PostgresPair extends AsyncDisposable {
  /** What all clients go through. It leads to the first primary. */
  readonly endpoint: Relay;
  /** Creates an empty database and gives its DATABASE_URL through the endpoint. */
  freshDatabase(): Promise<string>;
  /** Resolves when the standby has all that is committed now. */
  caughtUp(): Promise<void>;
  /**
   * From now on commits wait for the standby, which does not get them (`lost`), or gets them when it is promoted (`landed`).
   * Returns when so many wait. Where the standby is asynchronous none waits, and all are lost.
   */
  holdCommits(fate: "lost" | "landed", count: number): Promise<void>;
  /** Kills every process of the primary at once (SIGKILL); the endpoint still leads there. */
  killPrimary(): Promise<void>;
  /** Makes the standby the primary, and returns when it takes writes. Nobody is led there yet. */
  promote(): Promise<void>;
  /** From now on new connections are led to what was the standby. */
  moveEndpoint(): void;
  /** Kill, promote, move, and all connections to the old primary are cut. */
  failOver(): Promise<void>;
  /** The first primary takes no more writes, as one that an operator has made a standby; its connections stay. */
  makePrimaryReadOnly(): Promise<void>;
  /** Asks the server which is the primary now. */
  query(database: string, statement: string): Promise<Readonly<Record<string, unknown>>[]>;
}

const START_ATTEMPTS = 3;

/** A port that was free has been taken since. */
class NotStarted extends Error {}

/** @param isSynchronous whether a commit is acknowledged only when the standby has it on disk */
export async function startPostgresPair(isSynchronous = true): Promise<PostgresPair> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await startBoth(isSynchronous);
    } catch (error) {
      if (!(error instanceof NotStarted) || attempt === START_ATTEMPTS) throw error;
    }
  }
}

async function startBoth(isSynchronous: boolean): Promise<PostgresPair> {
  await using stack = new AsyncDisposableStack();
  const keep = (served: Served | null): Served => {
    if (served === null) throw new NotStarted("Postgres did not start");
    stack.defer(served.end);
    return served;
  };
  const [primary, standby] = await makePlaces();
  for (const { dir } of [primary, standby]) stack.defer(() => rmSync(dir, { recursive: true, force: true }));
  const names = isSynchronous ? STANDBY : "";
  const settings = { ...FORGETFUL, synchronous_commit: "on", wal_keep_size: "256MB" };
  keep(await launch(primary, { ...settings, synchronous_standby_names: names }));
  keep(await launch(standby, settings, true));
  const endpoint = startRelay(primary.port);
  stack.defer(() => endpoint.stop());
  let current = primary;
  const at = (place: ServerPlace, database: string) => urlOf(place.port, database);
  const queryAt = async (place: ServerPlace, database: string, statement: string) => {
    await using client = new SQL(at(place, database), { max: 1, database });
    return (await client.unsafe(statement)) as Readonly<Record<string, unknown>>[];
  };
  await until(async () => {
    const [row] = await queryAt(
      primary,
      "postgres",
      "select count(*)::int as n from pg_stat_replication where state = 'streaming'",
    );
    return row?.["n"] === 1;
  });

  const killPrimary = async () => killAll(primary);
  const receivers = async () =>
    (await queryAt(standby, "postgres", "select pid from pg_stat_wal_receiver")).map(({ pid }) => Number(pid));
  let held: number[] = [];
  const holdCommits = async (fate: "lost" | "landed", count: number) => {
    const senders = "select pid from pg_stat_activity where backend_type = 'walsender'";
    held = fate === "landed" ? await receivers() : [];
    const stopped =
      fate === "landed" ? held : (await queryAt(primary, "postgres", senders)).map(({ pid }) => Number(pid));
    for (const pid of stopped) process.kill(pid, "SIGSTOP");
    const waiting = "select count(*)::int as n from pg_stat_activity where wait_event = 'SyncRep'";
    await until(async () => Number((await queryAt(primary, "postgres", waiting))[0]?.["n"]) >= count);
  };
  const caughtUp = async () => {
    const [now] = await queryAt(primary, "postgres", "select pg_current_wal_flush_lsn()::text as lsn");
    const behind = `select pg_last_wal_replay_lsn() >= '${now?.["lsn"]}'::pg_lsn as is_there`;
    await until(async () => (await queryAt(standby, "postgres", behind))[0]?.["is_there"] === true);
  };
  const promote = async () => {
    for (const pid of held) process.kill(pid, "SIGCONT");
    await queryAt(standby, "postgres", "select pg_promote(true, 60)");
    current = standby;
  };
  const moveEndpoint = () => endpoint.leadTo(standby.port);
  let databases = 0;
  const owned = stack.move();
  return {
    endpoint,
    async freshDatabase() {
      const name = `test_${++databases}`;
      await queryAt(current, "postgres", `create database ${name}`);
      return urlOf(endpoint.port, name);
    },
    caughtUp,
    holdCommits,
    killPrimary,
    promote,
    moveEndpoint,
    async failOver() {
      await killPrimary();
      await promote();
      moveEndpoint();
      endpoint.cut();
    },
    async makePrimaryReadOnly() {
      await queryAt(primary, "postgres", "alter system set default_transaction_read_only = on");
      await queryAt(primary, "postgres", "select pg_reload_conf()");
    },
    query: (database, statement) => queryAt(current, database, statement),
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

const urlOf = (port: number, database: string) => `postgres://${USER}:${PASSWORD}@127.0.0.1:${port}/${database}`;

/** Two directories with the same empty cluster, of which the second follows the first. */
async function makePlaces(): Promise<[ServerPlace, ServerPlace]> {
  const [dir, copy] = [openDirectory(), openDirectory()];
  const native = programsFor(18, dir);
  await initialise(dir, native);
  run(["cp", "-a", join(dir, "data"), copy]);
  // Only now: the longer ago it was free, the sooner somebody else has it.
  const [port, standbyPort] = freePorts(2) as [number, number];
  writeFileSync(join(copy, "data", "standby.signal"), "");
  const follow = `user=${USER} password=${PASSWORD} host=127.0.0.1 port=${port} application_name=${STANDBY}`;
  writeFileSync(join(copy, "data", "postgresql.auto.conf"), `primary_conninfo = '${follow}'\n`);
  handOver(copy);
  return [
    { dir, native, port },
    { dir: copy, native, port: standbyPort },
  ];
}

/** The first process first, or else it would start others. */
function killAll({ dir }: ServerPlace): void {
  const [first] = readFileSync(join(dir, "data", "postmaster.pid"), "utf8").split("\n");
  const others = readFileSync(`/proc/${first}/task/${first}/children`, "utf8").trim().split(" ");
  for (const pid of [first, ...others]) {
    try {
      process.kill(Number(pid), "SIGKILL");
    } catch {
      // It has ended since.
    }
  }
}
