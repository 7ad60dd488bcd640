// The tables of large bodies, which stand in parts.
import type { Columns } from "./columns.ts";

export type BodyKind = "request" | "response";

export function bodyTables(c: Columns) {
  return {
    /** Large bodies: of a call that has not ended its whole request, then the first MiB of what is captured. */
    bodyParts: c.table("body_parts", {
      invocation_id: c.text().notNull(),
      tenant: c.text().notNull(),
      kind: c.text().$type<BodyKind>().notNull(),
      /** The place in the body: 0 for the first. All parts but the last are of one length. */
      n: c.whole().notNull(),
      bytes: c.bytes().notNull(),
    }),

    /** Bodies of which parts are to be removed: see gateway/invocations/loose-parts.ts. */
    looseParts: c.table("loose_parts", {
      invocation_id: c.text().notNull(),
      tenant: c.text().notNull(),
      kind: c.text().$type<BodyKind>().notNull(),
      /** This part goes, and all that follow. */
      first: c.whole().notNull(),
      /** When they may go, by the database's clock; 0: they are going. */
      due_at: c.whole().notNull(),
    }),
  };
}
