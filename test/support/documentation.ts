// The README and the manual as the tests read them, and the manifest of the package beside them.
import { cpSync, mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { PAGES } from "../../src/gateway/manual/pages.ts";
import { parseReadme } from "./readme.ts";

export const ROOT = join(import.meta.dir, "../..");

export const read = (path: string) => readFileSync(join(ROOT, path), "utf8");
export const MANUAL = "src/gateway/manual";
export const readme = parseReadme(read("README.md"));
export const pages = new Map(PAGES.map(({ name }) => [name, parseReadme(read(`${MANUAL}/${name}.md`))]));
/** By path. */
export const files = new Map([
  ["README.md", readme],
  ...[...pages].map(([name, page]) => [`${MANUAL}/${name}.md`, page] as const),
]);
/** All of them one after the other: what must be said somewhere, and what runs. */
export const manual = parseReadme([...files.values()].map(({ text }) => text).join("\n"));
/** Packages of the examples: the folder as a clone has it, before anything is installed there. */
export function copyTour(to: string): void {
  mkdirSync(to, { recursive: true });
  for (const name of ["package.json", "bun.lock"]) cpSync(join(ROOT, "test/tour", name), join(to, name));
}
export const manifest = JSON.parse(read("package.json")) as {
  version: string;
  engines: { bun: string };
  scripts: Record<string, string>;
  dependencies: Record<string, string>;
  optionalDependencies: Record<string, string>;
  devDependencies: Record<string, string>;
};
