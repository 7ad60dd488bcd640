// Inspects a database without creating or changing anything, for the doctor. A write is tried and rolled back.
import type { Schema } from "./migrate.ts";
import type { Capabilities } from "./postgres/inspect.ts";
import type { Reader } from "./store.ts";

export interface DatabaseInspection {
  readonly dialect: "sqlite" | "postgres";
  readonly schema: Schema;
  /** Null on SQLite. */
  readonly capabilities: Capabilities | null;
  /** To be used only if the schema has this program's version, or a newer one on which it may run. */
  readonly read: Reader;
  /** The keys, for a schema of any version. */
  wrappedKeys(): Promise<WrappedKeys>;
  /**
   * Resolves with the milliseconds that a write and its rollback took. Without a schema it checks whether one may be created.
   * @throws StartupProblem when the operator can put it right
   */
  tryWrite(): Promise<number>;
  /** The database server's time in milliseconds since the epoch; null on SQLite, whose time is this machine's. */
  now(): Promise<number | null>;
  close(): Promise<void>;
}

export interface WrappedKeys {
  readonly tenantKeys: readonly {
    readonly tenant: string;
    readonly number: number;
    readonly wrapped_key: Uint8Array;
  }[];
  readonly signingKeys: readonly {
    readonly kid: string;
    readonly purpose: string;
    readonly wrapped_private_key: Uint8Array;
  }[];
}

export const NO_KEYS: WrappedKeys = { tenantKeys: [], signingKeys: [] };
