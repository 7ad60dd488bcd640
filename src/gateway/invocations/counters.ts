// Which exact totals an invocation takes part in, so that a page of the history costs the same at any size. Every write that
// changes a counted field of one must call this module, or say the same in its statement (commands/totals.ts).
import type { ErrorClass, InvocationStatus, SettlementStatus } from "../../core/states.ts";
import type { CommandEffects } from "../../storage/commands.ts";
import type { InvocationRow } from "./service.ts";

type CountedFields = Pick<
  InvocationRow,
  "tenant" | "agent_id" | "mode" | "status" | "model" | "error_class" | "settlement_status"
>;

/** Adds an invocation to every total that it takes part in, or takes it out of them. */
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

export function countMove(
  { count }: Pick<CommandEffects, "count">,
  tenant: string,
  from: InvocationStatus,
  to: InvocationStatus,
): void {
  count(tenant, "status", from, -1);
  count(tenant, "status", to, 1);
}

export function countErrorClass(
  { count }: Pick<CommandEffects, "count">,
  tenant: string,
  errorClass: ErrorClass,
): void {
  count(tenant, "error_class", errorClass, 1);
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
