// What the rest of the gateway asks of receipts: that an end owes one, written with the end itself. See emit.ts for
// how they are made.
import { sql } from "drizzle-orm";
import { prepared, type Tx } from "../../storage/store.ts";

const insertDue = prepared(({ db, tables: { receiptsDue } }: Tx) =>
  db.insert(receiptsDue).values({
    tenant: sql.placeholder("tenant"),
    invocation_id: sql.placeholder("invocation_id"),
  }),
);

/** Of a call that has ended and whose payment is not open, once. */
export async function oweReceipt(
  tx: Tx,
  { tenant, id }: { readonly tenant: string; readonly id: string },
): Promise<void> {
  await insertDue(tx).execute({ tenant, invocation_id: id });
}
