// Paid calls that are still to be made, as far as they need a credential: they were paid for in the trust that they can
// be made, so neither is it deleted nor kept from their hosts before.
import { and, eq, gt, isNotNull } from "drizzle-orm";
import { findInTurns } from "../../concurrency/store-turns.ts";
import type { Call } from "../../core/call.ts";
import type { Reader } from "../../storage/store.ts";

/** Calls of one step, each with up to some kilobytes of headers. */
const STEP = 32;

export async function paidCallNamesCredential(reader: Reader, tenant: string, id: string): Promise<boolean> {
  const { payments: t } = reader.tables;
  const calls = await reader.db
    .select({ nonce: t.nonce })
    .from(t)
    .where(and(eq(t.tenant, tenant), eq(t.call_credential_ref, id)))
    .limit(1);
  return calls.length > 0;
}

/** What of them goes to a URL that is not allowed, for its tenant; null when nothing does. */
export async function paidCallShutOut(
  reader: Reader,
  tenant: string,
  credentialId: string,
  isAllowed: (url: string) => boolean,
): Promise<string | null> {
  const found = await findInTurns(
    tenant,
    STEP,
    (after, limit) => nextCalls(reader, tenant, credentialId, after, limit),
    ({ call }) => call !== null && !isAllowed((JSON.parse(call) as Call).url),
  );
  return found === null ? null : `a paid call that is still to be made (${found.id})`;
}

function nextCalls(
  { db, tables }: Reader,
  tenant: string,
  credentialId: string,
  after: string,
  limit: number,
) {
  const { payments: t, invocationBodies: bodies } = tables;
  return db
    .select({ id: t.invocation_id, call: bodies.call })
    .from(t)
    .innerJoin(bodies, and(eq(bodies.tenant, t.tenant), eq(bodies.invocation_id, t.invocation_id)))
    .where(
      and(
        eq(t.tenant, tenant),
        eq(t.call_credential_ref, credentialId),
        isNotNull(bodies.call),
        gt(t.invocation_id, after),
      ),
    )
    .orderBy(t.invocation_id)
    .limit(limit);
}
