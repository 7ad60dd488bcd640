// A look at a database that makes nothing and changes nothing: no file, no table, no migration. A write is tried and
// rolled back. What is found here is judged elsewhere.
import type { WrappedKeys } from "./backup.ts";
import type { Capabilities } from "./capabilities.ts";
import type { Schema } from "./schema-fit.ts";
import type { Reader } from "./store.ts";

export interface DatabaseLook {
  readonly dialect: "sqlite" | "postgres";
  readonly schema: Schema;
  /** Null on SQLite. */
  readonly capabilities: Capabilities | null;
  /** Only for a schema that is as this program makes it, or newer and fits. */
  readonly read: Reader;
  /** Of a schema of any version. */
  wrappedKeys(): Promise<WrappedKeys>;
  /**
   * Resolves with the milliseconds that a write and its undoing took. Where there is no schema yet, nothing can be written,
   * and it is asked whether one may be made.
   *
   * @throws StartupProblem when the operator can mend it
   */
  tryWrite(): Promise<number>;
  /** The database's own time in milliseconds since the epoch; null where it is this machine's. */
  now(): Promise<number | null>;
  close(): Promise<void>;
}

export const NO_KEYS: WrappedKeys = { tenantKeys: [], signingKeys: [] };
