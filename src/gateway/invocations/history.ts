// Reads invocations: by ID, with their captured bodies, and as pages of the history; and lets callers wait for the end of a
// call. IDs rise with time, so "newest first" is the descending order of IDs, and a time window is a range of IDs.
import { and, eq, inArray, or } from "drizzle-orm";
import type { BodyKind, CountDimension } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { Fault, noSuch } from "../../core/fault.ts";
import { idFloor, isId } from "../../core/id.ts";
import { INVOCATION_STATUSES, isEnded, MODES, SETTLEMENT_STATUSES } from "../../core/states.ts";
import { choiceOf, dateTime, page } from "../../http/input.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare } from "../../kernel/share.ts";
import { inTurns } from "../../kernel/turns.ts";
import { createEndWaiters, unlessAborted, withDeadline } from "../../kernel/wait.ts";
import { GIVEN_KEY, hasKey, isOfCall, preparedRow, type Reader } from "../../storage/store.ts";
import { endedTotal } from "../../storage/totals.ts";
import { storedStart } from "./bodies.ts";
import { SMALL_BODY_BYTES } from "./commands/accept.ts";
import type { Filter, PageRange, ScannedPage, ScanPath } from "./history-scan.ts";
import { FIRST_ID, LAST_ID, matchingCalls, newestCalls, pageOf } from "./history-scan.ts";
import { type InvocationKey, type InvocationRow, invocationByKey } from "./service.ts";

/** @throws Fault `not_found` */
export async function findInvocation(reader: Reader, tenant: string, id: string): Promise<InvocationRow> {
  const row = isId("inv", id) ? await invocationByKey(reader, { tenant, id }) : null;
  if (row === null) throw noSuch("inv", id);
  return row;
}

const ENDED = INVOCATION_STATUSES.filter(isEnded);

export async function endedAmong({ db, tables: { invocations: t } }: Reader, keys: readonly InvocationKey[]) {
  const ofTenants = [...Map.groupBy(keys, ({ tenant }) => tenant)].map(([tenant, own]) => {
    const ids = own.map(({ id }) => id);
    return and(eq(t.tenant, tenant), inArray(t.id, ids));
  });
  const rows = await db
    .select({ id: t.id })
    .from(t)
    .where(and(inArray(t.status, ENDED), or(...ofTenants)));
  return rows.map(({ id }) => id);
}

const smallBody = {
  request: preparedRow(({ db, tables: { invocationBodies: t } }) =>
    db.select({ bytes: t.request }).from(t).where(isOfCall(t, GIVEN_KEY)),
  ),
  response: preparedRow(({ db, tables: { invocationBodies: t } }) =>
    db.select({ bytes: t.response }).from(t).where(isOfCall(t, GIVEN_KEY)),
  ),
  /** The request of an open call; null where it is stored in parts. */
  open: preparedRow(({ db, tables: { openInvocations: t } }) =>
    db.select({ bytes: t.request }).from(t).where(hasKey(t, GIVEN_KEY)),
  ),
};

const openCallById = preparedRow(({ db, tables: { openInvocations: t } }) =>
  db.select({ call: t.call }).from(t).where(hasKey(t, GIVEN_KEY)),
);

/** The headers that an open call was accepted with; null when the call has ended. */
export async function callHeaders(reader: Reader, key: InvocationKey): Promise<Call["headers"] | null> {
  const row = await openCallById(reader, key);
  return row === null ? null : (JSON.parse(row.call) as Call).headers;
}

/** The captured start of a body; null when capture was off, or when retention has removed it. */
export async function capturedBody(reader: Reader, row: InvocationRow, kind: BodyKind): Promise<Uint8Array | null> {
  const size = kind === "request" ? row.req_size : row.resp_size;
  if (!row.body_captured || size === null) return null;
  const { tenant, id, completed_at } = row;
  const key = { tenant, id };
  // The call may end between the two queries, so the open calls are searched first.
  const open = completed_at === null && kind === "request" ? await smallBody.open(reader, key) : null;
  const small = open?.bytes ?? (await smallBody[kind](reader, key))?.bytes ?? null;
  if (small !== null || size <= SMALL_BODY_BYTES) return small;
  return storedStart(reader, key, kind, Math.min(size, MAX.capturedBytes));
}

/** The filters of the query string, except its time window. The database keeps a total of the ended calls for each filter. */
function readFilters(query: URLSearchParams): Filter[] {
  const filters: [CountDimension, string | null][] = [
    ["agent", query.get("agent_id")],
    ["status", choiceOf(query, "status", INVOCATION_STATUSES)],
    ["mode", choiceOf(query, "mode", MODES)],
    ["error_class", query.get("error_class")],
    ["model", query.get("model")],
    ["settlement", choiceOf(query, "settlement", SETTLEMENT_STATUSES)],
  ];
  return filters.filter((filter): filter is [CountDimension, string] => filter[1] !== null);
}

/** Sorts the filters, the most selective first: its index is then scanned. */
async function mostSelectiveFirst(reader: Reader, tenant: string, filters: readonly Filter[]): Promise<Filter[]> {
  const counts = await Promise.all(
    filters.map(async (filter) => ({ filter, total: await endedTotal(reader, tenant, ...filter) })),
  );
  return counts.sort((a, b) => a.total - b.total).map(({ filter }) => filter);
}

/** @param callerSignal stops a scan when the caller has gone @throws Fault `invalid_request`, naming the parameter */
export async function readHistory(
  reader: Reader,
  tenant: string,
  query: URLSearchParams,
  callerSignal?: AbortSignal,
): Promise<ScannedPage & PageRange> {
  const range = page(query);
  const filters = readFilters(query);
  const since = dateTime(query, "since");
  const until = dateTime(query, "until");
  // No stored text contains U+0000, and Postgres refuses a parameter that contains it.
  if (filters.some(([, value]) => value.includes("\0"))) return { rows: [], total: 0, ...range };
  const [along, ...others] = filters.length < 2 ? filters : await mostSelectiveFirst(reader, tenant, filters);
  const path: ScanPath = {
    tenant,
    along,
    others,
    floor: since === null ? FIRST_ID : idFloor("inv", since),
    // `until` includes its millisecond, so the exclusive bound is the next one.
    ceiling: until === null ? LAST_ID : idFloor("inv", until + 1),
  };
  if (others.length > 0 || since !== null || until !== null) {
    return { ...(await pageOf(reader, path, range, true, callerSignal)), ...range };
  }
  const filter = along ?? (["all", ""] as const);
  const { total, open } = await matchingCalls(reader, tenant, filter);
  const newest = range.offset < total ? await newestCalls(reader, tenant, filter, range, open) : [];
  const rows = newest ?? (await pageOf(reader, path, range, false, callerSignal)).rows;
  // The page may hold calls that were accepted after the total was read.
  return { rows, total: rows.length === 0 ? total : Math.max(total, range.offset + rows.length), ...range };
}

// Callers that wait for a call's end (`Prefer: wait`). An end here wakes them; one query a second finds ends elsewhere.

/** @param endedAmong returns the IDs of those calls that have ended */
export function createCompletionWaiters(endedAmong: (keys: readonly InvocationKey[]) => Promise<readonly string[]>) {
  const waiting = createFairShare({ size: MAX.waitingCallers });
  const waiters = createEndWaiters<InvocationKey>({
    nameOf: ({ id }) => id,
    lookAgainMs: 1000,
    endedAmong,
    // Thousands may wait for one call, and each reads the call again when woken, so they take turns on the event loop.
    wake: ({ tenant }, goOn) =>
      inTurns(() => {
        goOn();
        return false;
      }, tenant),
  });
  const releasing = new AbortController();
  const released = releasing.signal;

  /** After the release, waits at most one more second for a read, because the store may hang. */
  function inTime(reading: Promise<InvocationRow>): Promise<InvocationRow> {
    return unlessAborted(released, reading).catch((error) => {
      if (!released.aborted) throw error;
      return withDeadline(1000, reading, () => new Fault("unavailable", "the gateway is stopping"));
    });
  }

  return {
    announce: waiters.announce,
    /** Ends all waits, present and future, with what is known of the call: the process is about to stop. */
    release() {
      releasing.abort();
      waiters.release();
    },
    /**
     * Waits until the invocation has ended, for `seconds`, until `signal` aborts, or until the release; then returns it as
     * `read` reads it. Does not wait when too many callers of the tenant are waiting.
     * @throws Fault `unavailable` when the release comes before the first reading; what `read` throws
     */
    async wait(key: InvocationKey, seconds: number, signal: AbortSignal, read: () => Promise<InvocationRow>) {
      if (waiting.take(key.tenant) !== null) return read();
      let known: InvocationRow | null = null;
      async function look(): Promise<InvocationRow> {
        const last = known;
        try {
          // Read again even after the release, since the call may have ended with the process's last work.
          known = await inTime(read());
          return known;
        } catch (error) {
          if (released.aborted && last !== null) return last;
          throw error;
        }
      }
      try {
        return await waiters.wait({
          key,
          ms: seconds * 1000,
          signal,
          look,
          isEnded: ({ status }: InvocationRow) => isEnded(status),
        });
      } finally {
        waiting.giveBack(key.tenant);
      }
    },
  };
}

export type CompletionWaiters = ReturnType<typeof createCompletionWaiters>;
