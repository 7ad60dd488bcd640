// Which agent a list of allowed hosts would keep from its credential.
import { and, eq, gt, isNotNull, isNull } from "drizzle-orm";
import { usedAtInTurns } from "../credentials/service.ts";

/** The first live agent that uses the credential at a URL which is not allowed, for its tenant; null for none. */
export const agentShutOut = usedAtInTurns({
  pageAfter: ({ db, tables: { agents } }, { tenant, credentialId }, after, limit) =>
    db
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
      .limit(limit),
  urlOf: ({ url }) => url,
  nameOf: ({ id, name }) => `the agent ${JSON.stringify(name)} (${id})`,
});
