// Writes that a tenant asks for as often as it likes, and that are no commands: they wait for one another on a row of the
// tenant's, or for a connection. Few run at a time, shared out by tenant, so that a tenant with many at once takes neither
// all connections of Postgres, of which the replica's own writes need one too, nor a whole group of SQLite.
import { createLimiter } from "../concurrency/limiter.ts";
import type { Store, Tx } from "./store.ts";

/** A tenant alone has seven eighths of these. On SQLite the writes of a moment share one commit, so there are more. */
const AT_ONCE = { sqlite: 16, postgres: 4 };

/** @returns `store.write`, in turn; throws Fault `unavailable` too when its turn does not come for long */
export function fairWrites({ write, dialect }: Pick<Store, "write" | "dialect">) {
  const few = createLimiter({ size: AT_ONCE[dialect], tooMany: "too many changes at once" });
  return <T>(tenant: string, work: (tx: Tx) => Promise<T>): Promise<T> => few(tenant, () => write(work));
}
