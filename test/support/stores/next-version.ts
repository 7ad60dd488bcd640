// A schema version that only tests know, after the newest one: what a next version of the program expands. A program of the
// present version may run on its schema.
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { newestVersion, SCHEMA_VERSIONS, type SchemaVersion } from "../../../src/storage/migrate.ts";
import { temporaryRoot } from "../gateway/process.ts";

const MAIN = join(import.meta.dir, "../../../src/main.ts");

export const NEXT_VERSION = newestVersion() + 1;

const STATEMENTS = `
  alter table processes add column color text;
  create table colors (agent text not null primary key);
  insert into colors (agent) select id from agents;
`;
const NEXT: SchemaVersion = { sqlite: STATEMENTS, postgres: STATEMENTS, floor: newestVersion() };

/** Until it is disposed of, this process is a program of the next version. */
export function becomeNextVersion(): Disposable {
  const versions = SCHEMA_VERSIONS as SchemaVersion[];
  versions.push(NEXT);
  return { [Symbol.dispose]: () => void versions.pop() };
}

/** What runs a program of the next version in the place of the compiled binary. */
export function nextVersion(): readonly string[] {
  const script = join(mkdtempSync(join(temporaryRoot(), "next-")), "next.ts");
  writeFileSync(script, `(await import(${JSON.stringify(import.meta.path)})).becomeNextVersion();\n`);
  return [process.execPath, `--preload=${script}`, MAIN];
}
