// Ended calls that are not in the history's own tables yet: only on SQLite, see sqlite-recent.ts.
import type { Tables } from "../../db/schema.ts";
import type { ErrorClass, Mode } from "../core/states.ts";

export interface RecentCall {
  /** In the order of the ends. */
  readonly n: number;
  readonly tenant: string;
  readonly id: string;
  readonly agent_id: string;
  readonly mode: Mode;
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly model: string | null;
}

type InvocationRow = Tables["invocations"]["$inferSelect"];

export interface RecentBodies {
  readonly request: Buffer | null;
  readonly response: Buffer | null;
}

/** As committed. */
export interface RecentCalls {
  /** Another number after each change. */
  version(): number;
  /** Those of a tenant, oldest first, until the next change. */
  of(tenant: string): readonly RecentCall[];
  /** Those of these calls that are here, newest first. */
  rows(tenant: string, ids: readonly string[]): InvocationRow[];
  /** Null when the call is not here. */
  bodies(tenant: string, id: string): RecentBodies | null;
}
