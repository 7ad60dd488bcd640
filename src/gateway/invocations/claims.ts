// The claims of this process: each attempt to take a call has a token of its own, from before it is written until its
// call has ended. What the database says that this replica runs is compared with them, both ways: what was ended
// elsewhere is broken off here within two seconds, and what nobody here is at work on does not stay running for ever.

import { and, eq, isNotNull } from "drizzle-orm";
import { every } from "../../concurrency/every.ts";
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import { abandon, type Claims, type InvocationKey, release } from "./service.ts";

const LOOK_MS = 1_000;
/** This process is the only one, so that only a disk in trouble can have made the two differ. */
const LOOK_MS_ALONE = 10_000;

/** What the rest of this room asks of them beside. */
export interface ComparedClaims extends Claims {
  /** The calls that this process has taken and not ended. */
  taken(): string[];
  /** What is to become of a call that runs by this claim: null while someone is at work on it. */
  fateOf(token: string): "release" | "abandon" | null;
}

export function createClaims(): ComparedClaims {
  const begun = new Map<string, { readonly id: string; isTaken: boolean }>();
  const unrecorded = new Set<string>();
  return {
    begin(id) {
      const token = crypto.randomUUID();
      begun.set(token, { id, isTaken: false });
      return token;
    },
    took(token) {
      const claim = begun.get(token);
      if (claim !== undefined) claim.isTaken = true;
    },
    over(token, isUnrecorded = false) {
      begun.delete(token);
      if (isUnrecorded) unrecorded.add(token);
    },
    taken: () => [...begun.values()].filter(({ isTaken }) => isTaken).map(({ id }) => id),
    fateOf(token) {
      if (begun.has(token)) return null;
      return unrecorded.has(token) ? "abandon" : "release";
    },
  };
}

export interface CompareOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This replica's ID. */
  readonly replica: string;
  readonly claims: Pick<ComparedClaims, "taken" | "fateOf">;
  /** Breaks off a call that has been ended otherwise. */
  stop(id: string): void;
  /** Told of an agent that has a call which can be made again. */
  released(agentId: string): void;
  /** Told of each call that ended, after it is durable. */
  ended(id: string): void;
}

/** Compares from now on; gives what stops it. */
export function compareClaims(options: CompareOptions): () => void {
  const { store, log } = options;
  const pause = store.dialect === "sqlite" ? LOOK_MS_ALONE : LOOK_MS;
  return every(pause, () =>
    compareOnce(options).catch((error) => log.warn("running_calls_not_compared", { error })),
  );
}

export async function compareOnce(options: CompareOptions): Promise<void> {
  const { store, replica, claims, stop } = options;
  // Listed first: each of them was running in the database before.
  const taken = claims.taken();
  const { invocations: t } = store.read.tables;
  const rows = await store.read.db
    .select({ tenant: t.tenant, id: t.id, agent_id: t.agent_id, claim: t.claim })
    .from(t)
    .where(and(eq(t.status, "running"), eq(t.owner, replica), isNotNull(t.claim)));
  const running = new Set(rows.map(({ id }) => id));
  for (const id of taken) if (!running.has(id)) stop(id);
  for (const row of rows) await endLost(options, row);
}

interface RunningRow extends InvocationKey {
  readonly agent_id: string;
  readonly claim: string | null;
}

/** A claim whose answer was lost, or that appeared after its attempt was over, made nothing run. */
async function endLost(options: CompareOptions, { tenant, id, agent_id, claim }: RunningRow): Promise<void> {
  const { store, clock, log, claims, released, ended } = options;
  const fate = claim === null ? null : claims.fateOf(claim);
  if (claim === null || fate === null) return;
  const key = { tenant, id };
  if (fate === "release") {
    await store.write((tx) => release(tx, key, claim, clock.now()));
    released(agent_id);
  } else {
    await store.write((tx) => abandon(tx, key, "internal", clock.now()));
    ended(id);
  }
  log.warn("orphaned_call_released", { tenant, invocation_id: id, fate });
}
