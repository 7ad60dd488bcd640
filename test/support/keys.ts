// Master keys for tests of what lies above them.
import { type MasterKeys, openMasterKeys } from "../../src/keys/master-keys.ts";

/** One that is in no file, and none that follows it. */
export function onlyMasterKey(key: Uint8Array): MasterKeys {
  return openMasterKeys(Buffer.from(key), null, []);
}

/** As an operator makes one: for TOLLGATE_MASTER_KEY. */
export const newMasterKey = () => Buffer.from(crypto.getRandomValues(new Uint8Array(32))).toString("base64");
