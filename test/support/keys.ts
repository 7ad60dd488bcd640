// Master keys for tests of what lies above them.
import { type MasterKeys, openMasterKeys } from "../../src/keys/master-keys.ts";

/** One that is in no file, and none that follows it. */
export function onlyMasterKey(key: Uint8Array): MasterKeys {
  return openMasterKeys({ own: Buffer.from(key), next: null, files: [] });
}
