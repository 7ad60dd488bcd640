// The life of an invocation in the database: accepted, paid for, claimed, ended, abandoned. Every transition
// is a write guarded by the states that its event may start from, and it keeps the exact totals of the history.
import { and, eq } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import { asBuffer } from "../../core/bytes.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import type { ErrorClass } from "../../core/states.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import { countMove, countWhole } from "./counters.ts";
import { endInvocation, withoutAnswer } from "./ends.ts";
import { freeIdempotencyKey, type Idempotency, takeIdempotencyKey } from "./idempotency.ts";
import {
  callAndBody,
  claimRow,
  failOwnRow,
  failRow,
  heldBy,
  insertBody,
  insertInvocation,
  insertPaidInvocation,
  moveSettlement,
  NOTHING_YET,
  oweReceipt,
  releaseRow,
  succeedOwnRow,
  withdrawRow,
} from "./statements.ts";

export type InvocationRow = Tables["invocations"]["$inferSelect"];

export interface AcceptedCall {
  readonly row: InvocationRow;
  readonly call: Call;
  readonly body: Uint8Array;
  readonly idempotency: Idempotency | null;
}

/** What an ended call leaves behind. */
export interface Ending {
  readonly status: "succeeded" | "failed";
  readonly error_class: ErrorClass | null;
  readonly upstream_status: number | null;
  /** The upstream call from first dial to last byte, retries included; null when there was none. */
  readonly latency_ms: number | null;
  /** Until the first byte of the body; null where it is not streamed, or none came. */
  readonly ttft_ms?: number | null;
  /** Bytes of the whole decoded response body; null when no response came. */
  readonly resp_size: number | null;
  /**
   * Lower hex, of the whole body as its caller gets it (but for a comment that opens an event stream); null when no
   * whole response came, and when no receipt will say it.
   */
  readonly resp_sha256: string | null;
  /** The first MiB of the body; null when capture is off or no response came. */
  readonly response: Uint8Array | null;
  readonly response_truncated: boolean;
  readonly response_content_type: string | null;
  /** For the log only: what went wrong, without any secret or body. */
  readonly detail?: string | null;
}

/** The claims of this process: see claims.ts. */
export interface Claims {
  /** A new token for an attempt to take this call. */
  begin(id: string): string;
  /** The claim is stored: the call is this process's to make. */
  took(token: string): void;
  /**
   * The attempt is over.
   *
   * @param isUnrecorded the call may have been made, and its end could not be stored
   */
  over(token: string, isUnrecorded?: boolean): void;
}

export type InvocationKey = { readonly tenant: string; readonly id: string };

export interface PendingCall {
  readonly call: Call;
  readonly body: Uint8Array;
}

/**
 * Stores an accepted call. With an idempotency key that another call already took, nothing is stored and that
 * call's ID is the answer.
 *
 * @throws Fault `conflict` when the key was taken with another body
 */
export async function accept(tx: Tx, accepted: AcceptedCall): Promise<string> {
  const { row, call, body, idempotency } = accepted;
  if (idempotency !== null) {
    const first = await takeIdempotencyKey(tx, row, idempotency);
    if (first !== row.id) return first;
  }
  const insert = row.payment_nonce === null ? insertInvocation : insertPaidInvocation;
  await insert(tx).execute(row);
  await insertBody(tx).execute({
    tenant: row.tenant,
    invocation_id: row.id,
    call: JSON.stringify(call),
    request: asBuffer(body),
  });
  countWhole(tx, row, 1);
  return row.id;
}

export interface Claim {
  readonly key: InvocationKey;
  /** The replica that takes the call. */
  readonly owner: string;
  /** Token of this attempt, the same for all its tries: see claims.ts. */
  readonly token: string;
  readonly now: number;
  /** The stored call, if the caller still has it in memory, so that it is not read again. */
  readonly inHand: PendingCall | null;
}

/**
 * Takes a pending call; from here on it is never made again. Gives the stored call, or null when someone else
 * took it, or it was cancelled. A claim that was stored without its answer is found by its token, so this may be
 * tried again.
 */
export async function claim(tx: Tx, { key, owner, token, now, inHand }: Claim): Promise<PendingCall | null> {
  const fields = { ...NOTHING_YET, ...key, owner, claim: token, updated_at: now };
  const claimed = await claimRow(tx).execute(fields);
  if (claimed.length > 0) countMove(tx, key.tenant, "pending", "running");
  else if (!(await holdsClaim(tx, key, token))) return null;
  if (inHand !== null) return inHand;
  const [stored] = await callAndBody(tx).execute(key);
  if (stored?.call == null || stored.request === null) {
    throw new Fault("internal", "a pending call without its request");
  }
  return { call: JSON.parse(stored.call) as Call, body: stored.request };
}

/** Whether the call is running by this very claim. */
export async function holdsClaim(reader: Reader, key: InvocationKey, token: string): Promise<boolean> {
  return (await heldBy(reader).execute({ ...key, claim: token })).length > 0;
}

/** Gives back a claimed call of which certainly nothing has been sent. */
export async function release(tx: Tx, key: InvocationKey, token: string, now: number): Promise<void> {
  const fields = { ...NOTHING_YET, ...key, owner: null, claim: token, updated_at: now };
  const released = await releaseRow(tx).execute(fields);
  if (released.length > 0) countMove(tx, key.tenant, "running", "pending");
}

/** A call that was claimed here. */
export interface ClaimedKey {
  readonly key: InvocationKey;
  /** Of the claim. */
  readonly token: string;
  readonly request_id: string;
}

/** Records how a running call ended. False when it had ended already: cancelled, or its replica was taken for dead. */
export async function finish(
  tx: Tx,
  { key, token, request_id }: ClaimedKey,
  ending: Ending,
  now: number,
): Promise<boolean> {
  const { response, status, detail = null, ...fields } = ending;
  const end = status === "succeeded" ? succeedOwnRow : failOwnRow;
  const [row] = await end(tx).execute({
    ...NOTHING_YET,
    ...fields,
    ...key,
    claim: token,
    owner: null,
    updated_at: now,
    completed_at: now,
  });
  if (row === undefined) return false;
  await endInvocation(tx, { key, from: "running", ending, at: now, request_id, detail }, row);
  return true;
}

type Abandon = (tx: Tx, key: InvocationKey, error_class: ErrorClass, now: number) => Promise<boolean>;

function abandonFrom(from: "pending" | "running", end: typeof failRow): Abandon {
  return async (tx, key, error_class, now) => {
    const fields = { ...NOTHING_YET, ...key, owner: null, error_class, updated_at: now, completed_at: now };
    const [row] = await end(tx).execute(fields);
    if (row === undefined) return false;
    await endInvocation(tx, withoutAnswer(key, from, error_class, now), row);
    return true;
  };
}

/** Ends a call that nobody has claimed yet. False when it has been. */
export const withdraw = abandonFrom("pending", withdrawRow);
const giveUp = abandonFrom("running", failRow);

/** Ends a call that has not ended, without an answer of the upstream. False when it has ended already. */
export const abandon: Abandon = async (...call) =>
  // States only go forward, so a call that is claimed between the two attempts is caught by the second.
  (await withdraw(...call)) || giveUp(...call);

/** Records what came of another attempt while the outcome stays open. `settlement` is the sub-record's JSON. */
export async function noteSettlement(tx: Tx, key: InvocationKey, settlement: string, now: number): Promise<void> {
  const { invocations: t } = tx.tables;
  await tx.db
    .update(t)
    .set({ settlement, updated_at: now })
    .where(and(eq(t.tenant, key.tenant), eq(t.id, key.id), eq(t.settlement_status, "pending")));
}

/**
 * The payment has been collected: the call may be made, unless it has ended meanwhile. Null when the outcome was
 * known before.
 */
export async function collectSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
): Promise<InvocationRow | null> {
  const fields = { settlement, updated_at: now };
  const row = await moveSettlement(tx, key, "collect", fields, ["pending"]);
  if (row !== null) return row;
  const late = await moveSettlement(tx, key, "collectLate", fields, ["failed"]);
  if (late?.emit_receipt) await oweReceipt(tx).execute(key);
  return late;
}

/**
 * The payment will not be collected: the call ends without having been made, and its idempotency key is free for
 * another. Null when the outcome was known before.
 */
export async function refuseSettlement(
  tx: Tx,
  key: InvocationKey,
  settlement: string,
  now: number,
): Promise<InvocationRow | null> {
  const row = await moveSettlement(tx, key, "refuse", { settlement, updated_at: now });
  if (row === null) return null;
  if (row.status !== "pending") {
    if (row.emit_receipt) await oweReceipt(tx).execute(key);
    return row;
  }
  await freeIdempotencyKey(tx, row);
  const fields = { ...NOTHING_YET, ...key, owner: null, updated_at: now, completed_at: now };
  const [ended] = await withdrawRow(tx).execute(fields);
  if (ended !== undefined) await endInvocation(tx, withoutAnswer(key, "pending", null, now), ended);
  return { ...row, status: "failed", error_class: null, completed_at: now };
}
