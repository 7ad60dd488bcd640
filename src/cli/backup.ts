// `tollgate backup`: a copy of a live SQLite database, and the check of one. Postgres has tools of its own for that.
import { join, resolve } from "node:path";
import type { Config } from "../config.ts";
import { systemClock } from "../core/clock.ts";
import type { Log } from "../core/log.ts";
import { keysThatDoNotOpen } from "../keys/keyring.ts";
import { DATABASE_FILE, findMasterKeys, MASTER_KEY_FILE } from "../keys/master-keys.ts";
import { checkSqliteCopy, copySqlite } from "../storage/backup.ts";
import { schemaText } from "../storage/schema-fit.ts";
import type { CommandLine } from "./command-line.ts";

interface BackupRequest {
  readonly file: string;
  readonly isMade: boolean;
  readonly isChecked: boolean;
}

/** The request that words and flags make, or null and every problem that they have. */
export function readBackupRequest({ words, flags }: Pick<CommandLine, "words" | "flags">): {
  readonly request: BackupRequest | null;
  readonly problems: readonly string[];
} {
  const problems: string[] = [];
  const [made] = words;
  // The file of a check alone is the value of its flag: a name that is mistaken must not pass for a new backup.
  const checked = flags.get("verify");
  const isBoth = made !== undefined && checked !== undefined && checked !== "";
  if (isBoth) problems.push("--verify must come after FILE, or have a FILE of its own");
  const file = made ?? checked ?? "";
  if (file === "") problems.push("FILE must be given");
  const request = { file: resolve(file), isMade: made !== undefined, isChecked: checked !== undefined };
  return { request: problems.length === 0 ? request : null, problems };
}

interface BackupVerdict {
  readonly holds: boolean;
  /** For the terminal. */
  readonly text: string;
}

/** @throws StartupProblem when the copy can't be made */
export function backUp(config: Config, { file, isMade, isChecked }: BackupRequest, log: Log): BackupVerdict {
  if (isMade) copySqlite(join(config.dataDir, DATABASE_FILE), file, systemClock.now());
  if (!isChecked) return { holds: true, text: `${file} is made\n` };
  const { problem, facts } = check(config, file, log);
  return problem === null
    ? { holds: true, text: `${file} is ${isMade ? "made and " : ""}whole: ${facts}\n` }
    : { holds: false, text: `${file} does not hold: ${problem}\n` };
}

/** What is wrong with a copy; null for one that holds. */
export function check(config: Config, file: string, log: Log) {
  const checked = checkSqliteCopy(file);
  if (checked.problem !== null) return { problem: checked.problem, facts: "" };
  const { bytes, schema, keys } = checked;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const facts = `${bytes} bytes, ${schemaText(schema)}, ${count === 0 ? "no keys" : `all ${count} keys open`}`;
  if (count === 0) return { problem: null, facts };
  const masterKeys = findMasterKeys({ ...config, log });
  if (masterKeys === null) {
    const needed = `TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} be in the data directory`;
    return { problem: `its ${count} keys can't be opened: ${needed}`, facts };
  }
  const closed = keysThatDoNotOpen(masterKeys.all(), keys).length;
  return { problem: closed === 0 ? null : `${closed} of its ${count} keys do not open with the master key`, facts };
}
