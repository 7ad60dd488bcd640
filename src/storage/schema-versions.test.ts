// The list of versions against their files, and what it says of who may run on them.
import { expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { SCHEMA_VERSIONS } from "./migrate.ts";

const DB = join(import.meta.dir, "../../db");

for (const dialect of ["sqlite", "postgres"] as const)
  test(`every migration of ${dialect} is in the list, in its place`, () => {
    const files = readdirSync(join(DB, dialect)).sort();
    expect(files.map((name) => Number.parseInt(name, 10))).toEqual(SCHEMA_VERSIONS.map((_, index) => index + 1));
    const texts = files.map((name) => readFileSync(join(DB, dialect, name), "utf8"));
    expect(SCHEMA_VERSIONS.map((version) => version[dialect])).toEqual(texts);
  });

test("no version lowers the floor, or asks for a program newer than itself", () => {
  const floors = SCHEMA_VERSIONS.map(({ floor }) => floor);
  expect(floors).toEqual(floors.toSorted((a, b) => a - b));
  for (const [index, floor] of floors.entries()) expect(floor).toBeLessThanOrEqual(index + 1);
});
