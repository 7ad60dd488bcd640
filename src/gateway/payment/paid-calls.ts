// Paid calls that are still to be made and need a credential. Their callers paid because the calls can be made, so until
// then the credential is neither deleted nor kept from their hosts.
import { and, eq, gt } from "drizzle-orm";
import type { Call } from "../../core/call.ts";
import type { Reader } from "../../storage/store.ts";
import { usedAtInTurns } from "../credentials/service.ts";

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
export const paidCallShutOut = usedAtInTurns({
  pageAfter: ({ db, tables: { payments: t, openInvocations: open } }, { tenant, credentialId }, after, limit) =>
    db
      .select({ id: t.invocation_id, call: open.call })
      .from(t)
      .innerJoin(open, and(eq(open.tenant, t.tenant), eq(open.id, t.invocation_id)))
      .where(and(eq(t.tenant, tenant), eq(t.call_credential_ref, credentialId), gt(t.invocation_id, after)))
      .orderBy(t.invocation_id)
      .limit(limit),
  urlOf: ({ call }) => (JSON.parse(call) as Call).url,
  nameOf: ({ id }) => `a paid call that is still to be made (${id})`,
});
