// A look at a database that makes nothing and changes nothing: no file, no table, no migration. A write is tried and
// rolled back. What is found here is judged elsewhere.

import type { Schema } from "./migrate.ts";
import type { Capabilities } from "./postgres/look.ts";
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
   * @throws StartupProblem when the operator can put it right
   */
  tryWrite(): Promise<number>;
  /** The database's own time in milliseconds since the epoch; null where it is this machine's. */
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

export type TenantKeyRow = Omit<WrappedKeys["tenantKeys"][number], "number"> & {
  /** Postgres gives a text. */
  readonly number: number | string;
};

export function numbered(rows: readonly TenantKeyRow[]): WrappedKeys["tenantKeys"] {
  return rows.map((row) => ({ ...row, number: Number(row.number) }));
}

export const NO_KEYS: WrappedKeys = { tenantKeys: [], signingKeys: [] };
