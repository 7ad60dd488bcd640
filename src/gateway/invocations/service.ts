// The life of an invocation in the database: accepted, paid for, claimed, ended, abandoned. Every transition is a write
// guarded by the states that its event may start from. Those that every call goes through are commands.

import { and, eq, inArray, notExists, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call, CallEnd } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { type ErrorClass, INVOCATION_EVENTS, isEnded, SETTLEMENT_EVENTS } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import {
  bind,
  type CommandRunner,
  GIVEN_KEY,
  hasKey,
  isOfCall,
  prepared,
  type Reader,
  type Store,
  type Tx,
} from "../../storage/store.ts";
import type { CallBody } from "../../wire/body.ts";
import { storedRequest, withStoredBody } from "./bodies.ts";
import { acceptOf, isInParts, partsGone, SMALL_BODY_BYTES } from "./commands/accept.ts";
import { endCommand } from "./commands/end.ts";
import { takeCommand, waitingAgents } from "./commands/queue.ts";
import { findByIdempotencyKey, freeIdempotencyKey, type Idempotency } from "./idempotency.ts";

export type InvocationRow = Tables["invocations"]["$inferSelect"];

export interface AcceptedCall {
  readonly row: InvocationRow;
  readonly call: Call;
  readonly body: CallBody;
  readonly idempotency: Idempotency | null;
}

/** The part of an ending that listeners of ended calls are told unchanged. */
type AnnouncedEnding = Pick<
  CallEnd,
  | "status"
  | "error_class"
  | "upstream_status"
  | "latency_ms"
  | "resp_size"
  | "response_truncated"
  | "response_content_type"
>;

/** What an ended call leaves behind. */
export interface Ending extends AnnouncedEnding {
  /** Until the first byte of the body; null where it is not streamed, or none came. */
  readonly ttft_ms?: number | null;
  /**
   * Lower hex, of the whole body as its caller gets it (but for a comment that opens an event stream); null when no
   * whole response came, and when no receipt will say it.
   */
  readonly resp_sha256: string | null;
  /** The first MiB of the body; null when capture is off or no response came. */
  readonly response: Uint8Array | null;
  /** For the log only: what went wrong, without any secret or body. */
  readonly detail?: string | null;
}

export type InvocationKey = { readonly tenant: string; readonly id: string };

export interface PendingCall {
  readonly call: Call;
  readonly body: CallBody;
}

/**
 * Stores an accepted call, and gives its ID. With an idempotency key that another call already took, nothing is stored and
 * that call's ID is the answer.
 *
 * @param claim takes the call in the same write; null leaves it pending
 * @param beside done in the same write when the call is stored
 * @throws Fault `conflict` when the key was taken with another body
 */
export function accept(
  writer: Store | Tx,
  accepted: AcceptedCall,
  claim: AcceptingClaim | null = null,
  beside: ((tx: Tx) => Promise<void>) | null = null,
): Promise<string> {
  // Inside another write there is no time to store a large body first.
  if (!("read" in writer)) return acceptStored(writer, accepted, claim);
  const isLarge = isInParts(accepted.body);
  const work = () => {
    if (beside === null) return acceptStored(writer, accepted, claim);
    const together = async (tx: Tx) => {
      const id = await acceptStored(tx, accepted, claim);
      if (id === accepted.row.id) await beside(tx);
      return id;
    };
    return writer.write(together, { bytes: isLarge ? 0 : accepted.body.byteLength });
  };
  return isLarge ? withStoredBody(writer, accepted, work) : work();
}

type AcceptingClaim = Pick<Claim, "owner" | "token">;

async function acceptStored(
  writer: Store | Tx,
  { row, call, body, idempotency }: AcceptedCall,
  claim: AcceptingClaim | null,
): Promise<string> {
  const accepting = { row, call: JSON.stringify(call), body, idempotency, claim };
  const command = acceptOf(accepting);
  // A call that is just being refused frees its key, and the next one may be refused as well.
  for (let tries = 0; tries < 5; tries++) {
    if (await writer.execute(command, accepting)) return row.id;
    if (idempotency === null) throw partsGone();
    const first = await findByIdempotencyKey(writer, row, idempotency);
    if (first !== null) return first;
    // It was freed between the two looks, by a payment that was declined.
  }
  throw new Fault("unavailable", "Idempotency-Key: in use by a call that is just being refused", {
    retryAfterSeconds: 1,
  });
}

export interface Claim {
  readonly key: InvocationKey;
  /** The replica that takes the call. */
  readonly owner: string;
  /** Token of this attempt, the same for all its tries: see upstream/ownership.ts. */
  readonly token: string;
  readonly now: number;
}

/**
 * Takes a pending call; from here on it is never made again. Null when someone else took it, or it was cancelled. A claim
 * that was stored without its answer is found by its token, so this may be tried again.
 *
 * @param bodyBytes how long its request is, as far as that is known
 */
export async function claim(writer: Store | Tx, claim: Claim, bodyBytes = 0): Promise<PendingCall | null> {
  const { key } = claim;
  const reader = "read" in writer ? writer.read : writer;
  // A large one is read before it is taken: if the process dies meanwhile, the call is made by the next one.
  const before = bodyBytes > SMALL_BODY_BYTES ? await storedRequest(reader, key, bodyBytes) : null;
  const claimed = await ("read" in writer ? writer.write((tx) => claimRow(tx, claim)) : claimRow(writer, claim));
  if (claimed === null) return null;
  const { mode, req_size } = claimed;
  // Of a streamed call only what may be shown is stored.
  const stored = mode === "streaming" ? Math.min(req_size ?? 0, MAX.capturedBytes) : (req_size ?? 0);
  const body = claimed.request ?? before ?? (await storedRequest(reader, key, stored));
  if (body === null) throw new Fault("internal", "a pending call without its request");
  return { call: JSON.parse(claimed.call) as Call, body };
}

/** A call waits while its payment may still land or fail, and one that was refused to its caller is not made. */
async function claimRow(tx: Tx, { key, owner, token, now }: Claim) {
  const { openInvocations: t, refusedCalls: refused } = tx.tables;
  const { from, to } = INVOCATION_EVENTS.claim;
  const isThis = hasKey(t, key);
  const refusal = tx.db.select({ id: refused.id }).from(refused).where(hasKey(refused, key));
  const isPaid = sql`coalesce(${t.settlement_status}, '') <> 'pending'`;
  await tx.db
    .update(t)
    .set({ status: to, owner, claim: token, updated_at: now })
    .where(and(isThis, isIn(t.status, from), isPaid, notExists(refusal)));
  const [claimed] = await tx.db
    .select({ call: t.call, request: t.request, mode: t.mode, req_size: t.req_size })
    .from(t)
    .where(and(isThis, isIn(t.status, to), eq(t.claim, token)));
  return claimed ?? null;
}

export { SMALL_BODY_BYTES, takeCommand, waitingAgents };

/** Whether the call is running by this very claim. */
export async function holdsClaim(reader: Reader, key: InvocationKey, token: string): Promise<boolean> {
  return (await heldBy(reader).execute({ ...key, claim: token })).length > 0;
}

/** Gives back a claimed call of which certainly nothing has been sent. */
export async function release(tx: Tx, key: InvocationKey, token: string, now: number): Promise<void> {
  const { openInvocations: t } = tx.tables;
  const { from, to } = INVOCATION_EVENTS.release;
  await tx.db
    .update(t)
    .set({ status: to, owner: null, claim: null, updated_at: now })
    .where(and(hasKey(t, key), isIn(t.status, from), eq(t.claim, token)));
}

/** A call that was claimed here. */
export interface ClaimedKey {
  readonly key: InvocationKey;
  /** Of the claim. */
  readonly token: string;
  readonly request_id: string;
}

/** Records how a running call ended. False when it had ended already: cancelled, or its replica was taken for dead. */
export function finish(
  runner: CommandRunner,
  { key, token, request_id }: ClaimedKey,
  ending: Ending,
  now: number,
): Promise<boolean> {
  const { detail = null } = ending;
  return runner.execute(endCommand, { key, from: "running", token, ending, at: now, request_id, detail });
}

/** @param token of the only claim that is ended; null for whichever it is */
type Abandon = (
  runner: CommandRunner,
  key: InvocationKey,
  error_class: ErrorClass | null,
  now: number,
  token?: string | null,
) => Promise<boolean>;

function abandonAt({ from, to: status }: (typeof INVOCATION_EVENTS)["withdraw" | "fail"]): Abandon {
  return (runner, key, error_class, now, token = null) => {
    const ending: Ending = { ...NOTHING_YET, status, error_class, response: null };
    return runner.execute(endCommand, { key, from, token, ending, at: now, request_id: null, detail: null });
  };
}

/** Ends a call that nobody has claimed yet. False when it has been. */
export const withdraw = abandonAt(INVOCATION_EVENTS.withdraw);
/** Ends a call that is running. False when it runs no more. */
export const giveUp = abandonAt(INVOCATION_EVENTS.fail);

/** Ends a call that has not ended, without an answer of the upstream. False when it has ended already. */
export const abandon: Abandon = async (...call) =>
  // States only go forward, so a call that is claimed between the two attempts is caught by the second.
  (await withdraw(...call)) || giveUp(...call);

/**
 * Records what came of another attempt while the outcome stays open, which the call may not be any more. `settlement` is
 * the sub-record's JSON.
 */
export async function noteSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
  statuses: NonNullable<InvocationRow["settlement_status"]>[] = ["pending"],
): Promise<void> {
  for (const t of [tx.tables.openInvocations, tx.tables.endedInvocations]) {
    await tx.db
      .update(t)
      .set({ settlement, updated_at: now })
      .where(and(hasKey(t, key), inArray(t.settlement_status, statuses)));
  }
}

/**
 * The payment has been collected: the call may be made, unless it has ended meanwhile. Nothing changes when the outcome was
 * known before.
 *
 * @param isFinal false when `confirmSettlement` will follow
 */
export async function collectSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
  isFinal = true,
): Promise<void> {
  const fields = { settlement, updated_at: now };
  if (await moveSettlement(tx, "openInvocations", key, "collect", fields)) return;
  if ((await moveSettlement(tx, "endedInvocations", key, "collectLate", fields)) && isFinal) await oweFinal(tx, key);
}

/**
 * The transaction by which the payment is known to be collected. A call that has ended is owed its receipt from now on.
 *
 * @param settlement null when it stays as it is
 */
export async function confirmSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string | null,
  now: number,
): Promise<void> {
  if (settlement !== null) await noteSettlement(tx, key, settlement, now, ["settled", "settled_upstream_failed"]);
  if (!(await hasReceipt(tx, key))) await oweFinal(tx, key);
}

/** A receipt that says "settled" would be false: the payment of the call was collected, and can't be any more. */
export async function denyReceipt({ db, tables }: Tx, key: InvocationKey): Promise<void> {
  for (const t of [tables.openInvocations, tables.endedInvocations]) {
    await db.update(t).set({ emit_receipt: false }).where(hasKey(t, key));
  }
}

/** Whether it is owed one, or has it. */
async function hasReceipt({ db, tables }: Tx, key: InvocationKey): Promise<boolean> {
  for (const t of [tables.receiptsDue, tables.receipts]) {
    if ((await db.select({ id: t.invocation_id }).from(t).where(isOfCall(t, key))).length > 0) return true;
  }
  return false;
}

/**
 * The payment will not be collected: the call ends without having been made, and its idempotency key is free for
 * another. Nothing changes when the outcome was known before.
 */
export async function refuseSettlement(tx: Tx, key: InvocationKey, settlement: string, now: number): Promise<void> {
  const fields = { settlement, updated_at: now };
  if (await moveSettlement(tx, "openInvocations", key, "refuse", fields)) {
    await freeIdempotencyKey(tx, key);
    await withdraw(tx, key, null, now);
  } else if (await moveSettlement(tx, "endedInvocations", key, "refuse", fields)) await oweFinal(tx, key);
}

export async function invocationByKey(reader: Reader, key: InvocationKey): Promise<InvocationRow | null> {
  const [row] = await byId(reader).execute(key);
  return row ?? null;
}

/** A receipt states the final payment, so an ended call whose payment was open is owed it only now. */
async function oweFinal(tx: Tx, key: InvocationKey): Promise<void> {
  const row = await invocationByKey(tx, key);
  if (row !== null && isEnded(row.status) && row.emit_receipt) await oweReceipt(tx).execute(key);
}

export const byId = prepared(({ db, tables: { invocations: t } }: Reader) =>
  db.select().from(t).where(hasKey(t, GIVEN_KEY)),
);

/** Once for a call: in the write by which its end and its settlement are both known. */
const oweReceipt = prepared(({ db, tables: { receiptsDue } }: Tx) =>
  db.insert(receiptsDue).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("id"),
  }),
);

/**
 * Not a bare column: a partial index on the status would seem as good as the key until the table is analysed.
 *
 * @param status of an open call
 */
function isIn(column: Tables["openInvocations"]["status"], status: "pending" | "running") {
  return sql`coalesce(${column}, '') = ${status}`;
}

const heldBy = prepared(({ db, tables: { openInvocations: t } }: Reader) =>
  db
    .select({ id: t.id })
    .from(t)
    .where(and(hasKey(t, GIVEN_KEY), isIn(t.status, "running"), eq(t.claim, bind(t.claim, "claim")))),
);

/** What is not known of a call before its end. */
const NOTHING_YET = {
  error_class: null,
  upstream_status: null,
  latency_ms: null,
  ttft_ms: null,
  resp_size: null,
  resp_sha256: null,
  response_truncated: false,
  response_content_type: null,
  completed_at: null,
};

/**
 * Moves the settlement of a call that nobody has claimed yet, or that has ended. False when the settlement is not where the
 * event starts from.
 */
async function moveSettlement(
  tx: Tx,
  table: "openInvocations" | "endedInvocations",
  key: InvocationKey,
  event: "collect" | "collectLate" | "refuse",
  fields: Pick<InvocationRow, "settlement" | "updated_at">,
): Promise<boolean> {
  const t = tx.tables[table];
  const { from, to } = SETTLEMENT_EVENTS[event];
  const isUnclaimed = table === "openInvocations" ? isIn(tx.tables.openInvocations.status, "pending") : undefined;
  const rows = await tx.db
    .update(t)
    .set({ ...fields, settlement_status: to })
    .where(and(hasKey(t, key), eq(t.settlement_status, from), isUnclaimed))
    .returning({ id: t.id });
  if (rows.length > 0 && table === "endedInvocations") {
    tx.count(key.tenant, "settlement", from, -1);
    tx.count(key.tenant, "settlement", to, 1);
  }
  return rows.length > 0;
}
