// Which exact totals an invocation takes part in, so that a page of the history costs the same at any size.
// Every write that changes a counted field of an invocation must call this module in the same write.
import type { ErrorClass, InvocationStatus, SettlementStatus } from "../../core/states.ts";
import type { Tx } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

/** Adds an invocation to every total that it takes part in, or takes it out of them. */
export function countWhole(tx: Tx, row: InvocationRow, delta: 1 | -1): void {
  const { tenant } = row;
  tx.count(tenant, "all", "", delta);
  tx.count(tenant, "agent", row.agent_id, delta);
  tx.count(tenant, "mode", row.mode, delta);
  tx.count(tenant, "status", row.status, delta);
  if (row.model !== null) tx.count(tenant, "model", row.model, delta);
  if (row.error_class !== null) tx.count(tenant, "error_class", row.error_class, delta);
  if (row.settlement_status !== null) tx.count(tenant, "settlement", row.settlement_status, delta);
}

export function countMove(tx: Tx, tenant: string, from: InvocationStatus, to: InvocationStatus): void {
  tx.count(tenant, "status", from, -1);
  tx.count(tenant, "status", to, 1);
}

export function countErrorClass(tx: Tx, tenant: string, errorClass: ErrorClass): void {
  tx.count(tenant, "error_class", errorClass, 1);
}

export function countSettlement(tx: Tx, tenant: string, from: SettlementStatus, to: SettlementStatus): void {
  tx.count(tenant, "settlement", from, -1);
  tx.count(tenant, "settlement", to, 1);
}
