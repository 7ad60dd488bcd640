// The keys of a gateway: the master key, and whether it opens all that the database keeps under it.
import type { Config } from "../../config.ts";
import { silentLog } from "../../core/log.ts";
import { StartupProblem } from "../../core/startup.ts";
import { keysThatDoNotOpen } from "../../keys/keyring.ts";
import { findMasterKeys, MASTER_KEY_FILE, type MasterKeys } from "../../keys/master-keys.ts";
import { type DatabaseLook, NO_KEYS } from "../../storage/look.ts";
import { type Finding, failure, findings } from "./finding.ts";

const NAMED_MAX = 3;

type MasterKeyPlace = Pick<Config, "masterKeys" | "dataDir">;

/** Null also when they can't be read, which is told of the keys. */
export function usableMasterKeys(place: MasterKeyPlace): MasterKeys | null {
  try {
    return masterKeysOf(place);
  } catch {
    return null;
  }
}

/**
 * Null when there is none yet.
 *
 * @throws StartupProblem when one can't be read
 */
function masterKeysOf({ masterKeys, dataDir }: MasterKeyPlace): MasterKeys | null {
  return findMasterKeys({ masterKeys, dataDir, log: silentLog });
}

export async function keyFindings(place: MasterKeyPlace, database: DatabaseLook | null): Promise<Finding[]> {
  const keys = (await database?.wrappedKeys()) ?? NO_KEYS;
  const count = keys.tenantKeys.length + keys.signingKeys.length;
  const masterKeys = masterKeysOf(place);
  if (masterKeys === null) {
    if (count === 0) return findings("keys", [], "made by the first start");
    throw new StartupProblem(
      `TOLLGATE_MASTER_KEY must be set, or ${MASTER_KEY_FILE} restored to the data directory, for ${count} keys`,
    );
  }
  if (count === 0) return findings("keys", [], "the master key is there, and no key under it yet");
  const closed = keysThatDoNotOpen(masterKeys.all(), keys);
  const named = closed.slice(0, NAMED_MAX).join(", ");
  const more = closed.length > NAMED_MAX ? ", …" : "";
  const problem = failure(
    `${closed.length} of ${count} keys do not open with the master key (${named}${more})`,
    `the key must be the one that this database was made with: TOLLGATE_MASTER_KEY, or ${MASTER_KEY_FILE}`,
  );
  return findings("keys", [closed.length > 0 ? problem : null], `the master key opens all ${count} keys`);
}
