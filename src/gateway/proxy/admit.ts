// The transactional path: a call that has passed the checks is recorded, paid for and offered to the executor, all
// before its 202. What the checks refuse leaves no invocation behind; one whose payment the facilitator declines was
// recorded before money could move.

import { bodyInSteps } from "../../concurrency/run-steps.ts";
import { Fault } from "../../core/fault.ts";
import { parseRpcRequest } from "../../wire/jsonrpc.ts";
import type { InvocableAgent } from "../agents/service.ts";
import { findInvocation } from "../invocations/history.ts";
import type { AcceptedCall } from "../invocations/service.ts";
import type { PaidHeaders, PaymentRow, Payments } from "../payment/service.ts";
import { otherPath } from "./call-faults.ts";
import { type CallKind, type CheckOptions, checkCall, type Form, type ProxyCall } from "./checks.ts";
import { acceptedOf, type RecordOptions, record, type StoredCall } from "./record.ts";
import { mcpVersion, passedHeaders, passesMirrors } from "./request-headers.ts";

export interface TransactionalCall extends ProxyCall {
  /** Told when the body is stored, and need not be kept any longer. */
  stored(): void;
}

export interface AdmitOptions extends CheckOptions, Pick<RecordOptions, "replica"> {
  readonly payments: Payments;
  /** Told of each accepted call, after it is durable. */
  offer(accepted: AcceptedCall): void;
}

export interface Admitted {
  readonly id: string;
  /** Of the answer: what is told of a payment that was settled, and the policy's warning. */
  readonly headers: Readonly<Record<string, string>>;
}

/** For an http agent, whose body means nothing to the gateway: no header can be said to say the same. */
const PLAIN: Form = { method: null, tool: null, calls: [{ tool: null }], mirrors: false };

const TRANSACTIONAL: CallKind<Form> = {
  suffix: "",
  anyForm: async () => PLAIN,
  formOf: async (agent, body, call) => (agent.protocol === "mcp" ? requestForm(agent, body, call) : PLAIN),
};

/** Exactly one request. */
async function requestForm(
  { mcp_protocol_version }: InvocableAgent,
  body: Uint8Array,
  { headers, caller }: ProxyCall,
): Promise<Form> {
  const request = await bodyInSteps("scan of a body", body, parseRpcRequest(body), caller.tenant);
  if (!request.ok) throw new Fault("invalid_request", `body: ${request.problem}`);
  const { method, tool, protocolVersion } = request;
  const version = mcpVersion(headers) ?? protocolVersion ?? mcp_protocol_version;
  return { method, tool, calls: [{ tool }], mirrors: passesMirrors(headers, body, request, version) };
}

/**
 * Accepts a call, durably, and settles its payment.
 *
 * @throws Fault of every kind that the order of checks names
 */
export async function admit(options: AdmitOptions, call: TransactionalCall): Promise<Admitted> {
  const { payments } = options;
  const { id, isNew, payment, warning } = await checkAndRecord(options, call);
  call.stored();
  call.note("invocation_id", id);
  const headers = isNew ? await settle(payments, payment) : await recall(options, call, id);
  return { id, headers: warning === null ? headers : { ...headers, "x-service-policy-warning": warning } };
}

async function settle(payments: Payments, payment: PaymentRow | null): Promise<PaidHeaders> {
  return payment === null ? {} : payments.settle(payment);
}

/** @throws Fault `conflict` when the first call of this key or payment is one that nobody but its caller can make */
async function recall(options: AdmitOptions, { caller }: ProxyCall, id: string): Promise<PaidHeaders> {
  const { mode } = await findInvocation(options.store.read, caller.tenant, id);
  if (mode === "streaming") throw otherPath(id);
  return options.payments.recall(caller.tenant, id);
}

interface Recorded extends StoredCall {
  /** What the policy warns of. */
  readonly warning: string | null;
}

/** The body is gone when this has ended, however long its payment takes. */
async function checkAndRecord(options: AdmitOptions, call: ProxyCall): Promise<Recorded> {
  const checked = await checkCall(options, call, TRANSACTIONAL);
  const { standing, warning } = checked;
  if (standing.kind === "earlier") return { id: standing.id, isNew: false, payment: null, warning };
  const headers = passedHeaders(call.headers, checked.form.mirrors, options.pseudonym);
  const accepted = await acceptedOf(call, checked, "transactional", headers, options.clock.now());
  const stored = await record(options, checked, { accepted, claim: null });
  // One that waits for its settlement is made when that has been collected.
  if (stored.isNew && accepted.row.settlement_status === null) options.offer(accepted);
  return { ...stored, warning };
}
