// Which exact totals an invocation takes part in, so that a page of the history costs the same at any size. Every write that
// changes a counted field of one must call this module, or say the same in its statement (commands/totals.ts).
import type { ErrorClass, InvocationStatus, SettlementStatus } from "../../core/states.ts";
import type { CommandEffects } from "../../storage/store.ts";
import { periodOf } from "../../storage/totals.ts";
import type { InvocationKey, InvocationRow } from "./service.ts";

type CountedFields = Pick<
  InvocationRow,
  "tenant" | "id" | "agent_id" | "mode" | "status" | "model" | "error_class" | "settlement_status"
>;

/**
 * Adds an invocation to every total that it takes part in, or takes it out of them.
 *
 * @param status where the row does not have it yet
 */
export function countWhole(
  effects: Pick<CommandEffects, "count">,
  row: CountedFields,
  delta: 1 | -1,
  status: InvocationStatus = row.status,
): void {
  const { tenant } = row;
  const period = periodOf(row.id);
  effects.count(tenant, period, "all", "", delta);
  effects.count(tenant, period, "agent", row.agent_id, delta);
  effects.count(tenant, period, "mode", row.mode, delta);
  effects.count(tenant, period, "status", status, delta);
  if (row.model !== null) effects.count(tenant, period, "model", row.model, delta);
  if (row.error_class !== null) effects.count(tenant, period, "error_class", row.error_class, delta);
  if (row.settlement_status !== null) effects.count(tenant, period, "settlement", row.settlement_status, delta);
}

export function countMove(
  effects: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  from: InvocationStatus,
  to: InvocationStatus,
): void {
  const period = periodOf(id);
  effects.count(tenant, period, "status", from, -1);
  effects.count(tenant, period, "status", to, 1);
}

export function countErrorClass(
  effects: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  errorClass: ErrorClass,
): void {
  effects.count(tenant, periodOf(id), "error_class", errorClass, 1);
}

export function countSettlement(
  effects: Pick<CommandEffects, "count">,
  { tenant, id }: InvocationKey,
  from: SettlementStatus,
  to: SettlementStatus,
): void {
  const period = periodOf(id);
  effects.count(tenant, period, "settlement", from, -1);
  effects.count(tenant, period, "settlement", to, 1);
}
