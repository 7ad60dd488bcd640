// The version before this one, from the history of this repository, to run from its sources beside this one.
import { mkdirSync, mkdtempSync, symlinkSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "./process.ts";

/**
 * The commit of the last release. At the next one write its commit here (`git rev-parse --short v1.2.3^{commit}`), in the
 * commit that raises the version in package.json. When the tests then fail, the two can't run beside each other: mend that,
 * or say in the manual that the old version is to be stopped first.
 */
const PREVIOUS = "abf3b3b";

/**
 * Whether it goes by the floor of a schema that is newer than it knows, as programs do from schema version 23 on. At the next
 * release this is true for good: then it goes, and a refusal is a migration whose floor is too high.
 */
export const PREVIOUS_READS_FLOORS: boolean = false;

const ROOT = join(import.meta.dir, "../../..");

/** Why it can't run here; null when it can. */
export function missingPreviousVersion(): string | null {
  const { success } = Bun.spawnSync(["git", "-C", ROOT, "cat-file", "-e", `${PREVIOUS}^{commit}`], {
    stderr: "ignore",
  });
  return success ? null : `the history has no commit ${PREVIOUS} here (git fetch --unshallow)`;
}

let program: readonly string[] | undefined;

/** What runs it in the place of the compiled binary, with the dependencies of today. */
export function previousVersion(): readonly string[] {
  program ??= checkOut();
  return program;
}

function checkOut(): readonly string[] {
  const dir = mkdtempSync(join(temporaryRoot(), "previous-"));
  const archive = join(dir, "previous.tar");
  const source = join(dir, "source");
  mkdirSync(source);
  for (const command of [
    ["git", "-C", ROOT, "archive", "--output", archive, PREVIOUS],
    ["tar", "-xf", archive, "-C", source],
  ]) {
    const { success, stderr } = Bun.spawnSync(command, { stderr: "pipe" });
    if (!success) throw new Error(`${command[0]} failed: ${stderr}`);
  }
  symlinkSync(join(ROOT, "node_modules"), join(source, "node_modules"));
  return [process.execPath, join(source, "src/main.ts")];
}
