// The store of the floors: one table, written in groups. Everything that waits when the last group is on the disk is
// written in one commit on SQLite (`synchronous=FULL`), and by one autocommit statement for each kind on Postgres.
import { Database } from "bun:sqlite";
import { join } from "node:path";
import { SQL } from "bun";
import { openFloorRows } from "./floor-rows.ts";

export interface FloorCall {
  readonly id: string;
  readonly body: Uint8Array;
}

/** Each resolves when it is on the disk. */
export interface FloorStore {
  accept(call: FloorCall): Promise<void>;
  claim(call: FloorCall): Promise<void>;
  /** With the answer as its body. */
  finish(call: FloorCall): Promise<void>;
  close(): Promise<void>;
}

type Kind = "accept" | "claim" | "finish";
type Groups = Readonly<Record<Kind, FloorCall[]>>;
/** Writes what there is, and resolves when it is on the disk. */
type Write = (groups: Groups) => void | Promise<void>;

/**
 * @param place a directory, or the URL of a Postgres database
 * @param work what it is the floor of: calls that are only accepted are stored on Postgres in the gateway's own tables
 */
export async function openFloorStore(place: string, work: "accepts" | "calls"): Promise<FloorStore> {
  if (!place.startsWith("postgres:")) return onSqlite(place);
  if (work === "calls") return onPostgres(place);
  const rows = await openFloorRows(place);
  return grouped(({ accept }) => rows.write(accept), rows.close);
}

function onSqlite(directory: string): FloorStore {
  const db = new Database(join(directory, "floor.db"));
  db.run("pragma journal_mode = wal");
  db.run("pragma synchronous = full");
  db.run(
    "create table calls (id text primary key, status integer not null, body blob not null, answer blob) without rowid",
  );
  const insert = db.query("insert into calls values (?, 0, ?, null)");
  const claim = db.query("update calls set status = 1 where id = ? and status = 0");
  const finish = db.query("update calls set status = 2, answer = ? where id = ? and status = 1");
  return grouped(
    (groups) => {
      db.run("begin immediate");
      for (const { id, body } of groups.accept) insert.run(id, body);
      let changed = 0;
      for (const { id } of groups.claim) changed += claim.run(id).changes;
      for (const { id, body } of groups.finish) changed += finish.run(body, id).changes;
      db.run("commit");
      must(changed, groups.claim.length + groups.finish.length);
    },
    async () => db.close(),
  );
}

const ACCEPT = "insert into calls select id, 0, body, null from unnest($1::text[], $2::bytea[]) as new (id, body)";
const CLAIM = "update calls set status = 1 where id = any($1::text[]) and status = 0";
const FINISH = `update calls set status = 2, answer = done.answer
  from unnest($1::text[], $2::bytea[]) as done (id, answer) where calls.id = done.id and status = 1`;

async function onPostgres(url: string): Promise<FloorStore> {
  // What is written in one turn is of three kinds at most, each on a connection of its own.
  const sql = new SQL(url, { max: 3 });
  await sql.unsafe(
    `create table calls (id text collate "C" primary key, status smallint not null, body bytea not null, answer bytea)`,
  );
  const ids = (calls: FloorCall[]) =>
    sql.array(
      calls.map(({ id }) => id),
      "TEXT",
    );
  const bodies = (calls: FloorCall[]) =>
    sql.array(
      calls.map(({ body }) => Buffer.from(body)),
      "BYTEA",
    );
  return grouped(
    async ({ accept, claim, finish }) => {
      const [, claimed, finished] = await Promise.all([
        accept.length > 0 && sql.unsafe(ACCEPT, [ids(accept), bodies(accept)]),
        claim.length > 0 && sql.unsafe(CLAIM, [ids(claim)]),
        finish.length > 0 && sql.unsafe(FINISH, [ids(finish), bodies(finish)]),
      ]);
      must(claimed === false ? 0 : claimed.count, claim.length);
      must(finished === false ? 0 : finished.count, finish.length);
    },
    () => sql.close(),
  );
}

function grouped(write: Write, close: () => Promise<void>): FloorStore {
  let groups = emptyGroups();
  let waiting = Promise.withResolvers<void>();
  let isBusy = false;

  async function flush(): Promise<void> {
    const [group, { resolve, reject }] = [groups, waiting];
    groups = emptyGroups();
    waiting = Promise.withResolvers();
    try {
      await write(group);
      resolve();
    } catch (error) {
      reject(error);
    }
    isBusy = Object.values(groups).some(({ length }) => length > 0);
    if (isBusy) setImmediate(flush);
  }

  const put = (kind: Kind) => (call: FloorCall) => {
    groups[kind].push(call);
    if (!isBusy) setImmediate(flush);
    isBusy = true;
    return waiting.promise;
  };
  return { accept: put("accept"), claim: put("claim"), finish: put("finish"), close };
}

/** A floor that does less than it is said to would be too high. */
function must(changed: number, expected: number): void {
  if (changed !== expected) throw new Error(`${changed} calls have changed, and not ${expected}`);
}

function emptyGroups(): Groups {
  return { accept: [], claim: [], finish: [] };
}
