// Which exact totals an invocation takes part in, so that a page of the history costs the same at any size. Every write that
// changes a counted field of one must call this module, or say the same in its statement (commands/totals.ts).
import type { ErrorClass, InvocationStatus, SettlementStatus } from "../../core/states.ts";
import type { CommandEffects } from "../../storage/commands.ts";
import { periodOf } from "../../storage/counts.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

type CountedFields = Pick<
  InvocationRow,
  "tenant" | "id" | "agent_id" | "mode" | "status" | "model" | "error_class" | "settlement_status"
>;

/** Adds an invocation to every total that it takes part in, or takes it out of them. */
export function countWhole({ count }: Pick<CommandEffects, "count">, row: CountedFields, delta: 1 | -1): void {
  const { tenant } = row;
  const period = periodOf(row.id);
  count(tenant, period, "all", "", delta);
  count(tenant, period, "agent", row.agent_id, delta);
  count(tenant, period, "mode", row.mode, delta);
  count(tenant, period, "status", row.status, delta);
  if (row.model !== null) count(tenant, period, "model", row.model, delta);
  if (row.error_class !== null) count(tenant, period, "error_class", row.error_class, delta);
  if (row.settlement_status !== null) count(tenant, period, "settlement", row.settlement_status, delta);
}

export function countMove(
  { count }: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  from: InvocationStatus,
  to: InvocationStatus,
): void {
  const period = periodOf(id);
  count(tenant, period, "status", from, -1);
  count(tenant, period, "status", to, 1);
}

export function countErrorClass(
  { count }: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  errorClass: ErrorClass,
): void {
  count(tenant, periodOf(id), "error_class", errorClass, 1);
}

export function countSettlement(
  { count }: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  from: SettlementStatus,
  to: SettlementStatus,
): void {
  const period = periodOf(id);
  count(tenant, period, "settlement", from, -1);
  count(tenant, period, "settlement", to, 1);
}
