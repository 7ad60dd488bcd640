// The floor that durable accepts are measured against: a bare Bun.serve that reads the body, stores one row in a
// group commit (`synchronous=FULL`) and answers 202. Arguments: a directory for its database. Prints its port.
import { Database } from "bun:sqlite";
import { join } from "node:path";

const db = new Database(join(Bun.argv[2] ?? ".", "floor.db"));
db.run("pragma journal_mode = wal");
db.run("pragma synchronous = full");
db.run("create table calls (id text primary key, body blob not null) without rowid");
const insert = db.query("insert into calls values (?, ?)");

let waiting: (() => void)[] = [];
let scheduled = false;

function commit(): void {
  const group = waiting;
  waiting = [];
  scheduled = false;
  db.run("commit");
  for (const done of group) done();
}

function store(id: string, body: Uint8Array): Promise<void> {
  if (!scheduled) {
    scheduled = true;
    db.run("begin immediate");
    setImmediate(commit);
  }
  insert.run(id, body);
  return new Promise((resolve) => waiting.push(resolve));
}

const server = Bun.serve({
  port: 0,
  hostname: "127.0.0.1",
  async fetch(request) {
    const id = Bun.randomUUIDv7();
    await store(id, await request.bytes());
    return Response.json({ invocation_id: id }, { status: 202 });
  },
});
process.stdout.write(`${server.port}\n`);
