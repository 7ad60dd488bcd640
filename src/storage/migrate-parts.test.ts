// Parts of bodies of the version that kept them in the tree of their key, as they are after the migration from it.
import { afterEach, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { olderPlaces } from "../../test/support/stores/older-places.ts";
import { storedRequest } from "../gateway/invocations/stored-bodies.ts";
import { partsOf } from "../wire/body.ts";

const DIR = join(import.meta.dir, "../../db/sqlite");
const FILES = readdirSync(DIR)
  .sort()
  .filter((name) => Number(name.slice(0, 4)) <= 14);
const PART = 524_288;
const LAST = 1000;

const undo: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const each of undo.splice(0)) await each();
});

test("on sqlite parts move to a table in which none is read to find another", async () => {
  const place = await olderPlaces.sqlite();
  undo.push(async () => place.remove());
  const part = (id: number, n: number, bytes: number) =>
    `insert into body_parts (invocation_id, tenant, kind, n, bytes)
     values ('inv_${id}', 'acme', 'request', ${n}, cast(printf('%.${bytes}c', '${id}') as blob))`;
  const ids = [3, 1, 2];
  for (const statement of [
    "create table schema_migrations (version integer not null primary key, applied_at bigint not null)",
    ...FILES.map((name) => readFileSync(join(DIR, name), "utf8")),
    ...FILES.map((_, index) => `insert into schema_migrations values (${index + 1}, 1)`),
    ...ids.flatMap((id) => [part(id, 1, LAST), part(id, 0, PART)]),
  ]) {
    await place.execute(statement);
  }
  const store = await place.open();
  undo.unshift(() => store.close());
  for (const id of ids) {
    const body = await storedRequest(store.read, { tenant: "acme", id: `inv_${id}` }, PART + LAST);
    const shown = partsOf(body ?? new Uint8Array()).map((bytes) => Buffer.from(bytes).toString("latin1"));
    expect(shown.map((text) => [text.length, text.replaceAll(`${id}`, "")])).toEqual([
      [PART, ""],
      [LAST, ""],
    ]);
  }
  // What has row IDs is found by an index that holds no bytes of it.
  expect(await place.rows("select count(rowid) as parts from body_parts")).toEqual([{ parts: 2 * ids.length }]);
});
