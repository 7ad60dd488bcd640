// Idempotency keys: within its 24 hours, a caller's key stands for the first call that it was sent with. Keys stand in slots
// of time, which go as a whole when they are over. A key stands in each slot that it lives in, which is one or two of them.
// So two calls with one key always meet in the slot of the later one, whichever replicas took them, and wherever a slot ends.
import { and, eq, gt, gte } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { IDEMPOTENCY_HOURS } from "../../core/limits.ts";
import { HOUR_MS } from "../../core/time.ts";
import type { Reader, Tx } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

export interface Idempotency {
  readonly key: string;
  readonly body_sha256: string;
  /** Earliest possible time now: a key that expires too early would let its call be made twice. */
  readonly asked_at: number;
  /** Latest possible time now. */
  readonly latest: number;
}

/** Longer than a key lives, so that a key stands in two slots at most. */
export const SLOT_HOURS = 48;
export const IDEMPOTENCY_MS = IDEMPOTENCY_HOURS * HOUR_MS;

/** The slot of a time, by the hour since the epoch at which it begins. */
const slotOf = (time: number): number => Math.floor(time / HOUR_MS / SLOT_HOURS) * SLOT_HOURS;

/**
 * The slots of a key of now, in their order. Now is one of its two bounds, for they are what two clocks say; between them
 * there can be years after a clock was set.
 */
export function slotsOf({ asked_at, latest }: Pick<Idempotency, "asked_at" | "latest">): number[] {
  const slots = [asked_at, asked_at + IDEMPOTENCY_MS, latest, latest + IDEMPOTENCY_MS].map(slotOf);
  return [...new Set(slots)].sort((one, other) => one - other);
}

/** Before this hour, slots hold nothing that anybody looks at: `now` may be late by an hour. */
export const slotsOver = (now: number): number => slotOf(now - HOUR_MS);

type KeyOwner = Pick<InvocationRow, "tenant" | "caller" | "agent_id">;

function ownKey({ idempotencyKeys: t }: Tables, owner: KeyOwner, key: string) {
  return and(eq(t.tenant, owner.tenant), eq(t.caller, owner.caller), eq(t.agent_id, owner.agent_id), eq(t.key, key));
}

/**
 * The invocation that a caller's idempotency key stands for, or null.
 *
 * @throws Fault `conflict` when it stands for another body
 */
export async function findByIdempotencyKey(
  reader: Reader,
  owner: KeyOwner,
  wanted: Idempotency,
): Promise<string | null> {
  const known = await findKey(reader, owner, wanted);
  if (known === null) return null;
  if (known.body_sha256 !== wanted.body_sha256) {
    throw new Fault("conflict", "Idempotency-Key: already used with another body");
  }
  return known.invocation_id;
}

/**
 * The same for any body. It may also stand in a later slot: of a clock that was ahead, and was put right before this process
 * began.
 */
export async function findKey(
  reader: Reader,
  owner: KeyOwner,
  { key, ...time }: Pick<Idempotency, "key" | "asked_at" | "latest">,
): Promise<Tables["idempotencyKeys"]["$inferSelect"] | null> {
  const { idempotencyKeys: t } = reader.tables;
  const [earliest = 0] = slotsOf(time);
  const [known] = await reader.db
    .select()
    .from(t)
    .where(and(ownKey(reader.tables, owner, key), gte(t.slot, earliest), gt(t.expires_at, time.asked_at)))
    .limit(1);
  return known ?? null;
}

/** Frees the key of a call that was refused after all, so that it may be sent again with another payment. */
export async function freeIdempotencyKey(tx: Tx, { tenant, id }: Pick<InvocationRow, "tenant" | "id">): Promise<void> {
  const { idempotencyKeys: t, openInvocations: open } = tx.tables;
  const [row] = await tx.db
    .select({ tenant: open.tenant, caller: open.caller, agent_id: open.agent_id, call: open.call })
    .from(open)
    .where(and(eq(open.tenant, tenant), eq(open.id, id)));
  if (row === undefined) return;
  // The key passes to the upstream, so it stands among the headers of the stored call.
  const { headers } = JSON.parse(row.call) as Call;
  const key = headers.find(([name]) => name === "idempotency-key")?.[1];
  if (key === undefined) return;
  await tx.db.delete(t).where(and(ownKey(tx.tables, row, key), eq(t.invocation_id, id)));
}
