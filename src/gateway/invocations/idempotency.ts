// Idempotency keys: within its 24 hours, a caller's key stands for the first call that it was sent with.
import { and, eq, gt } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
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
