// The life cycle of an invocation in the database: accepted, paid for, claimed, ended, abandoned. Every transition is a write
// guarded by the states that its event may start from (core/states.ts). Those that every call passes are batched commands.
import { and, eq, inArray, notExists, sql } from "drizzle-orm";
import { awaitsNoPayment, type OutboxKind, type Tables } from "../../../db/schema.ts";
import type { Call, CallEnd } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { type ErrorClass, type ErrorDetail, INVOCATION_EVENTS, SETTLEMENT_EVENTS } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import type { CommandRunner, Reader, Store, Tx } from "../../storage/store.ts";
import { bind, GIVEN_KEY, hasKey, preparedRow } from "../../storage/store.ts";
import type { CallBody } from "../../wire/body.ts";
import { storedRequest, withStoredBody } from "./bodies.ts";
import { acceptOf, isInParts, partsGone, SMALL_BODY_BYTES } from "./commands/accept.ts";
import { endCommand } from "./commands/end.ts";
import { takeCommand, waitingAgents } from "./commands/queue.ts";
import { findByIdempotencyKey, freeIdempotencyKey, type Idempotency } from "./idempotency.ts";

export type InvocationRow = Tables["invocations"]["$inferSelect"];

/** The columns of a call that are known when it is accepted. */
export type AcceptedRow = Omit<InvocationRow, keyof Ending | "owner" | "claim" | "completed_at">;

export interface AcceptedCall {
  readonly row: AcceptedRow;
  readonly call: Call;
  readonly body: CallBody;
  readonly idempotency: Idempotency | null;
}

type EndFields = "status" | "error_class" | "upstream_status" | "latency_ms" | "resp_size";

/** What is stored of a call's end. */
export interface Ending extends Pick<CallEnd, EndFields | "response_truncated" | "response_content_type"> {
  /** Null for a call that its upstream answered, and where no value fits. */
  readonly error_detail?: ErrorDetail | null;
  /** Time to the first byte of the body; null for a call that is not streamed, or when no byte came. */
  readonly ttft_ms?: number | null;
  /**
   * Lower-case hex, over the whole body as the caller gets it (without a comment that opens an event stream); null when the
   * response is not complete, or when no receipt needs the hash.
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
 * Stores an accepted call and returns its ID, or, with nothing stored, that of the call which has the idempotency key.
 * @param claim is made in the same write; null leaves the call pending
 * @param alsoWrite runs in the same write, if the call is stored
 * @throws Fault `conflict` when the key was used with another body
 */
export function accept(
  writer: Store | Tx,
  accepted: AcceptedCall,
  claim: AcceptingClaim | null = null,
  alsoWrite: ((tx: Tx) => Promise<void>) | null = null,
): Promise<string> {
  // A large body is stored ahead of its call in writes of its own, which is impossible inside another write.
  if (!("read" in writer)) return acceptStored(writer, accepted, claim);
  const isLarge = isInParts(accepted.body);
  const work = () => {
    if (alsoWrite === null) return acceptStored(writer, accepted, claim);
    const both = async (tx: Tx) => {
      const id = await acceptStored(tx, accepted, claim);
      if (id === accepted.row.id) await alsoWrite(tx);
      return id;
    };
    return writer.write(both, { bytes: isLarge ? 0 : accepted.body.byteLength });
  };
  return isLarge ? withStoredBody(writer, accepted, work) : work();
}

export type AcceptingClaim = Pick<Claim, "owner" | "token">;

async function acceptStored(
  writer: Store | Tx,
  { row, call, body, idempotency }: AcceptedCall,
  claim: AcceptingClaim | null,
): Promise<string> {
  const accepting = { row, call: JSON.stringify(call), body, idempotency, claim };
  const command = acceptOf(accepting);
  // A call whose payment is declined frees its key. The key may be freed between the two steps below, hence a few tries.
  for (let tries = 0; tries < 5; tries++) {
    if (await writer.execute(command, accepting)) return row.id;
    if (idempotency === null) throw partsGone();
    const first = await findByIdempotencyKey(writer, row, idempotency);
    if (first !== null) return first;
  }
  const message = "Idempotency-Key: in use by a call that is being refused; retry";
  throw new Fault("unavailable", message, { retryAfterSeconds: 1 });
}

export interface Claim {
  readonly key: InvocationKey;
  readonly owner: string;
  /** Token of this attempt, which all its retries share: see upstream/ownership.ts. */
  readonly token: string;
  readonly now: number;
}

/**
 * Claims a pending call; after that no one else makes it. Null when another replica has claimed it, or it was cancelled.
 * `claim` may be retried with its token: a claim whose commit got no answer is then found.
 * @param bodyBytes size of the call's request, if known
 */
export async function claim(writer: Store | Tx, claim: Claim, bodyBytes = 0): Promise<PendingCall | null> {
  const { key } = claim;
  const reader = "read" in writer ? writer.read : writer;
  // A large request is read before the claim: if the process dies while reading, another one can still make the call.
  const before = bodyBytes > SMALL_BODY_BYTES ? await storedRequest(reader, key, bodyBytes) : null;
  const claimed = await ("read" in writer ? writer.write((tx) => claimRow(tx, claim)) : claimRow(writer, claim));
  if (claimed === null) return null;
  const { mode, req_size } = claimed;
  // For a streamed call only the captured start of the request is stored.
  const stored = mode === "streaming" ? Math.min(req_size ?? 0, MAX.capturedBytes) : (req_size ?? 0);
  const body = claimed.request ?? before ?? (await storedRequest(reader, key, stored));
  if (body === null) throw new Fault("internal", "a pending call without its request");
  return { call: JSON.parse(claimed.call) as Call, body };
}

/** Leaves a call alone while the outcome of its payment is open, or when it was refused to its caller (lost-commits.ts). */
async function claimRow(tx: Tx, { key, owner, token, now }: Claim) {
  const { openInvocations: t, refusedCalls: refused } = tx.tables;
  const { from, to } = INVOCATION_EVENTS.claim;
  const isThis = hasKey(t, key);
  const refusal = tx.db.select({ id: refused.id }).from(refused).where(hasKey(refused, key));
  await tx.db
    .update(t)
    .set({ status: to, owner, claim: token, updated_at: now })
    .where(and(isThis, statusIs(t.status, from), awaitsNoPayment(t), notExists(refusal)));
  const [claimed] = await tx.db
    .select({ call: t.call, request: t.request, mode: t.mode, req_size: t.req_size })
    .from(t)
    .where(and(isThis, statusIs(t.status, to), eq(t.claim, token)));
  return claimed ?? null;
}

export { SMALL_BODY_BYTES, takeCommand, waitingAgents };

export const holdsClaim = async (reader: Reader, key: InvocationKey, token: string): Promise<boolean> =>
  (await heldCall(reader, { ...key, claim: token })) !== null;

/** Returns a claimed call to pending. Only for a call of which certainly nothing was sent upstream. */
export async function release(tx: Tx, key: InvocationKey, token: string, now: number): Promise<void> {
  const { openInvocations: t } = tx.tables;
  const { from, to } = INVOCATION_EVENTS.release;
  await tx.db
    .update(t)
    .set({ status: to, owner: null, claim: null, updated_at: now })
    .where(and(hasKey(t, key), statusIs(t.status, from), eq(t.claim, token)));
}

export interface ClaimedKey {
  readonly key: InvocationKey;
  readonly token: string;
  readonly request_id: string;
}

/** Records how a running call ended. False when it had already ended: it was cancelled, or its replica was taken for dead. */
export function finish(runner: CommandRunner, { key, token, request_id }: ClaimedKey, ending: Ending, now: number) {
  const { detail = null } = ending;
  return runner.execute(endCommand, { key, from: "running", token, ending, at: now, request_id, detail });
}

/** @param token ends the call only under this claim; null ends it under any */
type EndWithoutResponse = (
  runner: CommandRunner,
  key: InvocationKey,
  error_class: ErrorClass | null,
  now: number,
  token?: string | null,
  error_detail?: ErrorDetail | null,
) => Promise<boolean>;

function endFrom({ from, to: status }: (typeof INVOCATION_EVENTS)["withdraw" | "fail"]): EndWithoutResponse {
  return (runner, key, error_class, now, token = null, error_detail = null) => {
    const ending: Ending = { ...NO_RESPONSE, status, error_class, error_detail };
    return runner.execute(endCommand, { key, from, token, ending, at: now, request_id: null, detail: null });
  };
}

/** Ends a pending call. False when it is not pending any more. */
export const endPending = endFrom(INVOCATION_EVENTS.withdraw);
/** Ends a running call without a response. False when it is not running any more. */
export const endRunning = endFrom(INVOCATION_EVENTS.fail);

/** Ends an open call, pending or running, without a response. False when it has ended before. */
export const endOpen: EndWithoutResponse = async (...call) =>
  // States only go forward, so a call that is claimed between the two attempts is caught by the second.
  (await endPending(...call)) || endRunning(...call);

/** Updates the settlement's details but not its status. @param settlement JSON of the settlement sub-record */
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
 * Records that the payment was collected: the call may be made, unless it has ended. The first outcome stays.
 * @param isFinal false when `confirmSettlement` will follow
 */
export async function collectSettlement(tx: Tx, key: InvocationKey, settlement: string, now: number, isFinal = true) {
  const fields = { settlement, updated_at: now };
  if (await moveSettlement(tx, "openInvocations", key, "collect", fields)) return;
  if ((await moveSettlement(tx, "endedInvocations", key, "collectLate", fields)) && isFinal) await writeOutbox(tx, key);
}

/** Records a payment's final transaction, and the outbox of an ended call. @param settlement null leaves the details as they are */
export async function confirmSettlement(tx: Tx, key: InvocationKey, settlement: string | null, now: number) {
  if (settlement !== null) await noteSettlement(tx, key, settlement, now, ["settled", "settled_upstream_failed"]);
  await writeOutbox(tx, key);
}

/** Gives a call no receipt: its payment was recorded as settled but was undone for good, so a receipt would be false. */
export async function denyReceipt({ db, tables }: Tx, key: InvocationKey): Promise<void> {
  for (const t of [tables.openInvocations, tables.endedInvocations]) {
    const others = sql`nullif(trim(replace(' ' || ${t.outbox} || ' ', ' receipt ', ' ')), '')`;
    await db.update(t).set({ outbox: others }).where(hasKey(t, key));
  }
}

/** Records that the payment won't be collected: its call ends unmade, and its idempotency key is freed. The first outcome stays. */
export async function refuseSettlement(tx: Tx, key: InvocationKey, settlement: string, now: number): Promise<void> {
  const fields = { settlement, updated_at: now };
  if (await moveSettlement(tx, "openInvocations", key, "refuse", fields)) {
    await freeIdempotencyKey(tx, key);
    await endPending(tx, key, null, now);
  } else if (await moveSettlement(tx, "endedInvocations", key, "refuse", fields)) await writeOutbox(tx, key);
}

/** Writes the outbox of a call that ended before its settlement was final, and clears the kinds, so that it happens once. */
async function writeOutbox({ db, tables }: Tx, key: InvocationKey): Promise<void> {
  const { endedInvocations: t, outbox } = tables;
  const [call] = await db.select({ kinds: t.outbox }).from(t).where(hasKey(t, key));
  if (!call?.kinds) return;
  const kinds = call.kinds.split(" ") as OutboxKind[];
  await db.insert(outbox).values(kinds.map((kind) => ({ kind, tenant: key.tenant, invocation_id: key.id })));
  await db.update(t).set({ outbox: null }).where(hasKey(t, key));
}

export const invocationByKey = preparedRow(({ db, tables: { invocations: t } }) =>
  db.select().from(t).where(hasKey(t, GIVEN_KEY)),
);

/** Compares an expression, since for a bare column planners prefer a partial index until the table is analysed. */
const statusIs = (column: Tables["openInvocations"]["status"], status: "pending" | "running") =>
  sql`coalesce(${column}, '') = ${status}`;

const heldCall = preparedRow(({ db, tables: { openInvocations: t } }) =>
  db
    .select({ id: t.id })
    .from(t)
    .where(and(hasKey(t, GIVEN_KEY), statusIs(t.status, "running"), eq(t.claim, bind(t.claim, "claim")))),
);

const NO_RESPONSE = {
  upstream_status: null,
  latency_ms: null,
  ttft_ms: null,
  resp_size: null,
  resp_sha256: null,
  response_truncated: false,
  response_content_type: null,
  response: null,
};

/** Moves the settlement of a pending or an ended call. False when its status is not the one that the event starts from. */
async function moveSettlement(
  tx: Tx,
  table: "openInvocations" | "endedInvocations",
  key: InvocationKey,
  event: "collect" | "collectLate" | "refuse",
  fields: Pick<InvocationRow, "settlement" | "updated_at">,
): Promise<boolean> {
  const t = tx.tables[table];
  const { from, to } = SETTLEMENT_EVENTS[event];
  const isUnclaimed = table === "openInvocations" ? statusIs(tx.tables.openInvocations.status, "pending") : undefined;
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
