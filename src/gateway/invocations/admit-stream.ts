// The streaming path: a call that has passed the checks takes a place, is recorded, paid for and claimed, and is then
// its caller's to make, who holds the connection. A call whose payment is unknown stays pending; the same payment
// sent again takes it up where it stood, whichever replica that reaches, and only one of its callers gets it.
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import { parseRpcMessages, type RpcMessage } from "../../core/messages.ts";
import { untilStored } from "../../storage/persist.ts";
import type { PaidHeaders, Payments } from "../payment/service.ts";
import type { OpenedCall, OpenedConnection, Place, StreamCall, StreamRequest } from "../streaming/service.ts";
import {
  type Checked,
  type CheckOptions,
  checkCall,
  type Form,
  knownAgent,
  mayCall,
  type Path,
} from "./checks.ts";
import { passedToStream } from "./command.ts";
import { faultOf, otherPath, withId } from "./faults.ts";
import { findInvocation } from "./history.ts";
import { acceptedOf, record } from "./record.ts";
import { abandon, claim, type InvocationKey } from "./service.ts";

export interface AdmitStreamOptions extends CheckOptions {
  readonly payments: Payments;
  /** This replica's ID. */
  readonly replica: string;
  /**
   * Waits a little for a place of the agent.
   *
   * @throws Fault `unavailable` when there is none
   */
  takePlace(agentId: string, isCall: boolean, signal: AbortSignal): Promise<Place>;
  /** Aborted when the process is about to end. */
  readonly stopping: AbortSignal;
}

const RETRY_AFTER_SECONDS = 5;

interface StreamForm extends Form {
  readonly listsTools: boolean;
}

const PLAIN: StreamForm = { method: null, tool: null, calls: [{ tool: null }], listsTools: false };

const STREAMING: Path<StreamForm> = {
  suffix: "/stream",
  formOf: ({ protocol }, body) => (protocol === "mcp" ? messagesForm(body) : PLAIN),
};

function messagesForm(body: Uint8Array): StreamForm {
  const parsed = parseRpcMessages(body);
  if (!parsed.ok) throw new Fault("invalid_request", `body: ${parsed.problem}`);
  const { messages } = parsed;
  const calls = messages.filter(({ isCall }) => isCall);
  const shown = shownMessage(messages, calls);
  const listsTools = messages.some(({ method }) => method?.endsWith("/list"));
  return { method: shown?.method ?? null, tool: shown?.tool ?? null, calls, listsTools };
}

/** Of a batch the history shows its one call, if it has no other. */
function shownMessage(messages: readonly RpcMessage[], calls: readonly RpcMessage[]): RpcMessage | undefined {
  if (messages.length === 1) return messages[0];
  return calls.length === 1 ? calls[0] : undefined;
}

export interface AdmittedStream {
  readonly opened: OpenedCall;
  readonly body: Uint8Array;
}

/**
 * Accepts a call that is to be made at once.
 *
 * @throws Fault of every kind that the order of checks names; those that come after the record carry its ID
 */
export async function admitStream(options: AdmitStreamOptions, call: StreamCall): Promise<AdmittedStream> {
  const checked = await checkCall(options, call, STREAMING);
  const { agent, form, body } = checked;
  const place = await options.takePlace(agent.id, form.calls.length > 0, call.signal);
  try {
    return { opened: { ...(await open(options, call, checked)), place }, body };
  } catch (error) {
    place.release();
    throw error;
  }
}

type Opened = Omit<OpenedCall, "place">;

async function open(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: Checked<StreamForm>,
): Promise<Opened> {
  const { standing, agent } = checked;
  if (standing.kind === "earlier") return resume(options, call, checked, standing.id);
  const { clock, payments, replica } = options;
  const headers = passedToStream(call.headers, agent.protocol);
  const whole = acceptedOf(call, checked, "streaming", headers, clock.now());
  // Only what may be shown is stored: whoever takes the call up again brings its body along.
  const accepted = { ...whole, body: shownPart(checked) };
  const { tenant, id, settlement_status } = accepted.row;
  const key = { tenant, id };
  const waits = settlement_status === "pending";
  const stored = await record(options, checked, { accepted, owner: waits ? null : replica }).catch(
    (error) => {
      // It may have been stored all the same, and then nobody would make it, nor end it.
      if (!waits) void disown(options, key);
      throw error;
    },
  );
  if (!stored.isNew) return resume(options, call, checked, stored.id);
  call.note("invocation_id", id);
  if (stored.payment === null || !waits) return openedOf(key, checked, accepted.call, {});
  const paid = await withId(id, payments.settle(stored.payment));
  return take(options, call, checked, { key, paid });
}

/** The start of the body, as far as it is captured. */
function shownPart({ agent, body }: Checked<Form>): Uint8Array {
  return agent.capture_body ? body.subarray(0, CAPTURE_BYTES_MAX) : new Uint8Array();
}

async function resume(
  options: AdmitStreamOptions,
  call: StreamCall,
  checked: Checked<StreamForm>,
  id: string,
): Promise<Opened> {
  const { store, payments } = options;
  const key = { tenant: call.caller.tenant, id };
  call.note("invocation_id", id);
  const { mode } = await findInvocation(store.read, key.tenant, id);
  if (mode !== "streaming") throw otherPath(id);
  const paid = await withId(id, payments.recall(key.tenant, id));
  return take(options, call, checked, { key, paid });
}

interface Waiting {
  readonly key: InvocationKey;
  /** What is told of its payment so far. */
  readonly paid: PaidHeaders;
}

/**
 * Takes a call that is paid for, if nobody else has.
 *
 * @throws Fault `unavailable` while its payment is unknown; `conflict` when it has been made
 */
async function take(
  { store, clock, payments, replica: owner, stopping }: AdmitStreamOptions,
  { signal }: StreamCall,
  checked: Checked<StreamForm>,
  { key, paid }: Waiting,
): Promise<Opened> {
  let again = false;
  const claimed = await untilStored(
    () => {
      // Whoever has gone may come back with the same payment, as long as the call has not been made.
      if (signal.aborted || stopping.aborted) throw unknownYet(key.id);
      const attempt = { key, owner, now: clock.now(), inHand: null, again };
      again = true;
      return store.write((tx) => claim(tx, attempt));
    },
    () => signal.aborted || stopping.aborted,
  );
  const isTold = Object.keys(paid).length > 0;
  const told = claimed === null || isTold ? paid : await payments.recall(key.tenant, key.id);
  if (claimed !== null) return openedOf(key, checked, claimed.call, told);
  const { status } = await findInvocation(store.read, key.tenant, key.id);
  if (status === "pending") throw unknownYet(key.id);
  throw faultOf("conflict", "this call has been made already", key.id, { headers: paid });
}

function unknownYet(id: string): Fault {
  const message = "the payment's outcome is not known yet: send the same payment again";
  return faultOf("unavailable", message, id, { retryAfterSeconds: RETRY_AFTER_SECONDS });
}

function openedOf(
  key: InvocationKey,
  { agent, form, warning }: Checked<StreamForm>,
  { url, credential_ref, headers, request_id, capture, receipt }: Call,
  paid: PaidHeaders,
): Opened {
  const told = warning === null ? paid : { ...paid, "x-service-policy-warning": warning };
  const { tenant } = key;
  const request = { tenant, agentId: agent.id, url, credential_ref, headers, request_id };
  return { ...request, key, capture, receipt, listsTools: form.listsTools, told };
}

/** Ends a call whose record nobody can tell of. */
async function disown({ store, clock, stopping }: AdmitStreamOptions, key: InvocationKey): Promise<void> {
  const end = () => store.write((tx) => abandon(tx, key, "internal", clock.now()));
  await untilStored(end, () => stopping.aborted).catch(() => {});
}

/**
 * A GET or DELETE to an mcp agent. It is part of the connection, so it is neither judged nor paid for.
 *
 * @throws Fault `method_not_allowed` when the agent is none of MCP; else as the checks of a call
 */
export async function admitConnection(
  options: AdmitStreamOptions,
  request: StreamRequest,
  method: OpenedConnection["method"],
): Promise<OpenedConnection> {
  const agent = await knownAgent(options, request);
  if (agent.protocol !== "mcp") {
    throw new Fault("method_not_allowed", "the agent's protocol has other methods", { allow: ["POST"] });
  }
  const url = mayCall(options, agent);
  const place = await options.takePlace(agent.id, false, request.signal);
  return {
    tenant: request.caller.tenant,
    agentId: agent.id,
    url,
    credential_ref: agent.credential_ref,
    headers: passedToStream(request.headers, agent.protocol),
    request_id: request.requestId,
    place,
    method,
  };
}
