// The transactional path: a call that has passed the checks is recorded, paid for and offered to the executor, all
// before its 202. A call that the checks refuse leaves no invocation behind. A call whose payment the facilitator
// declines does, since it is recorded before money can move.

import { Fault } from "../../core/fault.ts";
import { bodyInSteps } from "../../kernel/turns.ts";
import { type CallBody, hashOf, wholeOf } from "../../wire/body.ts";
import { parseRpcRequest } from "../../wire/jsonrpc.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { findInvocation } from "../invocations/history.ts";
import type { AcceptedCall } from "../invocations/service.ts";
import type { PaidHeaders, Payments } from "../payment/service.ts";
import { type CallKind, type CheckOptions, checkCall, type ParsedRequest, type ProxyCall } from "./checks.ts";
import { acceptedOf, type Draft, otherPath, type RecordOptions, record, type StoredCall } from "./record.ts";
import { mcpVersion, passedHeaders, passesEchoedHeaders } from "./request-headers.ts";

/** A place for a call that is about to be stored, and its claim for the same write. Either `run` or `giveBack` follows. */
export interface ReservedPlace {
  readonly claim: NonNullable<Draft["claim"]>;
  /** The call is stored and claimed. */
  run(accepted: AcceptedCall): void;
  /** The call is not stored, or nobody knows. */
  giveBack(): void;
}

export interface AdmitOptions extends CheckOptions, Pick<RecordOptions, "replica" | "meters"> {
  readonly payments: Payments;
  /** A place for a call that can start as soon as it is stored; null when it has to wait. */
  reserve(accepted: AcceptedCall): ReservedPlace | null;
  /** Called with each accepted call that has no place, after it is durable. */
  offer(accepted: AcceptedCall): void;
}

/** An accepted call. Its body is stored, so its memory can be freed. */
export interface Admitted extends StoredCall {
  /** What the policy warns of. */
  readonly warning: string | null;
}

/** The gateway does not read the body, so no header can repeat parts of it. */
const PLAIN: ParsedRequest = { method: null, tool: null, calls: [{ tool: null }], echoedMcpHeaders: false };

const TRANSACTIONAL: CallKind<ParsedRequest> = { suffix: "", plain: PLAIN, parse, parseAny: async () => PLAIN };

/** Exactly one request. */
async function parse(
  { mcp_protocol_version }: InvocableAgent,
  body: CallBody,
  { headers, caller }: ProxyCall,
): Promise<ParsedRequest> {
  const bytes = body instanceof Uint8Array ? body : await wholeOf(body, caller.tenant);
  const request = await bodyInSteps(bytes, parseRpcRequest(bytes), caller.tenant);
  if (!request.ok) throw new Fault("invalid_request", `body: ${request.problem}`);
  const { method, tool, protocolVersion } = request;
  const version = mcpVersion(headers) ?? protocolVersion ?? mcp_protocol_version;
  const echoedMcpHeaders = passesEchoedHeaders(headers, bytes, request, version);
  return { method, tool, calls: [{ tool }], echoedMcpHeaders };
}

/**
 * Accepts a call, durably.
 *
 * @throws Fault of every kind that the order of checks names
 */
export async function admit(options: AdmitOptions, call: ProxyCall): Promise<Admitted> {
  const checked = await checkCall(options, call, TRANSACTIONAL);
  const { paymentState, warning } = checked;
  if (paymentState.kind === "earlier") return { id: paymentState.id, isNew: false, payment: null, warning };
  const headers = passedHeaders(call.headers, checked.parsed.echoedMcpHeaders, options.pseudonym);
  const hash = checked.agent.emit_receipts ? await hashOf(checked.body, call.caller.tenant) : null;
  const accepted = acceptedOf(options, call, checked, { mode: "transactional", headers, hash });
  // A call that waits for its settlement is offered when the payment has been collected.
  const isReady = accepted.row.settlement_status === null;
  const place = isReady ? options.reserve(accepted) : null;
  let isRun = false;
  try {
    const { id, isNew, payment } = await record(options, checked, { accepted, claim: place?.claim ?? null });
    if (isNew && isReady) {
      isRun = true;
      if (place === null) options.offer(accepted);
      else place.run(accepted);
    }
    return { id, isNew, payment, warning };
  } finally {
    if (!isRun) place?.giveBack();
  }
}

/** A new call that costs nothing has no payment to settle. */
export const isSettled = ({ isNew, payment }: Admitted): boolean => isNew && payment === null;

/**
 * Settles the payment of an accepted call, and gives the headers of its answer.
 *
 * @throws Fault of every kind that a settlement may end with
 */
export function settle(options: AdmitOptions, call: ProxyCall, { id, isNew, payment }: Admitted): Promise<PaidHeaders> {
  return isNew && payment !== null ? options.payments.settle(payment) : recall(options, call, id);
}

/** @throws Fault `conflict` when the first call of this key or payment is a streaming one */
async function recall(options: AdmitOptions, { caller }: ProxyCall, id: string): Promise<PaidHeaders> {
  const { mode } = await findInvocation(options.store.read, caller.tenant, id);
  if (mode === "streaming") throw otherPath(id);
  return options.payments.recall(caller.tenant, id);
}
