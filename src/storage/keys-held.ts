// Whether a database file holds keys that a master key wraps, asked before there is a store: a file that a
// facilitator or `tollgate account` made holds none, and a gateway may still make its master key beside it.
import { Database, SQLiteError } from "bun:sqlite";
import { existsSync } from "node:fs";

/** An unreadable file counts as holding some: a new master key beside keys wrapped by another one would lose them. */
export function holdsWrappedKeys(path: string): boolean {
  if (!existsSync(path)) return false;
  try {
    const file = new Database(path, { readwrite: true });
    try {
      return file.query("select 1 from signing_keys union all select 1 from tenant_keys limit 1").get() !== null;
    } finally {
      file.close();
    }
  } catch (error) {
    return !(error instanceof SQLiteError && error.message.startsWith("no such table"));
  }
}
