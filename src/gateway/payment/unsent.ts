// The payment of a call that ended before anything of the payment was sent: it is never sent.
import { and, eq } from "drizzle-orm";
import { isEnded } from "../../core/states.ts";
import type { Tx } from "../../storage/store.ts";
import { type InvocationKey, refuseSettlement } from "../invocations/service.ts";
import { closeUnsent, lease, type OpenPayment } from "./store.ts";

/** In the write that ends the call, or later. False when the payment may have left: then it stays open. */
export async function closeIfUnsent(tx: Tx, key: InvocationKey, now: number): Promise<boolean> {
  const attempts = await closeUnsent(tx, key, now);
  if (attempts === null) return false;
  await refuseSettlement(tx, key, JSON.stringify({ attempts, reason: "cancelled" }), now);
  return true;
}

/** Takes a due payment for another attempt, like `lease`. If its call has ended and nothing was sent, it is closed. */
export async function leaseUnlessOver(
  tx: Tx,
  seen: OpenPayment,
  now: number,
  until: number,
): Promise<OpenPayment | null> {
  const key = { tenant: seen.tenant, id: seen.invocation_id };
  const isOver = seen.sent_at === null && (await isCallOver(tx, key)) && (await closeIfUnsent(tx, key, now));
  return isOver ? null : lease(tx, seen, now, until);
}

async function isCallOver({ db, tables: { invocations: t } }: Tx, { tenant, id }: InvocationKey): Promise<boolean> {
  const [row] = await db
    .select({ status: t.status })
    .from(t)
    .where(and(eq(t.tenant, tenant), eq(t.id, id)));
  return row !== undefined && isEnded(row.status);
}
