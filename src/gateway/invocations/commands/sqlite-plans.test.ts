// How SQLite finds the rows of commands: along an index that leads to them, however many calls are open. The statistics that
// come with the schema decide that, so it holds for an empty database and for a large one alike.
import { Database } from "bun:sqlite";
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { sqlitePlace } from "../../../../test/support/stores/stores.ts";
import { agentLookUp } from "../../agents/store.ts";
import { storePartCommand } from "../bodies.ts";
import { acceptCommand, acceptInPartsCommand, acceptPlainCommand } from "./accept.ts";
import { endCommand } from "./end.ts";
import { takeCommand, waitingAgents } from "./queue.ts";

const place = sqlitePlace();
await (await place.open()).close();
const database = new Database(join(place.dir, "tollgate.db"));
afterAll(() => {
  database.close();
  place.remove();
});

function plansOf(statement: string): string[] {
  const rows = database.query<{ detail: string }, []>(`explain query plan ${statement}`).all();
  return rows.map(({ detail }) => detail);
}

test.each([
  acceptCommand,
  acceptPlainCommand,
  acceptInPartsCommand,
  agentLookUp,
  endCommand,
  storePartCommand,
  takeCommand,
  waitingAgents,
])("$name passes no rows of others on its way, and sorts none", ({ sqlite }) => {
  const statements: string[] = [];
  sqlite((text) => {
    statements.push(text);
    return { run: () => 0, get: () => null };
  });
  // What a row of a temporary list, such as the agents seen so far, is scanned for.
  const lists = /^SCAN (CONSTANT ROW|seen|\(subquery-\d+\))/;
  const costly = statements.flatMap(plansOf).filter((step) => /SCAN|ANY\(|TEMP B-TREE/.test(step) && !lists.test(step));
  expect(statements.length).toBeGreaterThan(0);
  expect(costly).toEqual([]);
});
