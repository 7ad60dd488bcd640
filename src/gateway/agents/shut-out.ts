// Which agent a list of allowed hosts would keep from its credential. A credential may have thousands of agents, so
// they are looked at in steps, in turn with other tenants, and other requests go on in between.
import { and, eq, gt, isNotNull, isNull } from "drizzle-orm";
import { findInTurns } from "../../concurrency/store-turns.ts";
import type { Reader } from "../../storage/store.ts";

/** About 4 ms of SQLite when the agents are as large as they can be. */
const STEP = 32;

/** The first live agent that uses the credential at a URL which is not allowed, for its tenant; null for none. */
export async function agentShutOut(
  reader: Reader,
  tenant: string,
  credentialId: string,
  isAllowed: (url: string) => boolean,
): Promise<string | null> {
  const found = await findInTurns(
    tenant,
    STEP,
    (after, limit) => nextAgents(reader, tenant, credentialId, after, limit),
    ({ url }) => url !== null && !isAllowed(url),
  );
  return found === null ? null : `the agent ${JSON.stringify(found.name)} (${found.id})`;
}

function nextAgents(
  { db, tables: { agents } }: Reader,
  tenant: string,
  credentialId: string,
  after: string,
  limit: number,
) {
  return db
    .select({ id: agents.id, name: agents.name, url: agents.upstream_url })
    .from(agents)
    .where(
      and(
        eq(agents.tenant, tenant),
        eq(agents.credential_ref, credentialId),
        isNull(agents.deleted_at),
        isNotNull(agents.upstream_url),
        gt(agents.id, after),
      ),
    )
    .orderBy(agents.id)
    .limit(limit);
}
