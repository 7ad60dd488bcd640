// The claims of this process. Each attempt to take a call has a token of its own, from before it is written until the
// call has ended. They are compared with what the database says that this replica runs, both ways: a call that was
// ended elsewhere is broken off here within two seconds, and a call that nothing here works on does not stay running
// for ever.

import { and, eq, isNotNull, sql } from "drizzle-orm";
import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { every } from "../../kernel/loop.ts";
import type { Store } from "../../storage/store.ts";
import { abandon, type InvocationKey, release } from "./service.ts";

/** Where this is the only process, the two can differ only after trouble with the disk. */
const LOOK_MS_ALONE = 10_000;

export function createClaims() {
  /** By token, the call that has been taken with it; null until then. */
  const begun = new Map<string, string | null>();
  const unrecorded = new Set<string>();
  /** Claims that were over since the rows that are being judged were read; null while none are. */
  let overSince: Set<string> | null = null;
  return {
    /** Runs a comparison: a call that ends during it still counts as worked on, since its row was read before. */
    async during(work: () => Promise<void>): Promise<void> {
      overSince = new Set();
      await work().finally(() => {
        overSince = null;
      });
    },
    begin() {
      const token = crypto.randomUUID();
      begun.set(token, null);
      return token;
    },
    took(token: string, id: string) {
      if (begun.has(token)) begun.set(token, id);
    },
    over(token: string, isUnrecorded = false) {
      begun.delete(token);
      overSince?.add(token);
      if (isUnrecorded) unrecorded.add(token);
    },
    /** The calls that this process has taken and not ended. */
    taken: () => [...begun.values()].filter((id) => id !== null),
    /** What to do with a running call that has this claim. Null while it is being worked on here. */
    fateOf(token: string) {
      if (begun.has(token) || overSince?.has(token)) return null;
      return unrecorded.has(token) ? "abandon" : "release";
    },
  };
}

interface CompareOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  /** This replica's ID. */
  readonly replica: string;
  readonly claims: Pick<ReturnType<typeof createClaims>, "taken" | "fateOf" | "during">;
  /** Breaks off a call that was ended elsewhere. */
  stop(id: string): void;
  /** Called with an agent whose call can be made again. */
  released(tenant: string, agentId: string): void;
}

/** Starts comparing. Returns a function that stops it. */
export function compareClaims(options: CompareOptions): () => void {
  const { store, log } = options;
  const pause = store.isShared ? 1_000 : LOOK_MS_ALONE;
  return every(pause, () => compareOnce(options).catch((error) => log.warn("running_calls_not_compared", { error })));
}

export const compareOnce = (options: CompareOptions): Promise<void> => options.claims.during(() => compare(options));

async function compare(options: CompareOptions): Promise<void> {
  const { store, replica, claims, stop } = options;
  // List the claims before the rows are read: each of them was already running in the database.
  const taken = claims.taken();
  const { openInvocations: t } = store.read.tables;
  const rows = await store.read.db
    .select({ tenant: t.tenant, id: t.id, agent_id: t.agent_id, claim: t.claim })
    .from(t)
    // The status in the text of the query, as in the partial index: a plan for any status could not use that.
    .where(and(sql`${t.status} = 'running'`, eq(t.owner, replica), isNotNull(t.claim)));
  const running = new Set(rows.map(({ id }) => id));
  for (const id of taken) if (!running.has(id)) stop(id);
  for (const row of rows) await endLost(options, row);
}

interface RunningRow extends InvocationKey {
  readonly agent_id: string;
  readonly claim: string | null;
}

/** A claim whose commit lost its answer, or was stored after its attempt was over, has no work here. */
async function endLost(options: CompareOptions, { tenant, id, agent_id, claim }: RunningRow): Promise<void> {
  const { store, clock, log, claims, released } = options;
  const fate = claim === null ? null : claims.fateOf(claim);
  if (claim === null || fate === null) return;
  const key = { tenant, id };
  if (fate === "release") {
    await store.write((tx) => release(tx, key, claim, clock.now()));
    released(tenant, agent_id);
  } else {
    await abandon(store, key, "internal", clock.now());
  }
  log.warn("orphaned_call_released", { tenant, invocation_id: id, fate });
}
