// The column types of the schema, for SQLite and for Postgres. schema.ts is written once in these types. For both databases
// TypeScript sees SQLite's types: the Postgres columns are cast to them here and nowhere else.
import { bigint, boolean, customType, doublePrecision, pgTable, text as pgText } from "drizzle-orm/pg-core";
import { blob, integer, real, sqliteTable, text } from "drizzle-orm/sqlite-core";
import { asBuffer } from "../src/core/bytes.ts";

const sqlite = {
  table: sqliteTable,
  text: () => text(),
  /** Milliseconds, sizes and counts: whole numbers below 2^53. */
  whole: () => integer({ mode: "number" }),
  real: () => real(),
  flag: () => integer({ mode: "boolean" }),
  bytes: () => blob({ mode: "buffer" }),
};

export type Columns = typeof sqlite;

const bytea = customType<{ data: Buffer; driverData: Uint8Array }>({
  dataType: () => "bytea",
  fromDriver: (value) => asBuffer(value),
});

const postgres = {
  table: pgTable,
  text: () => pgText(),
  whole: () => bigint({ mode: "number" }),
  real: () => doublePrecision(),
  flag: () => boolean(),
  bytes: () => bytea(),
} as unknown as Columns;

export const columns = { sqlite, postgres };
