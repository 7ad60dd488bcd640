// A row that is looked for by its ID is looked for in one partition, whether the statement is prepared or not, and before
// anything has been measured.
import { expect, test } from "bun:test";
import { columns } from "../../../db/columns.ts";
import { defineSchema } from "../../../db/schema.ts";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { missingPostgres, startPostgres } from "../../../test/support/stores/postgres.ts";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { createPartitions } from "../../storage/postgres/partitions.ts";
import { BEGIN_WRITE, beginRead, postgresClient, postgresQueries } from "../../storage/postgres/pool.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import { findReceipt } from "../receipts/store.ts";
import { prepareTables } from "../retention.ts";
import { endCommand } from "./commands/end.ts";
import { capturedBodies, findInvocation } from "./history.ts";
import { moveSettlement } from "./service.ts";

const NOW = Date.UTC(2026, 5, 1, 12, 30);
const { row } = accepted(NOW);
const KEY = { tenant: row.tenant, id: row.id };

type Statement = readonly [text: string, values: readonly unknown[]];

async function asked(work: (tx: Tx) => Promise<unknown>): Promise<Statement[]> {
  const statements: Statement[] = [];
  const db = postgresQueries(async (text, values) => {
    statements.push([text, values]);
    return [];
  });
  await work({ db, tables: defineSchema(columns.postgres), count() {} } as unknown as Tx).catch(() => {});
  return statements;
}

const READS: ((reader: Reader) => Promise<unknown>)[] = [
  (reader) => findInvocation(reader, KEY.tenant, KEY.id),
  (reader) => capturedBodies(reader, { ...row, completed_at: 1 }),
  (reader) => findReceipt(reader, KEY.tenant, KEY.id),
];

function commandStatements(): Statement[] {
  const end = {
    key: KEY,
    from: "running",
    token: "t",
    ending: SUCCESS,
    at: NOW,
    request_id: null,
    detail: null,
  } as const;
  const all = endCommand.postgres.afterwards?.([end], [{ ...KEY, is_dropped: true }]) ?? [];
  expect(all).toHaveLength(1);
  return all.map(({ text, values }) => [text, values]);
}

const literal = (value: unknown) =>
  value instanceof Uint8Array ? `'\\x${Buffer.from(value).toString("hex")}'` : `'${value}'`;
const PARTITION = /Scan .*on (ended_invocations|invocation_bodies|body_parts|receipts)_\d+/;

for (const version of [18, 15] as const) {
  const missing = missingPostgres(version);
  const name = `what is known by its ID is looked for in one partition, on Postgres ${version}`;
  test.skipIf(missing !== null)(
    `${name}${missing === null ? "" : `: not tried, since ${missing}`}`,
    async () => {
      const place = await postgresPlace(await (await startPostgres(version)).freshDatabase());
      await (await place.open()).close();
      const periods = createPartitions({ databaseUrl: place.url, clock: { now: () => NOW }, log: silentLog });
      await prepareTables(periods, { body_days: 1, history_days: 1 });
      await using client = postgresClient(place.url);
      const expectOne = async (begin: string, statements: readonly Statement[]) => {
        await client.unsafe(begin);
        for (const [text, values] of statements) {
          await client.unsafe(`prepare asked as ${text}`);
          // Postgres settles on a plan after five runs.
          for (let run = 0; run < 7; run++) {
            const rows = await client.unsafe(`explain (costs off) execute asked (${values.map(literal)})`).values();
            const lines: string[] = rows.flat().map(String);
            const scans = lines.filter((line) => PARTITION.test(line));
            expect([text, lines, scans.length]).toEqual([text, lines, 1]);
            expect(lines.join("\n")).not.toMatch(/Seq Scan on (ended|invocation_b|body_p|rec)/);
          }
          await client.unsafe("deallocate asked");
        }
        await client.unsafe("rollback");
      };
      for (const read of READS) {
        const statements = await asked(read);
        expect(statements).toHaveLength(1);
        for (const isPrepared of [true, false]) await expectOne(beginRead(isPrepared), statements);
      }
      const settled = await asked((tx) =>
        moveSettlement(tx, "endedInvocations", KEY, "refuse", { settlement: "{}", updated_at: NOW }),
      );
      await expectOne(BEGIN_WRITE, [...settled, ...commandStatements()]);
    },
    60_000,
  );
}
