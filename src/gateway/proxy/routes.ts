// The routes of the transactional path. A call that has passed the checks is recorded, its payment is settled and it is
// queued for the executor, all before the 202; after that its caller polls or cancels it. A call whose payment is declined
// leaves an invocation behind, because a call is recorded before money can move.
import { Fault, noSuch } from "../../core/fault.ts";
import { isId } from "../../core/id.ts";
import { isEnded } from "../../core/states.ts";
import { routes } from "../../http/elysia.ts";
import { jsonText } from "../../http/responses.ts";
import { type FastPath, type Scope, scopeOf } from "../../http/server.ts";
import { MAX } from "../../kernel/limits.ts";
import type { InFlight } from "../../kernel/wait.ts";
import { type CallBody, hashOf, judged } from "../../wire/body.ts";
import { RPC_REQUEST } from "../../wire/jsonrpc.ts";
import type { Network } from "../../x402/network.ts";
import type { InvocableAgent } from "../agents/store.ts";
import type { Scheduler } from "../executor/scheduler.ts";
import { type CompletionWaiters, findInvocation } from "../invocations/history.ts";
import { pollAnswer } from "../invocations/routes.ts";
import { endOpen, type InvocationKey, type InvocationRow } from "../invocations/service.ts";
import { type PaidHeaders, paidByHeader } from "../payment/service.ts";
import { mcpVersion, passedHeaders, passesEchoedHeaders, waitSeconds } from "../upstream/headers.ts";
import { type CallKind, type CallOptions, type CheckedCall, gatherCall, type ProxyCall, shownBy } from "./gather.ts";
import { type ParsedRequest, PLAIN } from "./judge.ts";
import { cancel, poll, proxyCall } from "./openapi.ts";
import { acceptedOf, otherPathFault, record } from "./record.ts";

export interface ProxyRoutesOptions extends CallOptions {
  readonly network: Network;
  readonly completionWaiters: CompletionWaiters;
  readonly admitting: Pick<InFlight, "enter">;
  readonly queue: Pick<Scheduler, "reserve" | "offer">;
  stop(id: string): void;
}

const hasEnded = () => new Fault("conflict", "the invocation has already ended");

/**
 * Cancels a call, and reads it in the same write: if a later read failed, it would be reported as not cancelled.
 * @throws Fault `conflict` when the call had ended before
 */
function cancelCall({ store, clock, payments }: ProxyRoutesOptions, key: InvocationKey): Promise<InvocationRow> {
  const now = clock.now();
  return store.write(async (tx) => {
    if (!(await endOpen(tx, key, "cancelled", now))) throw hasEnded();
    await payments.cancelled(tx, key, now);
    return findInvocation(tx, key.tenant, key.id);
  });
}

/** Tells the intake until when a body takes memory. The promise is made on demand, since a small body needs none. */
class BodyHold {
  #stored: PromiseWithResolvers<void> | null = null;
  #isOver = false;

  get until(): Promise<void> {
    this.#stored ??= Promise.withResolvers<void>();
    if (this.#isOver) this.#stored.resolve();
    return this.#stored.promise;
  }

  end(): void {
    this.#isOver = true;
    this.#stored?.resolve();
  }
}

const POLLED: CallKind<ParsedRequest> = {
  ...paidByHeader,
  suffix: "",
  plain: PLAIN,
  parse,
  parseAny: async () => PLAIN,
};

async function parse({ mcp_protocol_version }: InvocableAgent, body: CallBody, { headers, caller }: ProxyCall) {
  const [request, bytes] = await judged(body, RPC_REQUEST, caller.tenant);
  if (!request.ok) throw new Fault("invalid_request", `body: ${request.problem}`);
  const { method, tool, protocolVersion } = request;
  const version = mcpVersion(headers) ?? protocolVersion ?? mcp_protocol_version;
  const echoedMcpHeaders = passesEchoedHeaders(headers, bytes, request, version);
  return { method, tool, calls: [{ tool }], echoedMcpHeaders };
}

/** Admits a call and answers 202. The gateway does not stop before the call is admitted or refused. */
async function admitCall(options: ProxyRoutesOptions, request: Request, scope: Scope, agentId: string) {
  const { caller, requestId, note, intake } = scope;
  const { headers } = request;
  const hold = new BodyHold();
  const readBody = () => intake.readBody(request, caller.tenant, MAX.bodyBytes, hold);
  const call = { caller, agentId, headers, requestId, readBody, note };
  const leave = options.admitting.enter();
  const responseHeaders: Record<string, string> = {};
  let id: string;
  try {
    const checked = await gatherCall(options, call, POLLED);
    const { earlierId } = checked;
    const stored =
      earlierId === null ? await acceptNew(options, call, checked) : { id: earlierId, isNew: false, payment: null };
    hold.end();
    id = stored.id;
    note("invocation_id", id);
    responseHeaders["x-service-invocation-id"] = id;
    responseHeaders["location"] = `/v1/proxy/${agentId}/invocations/${id}`;
    if (stored.payment !== null)
      Object.assign(responseHeaders, await shownBy(POLLED, options.payments.settle(stored.payment)));
    else if (!stored.isNew) Object.assign(responseHeaders, await recall(options, caller.tenant, id));
    if (stored.isNew) options.meters.accepted();
    if (checked.warning !== null) responseHeaders["x-service-policy-warning"] = checked.warning;
  } finally {
    hold.end();
    leave();
  }
  const seconds = waitSeconds(headers);
  if (seconds > 0) {
    const read = () => findInvocation(options.store.read, caller.tenant, id);
    // The call is accepted, so its caller must get the ID even if the store fails during the wait.
    await options.completionWaiters
      .wait({ tenant: caller.tenant, id }, seconds, request.signal, read)
      .catch(() => null);
  }
  // An ID needs no escaping in JSON.
  return jsonText("accepted", `{"invocation_id":"${id}"}`, responseHeaders);
}

/** Stores a new call durably, and starts or queues it unless its payment must be settled first. */
async function acceptNew(options: ProxyRoutesOptions, call: ProxyCall, checked: CheckedCall<ParsedRequest>) {
  const headers = passedHeaders(call.headers, checked.parsed.echoedMcpHeaders, options.pseudonym);
  const hash = checked.agent.emit_receipts ? await hashOf(checked.body, call.caller.tenant) : null;
  const accepted = acceptedOf(options, call, checked, { mode: "transactional", headers, hash });
  // A paid call is queued later, when its payment has been collected.
  const isReady = accepted.row.settlement_status === null;
  const slot = isReady ? options.queue.reserve(accepted) : null;
  let isStarted = false;
  try {
    const stored = await record(options, checked, accepted, slot?.claim ?? null);
    if (stored.isNew && isReady) {
      isStarted = true;
      if (slot === null) options.queue.offer(call.caller.tenant, call.agentId, stored.id);
      else slot.run(accepted);
    }
    return stored;
  } finally {
    if (!isStarted) slot?.giveBack();
  }
}

/** The payment headers of an earlier call. @throws Fault `conflict` when that call was a streamed one */
async function recall({ store, payments }: ProxyRoutesOptions, tenant: string, id: string): Promise<PaidHeaders> {
  const { mode } = await findInvocation(store.read, tenant, id);
  if (mode === "streaming") throw otherPathFault(id);
  return shownBy(POLLED, payments.recall(tenant, id));
}

/** Serves POST /v1/proxy/:id past the router, unless its path is spelled in an unusual way. */
export function fastCalls(options: ProxyRoutesOptions): FastPath {
  return {
    method: "POST",
    prefix: "/v1/proxy/",
    answer: (request, scope, agentId) => admitCall(options, request, scope, agentId),
  };
}

export function proxyRoutes(options: ProxyRoutesOptions) {
  const { store, completionWaiters } = options;

  const findCall = async (tenant: string, params: { id: string; inv_id: string }): Promise<InvocationRow> => {
    if (!isId("agt", params.id)) throw noSuch("agt", params.id);
    const row = await findInvocation(store.read, tenant, params.inv_id);
    if (row.agent_id !== params.id) throw noSuch("inv", params.inv_id);
    return row;
  };

  return routes()
    .post("/v1/proxy/:id", ({ request, params }) => admitCall(options, request, scopeOf(request), params.id), {
      parse: "none",
      detail: proxyCall(options.network),
    })
    .get(
      "/v1/proxy/:id/invocations/:inv_id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const seconds = waitSeconds(request.headers);
        if (seconds === 0) return pollAnswer(store.read, request, await findCall(caller.tenant, params));
        const read = () => findCall(caller.tenant, params);
        const key = { tenant: caller.tenant, id: params.inv_id };
        return pollAnswer(store.read, request, await completionWaiters.wait(key, seconds, request.signal, read));
      },
      { detail: poll },
    )
    .post(
      "/v1/proxy/:id/invocations/:inv_id/cancel",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const { id, status } = await findCall(caller.tenant, params);
        const key = { tenant: caller.tenant, id };
        // An ended call never changes, so no write is needed.
        if (isEnded(status)) throw hasEnded();
        const cancelled = await cancelCall(options, key);
        options.stop(key.id);
        return pollAnswer(store.read, request, cancelled);
      },
      { parse: "none", detail: cancel },
    );
}
