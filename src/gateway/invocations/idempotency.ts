// Idempotency keys: within its 24 hours, a caller's key stands for the first call that it was sent with.
import { and, eq, gt, lte, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { IDEMPOTENCY_HOURS } from "../../core/limits.ts";
import { prepared, type Reader, type Tx } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

const TURNS_MAX = 5;

export interface Idempotency {
  readonly key: string;
  readonly body_sha256: string;
  /** Earliest possible time now: a key that expires too early would let its call be made twice. */
  readonly asked_at: number;
  /** Latest possible time now. */
  readonly latest: number;
}

const insertIdempotencyKey = prepared(({ db, tables: { idempotencyKeys } }: Tx) =>
  db
    .insert(idempotencyKeys)
    .values({
      tenant: sql.placeholder("tenant"),
      caller: sql.placeholder("caller"),
      agent_id: sql.placeholder("agent_id"),
      key: sql.placeholder("key"),
      body_sha256: sql.placeholder("body_sha256"),
      invocation_id: sql.placeholder("invocation_id"),
      expires_at: sql.placeholder("expires_at"),
    })
    .onConflictDoNothing()
    .returning({ key: idempotencyKeys.key }),
);

/**
 * Takes the key for this call: its ID, or that of the call that the key stands for already.
 *
 * @throws Fault `conflict` when the key was taken with another body
 */
export async function takeIdempotencyKey(tx: Tx, row: InvocationRow, wanted: Idempotency): Promise<string> {
  for (let turn = 0; turn < TURNS_MAX; turn++) {
    await dropExpiredKey(tx, row, wanted);
    const taken = await insertIdempotencyKey(tx).execute({
      tenant: row.tenant,
      caller: row.caller,
      agent_id: row.agent_id,
      key: wanted.key,
      body_sha256: wanted.body_sha256,
      invocation_id: row.id,
      expires_at: wanted.latest + IDEMPOTENCY_HOURS * 3_600_000,
    });
    if (taken.length > 0) return row.id;
    const first = await findByIdempotencyKey(tx, row, wanted);
    if (first !== null) return first;
    // On Postgres it may have been freed between the two looks, by a payment that was declined.
  }
  throw new Fault("unavailable", "Idempotency-Key: in use by a call that is just being refused", {
    retryAfterSeconds: 1,
  });
}

type KeyOwner = Pick<InvocationRow, "tenant" | "caller" | "agent_id">;

function ownKey({ idempotencyKeys: t }: Tables, owner: KeyOwner, key: string) {
  return and(eq(t.tenant, owner.tenant), eq(t.caller, owner.caller), eq(t.agent_id, owner.agent_id), eq(t.key, key));
}

async function dropExpiredKey(tx: Tx, owner: KeyOwner, { key, asked_at }: Idempotency): Promise<void> {
  const { idempotencyKeys: t } = tx.tables;
  await tx.db.delete(t).where(and(ownKey(tx.tables, owner, key), lte(t.expires_at, asked_at)));
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

/** The same for any body. */
export async function findKey(
  reader: Reader,
  owner: KeyOwner,
  { key, asked_at }: Pick<Idempotency, "key" | "asked_at">,
): Promise<Tables["idempotencyKeys"]["$inferSelect"] | null> {
  const { idempotencyKeys: t } = reader.tables;
  const [known] = await reader.db
    .select()
    .from(t)
    .where(and(ownKey(reader.tables, owner, key), gt(t.expires_at, asked_at)));
  return known ?? null;
}

/** Frees the key of a call that was refused after all, so that it may be sent again with another payment. */
export async function freeIdempotencyKey(tx: Tx, row: KeyOwner & Pick<InvocationRow, "id">): Promise<void> {
  const { idempotencyKeys: t, invocationBodies: bodies } = tx.tables;
  const [stored] = await tx.db
    .select({ call: bodies.call })
    .from(bodies)
    .where(and(eq(bodies.tenant, row.tenant), eq(bodies.invocation_id, row.id)));
  if (stored?.call == null) return;
  // The key passes to the upstream, so it stands among the headers of the stored call.
  const { headers } = JSON.parse(stored.call) as Call;
  const key = headers.find(([name]) => name === "idempotency-key")?.[1];
  if (key === undefined) return;
  await tx.db.delete(t).where(and(ownKey(tx.tables, row, key), eq(t.invocation_id, row.id)));
}
