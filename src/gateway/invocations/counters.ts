// Which exact totals an ended call takes part in, so that a page of the history costs the same at any size. The end of a
// call adds it (commands/end.ts); every other write that changes a counted field of one must call this module.
import type { SettlementStatus } from "../../core/states.ts";
import type { CommandEffects } from "../../storage/commands.ts";
import type { InvocationRow } from "./service.ts";

type CountedFields = Pick<
  InvocationRow,
  "tenant" | "agent_id" | "mode" | "status" | "model" | "error_class" | "settlement_status"
>;

/** Adds an ended call to every total that it takes part in, or takes it out of them. */
export function countWhole({ count }: Pick<CommandEffects, "count">, row: CountedFields, delta: 1 | -1): void {
  const { tenant } = row;
  count(tenant, "all", "", delta);
  count(tenant, "agent", row.agent_id, delta);
  count(tenant, "mode", row.mode, delta);
  count(tenant, "status", row.status, delta);
  if (row.model !== null) count(tenant, "model", row.model, delta);
  if (row.error_class !== null) count(tenant, "error_class", row.error_class, delta);
  if (row.settlement_status !== null) count(tenant, "settlement", row.settlement_status, delta);
}

export function countSettlement(
  { count }: Pick<CommandEffects, "count">,
  tenant: string,
  from: SettlementStatus,
  to: SettlementStatus,
): void {
  count(tenant, "settlement", from, -1);
  count(tenant, "settlement", to, 1);
}
