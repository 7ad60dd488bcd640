// The routes of calls on the transactional path: made, polled, cancelled.

import { Fault } from "../../core/fault.ts";
import { isEnded } from "../../core/states.ts";
import type { Clock } from "../../core/time.ts";
import { routes } from "../../http/elysia.ts";
import { jsonText } from "../../http/responses.ts";
import { type FastPath, type Scope, scopeOf } from "../../http/server.ts";
import { PROXY_BODY_BYTES_MAX } from "../../kernel/limits.ts";
import type { UnderWay } from "../../kernel/wait.ts";
import type { Store } from "../../storage/store.ts";
import type { CompletionWaiters } from "../invocations/completion-waiters.ts";
import { findInvocation } from "../invocations/history.ts";
import { pollAnswer } from "../invocations/routes.ts";
import { abandon, type InvocationKey, type InvocationRow } from "../invocations/service.ts";
import { type AdmitOptions, admit, isSettled, settle } from "./admit.ts";
import { cancel, poll, proxyCall } from "./openapi.ts";
import { waitSeconds } from "./request-headers.ts";

export interface ProxyRoutesOptions extends AdmitOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly completionWaiters: CompletionWaiters;
  /** Counts the calls that are being admitted. */
  readonly admitting: Pick<UnderWay, "enter">;
  /** Stops the upstream call of an invocation that was ended elsewhere. */
  stop(id: string): void;
}

/** @throws Fault `conflict` when it has ended */
async function cancelCall({ store, clock, payments }: ProxyRoutesOptions, key: InvocationKey): Promise<void> {
  const now = clock.now();
  const isCancelled = await store.write(async (tx) => {
    if (!(await abandon(tx, key, "cancelled", now))) return false;
    await payments.cancelled(tx, key, now);
    return true;
  });
  if (!isCancelled) throw hasEnded();
}

const hasEnded = () => new Fault("conflict", "the invocation has already ended");

/** How long the memory of a body counts. There is a promise only if one is asked for, which none is for a small body. */
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

/** A stop waits until the call is admitted or refused. */
async function makeCall(options: ProxyRoutesOptions, request: Request, scope: Scope, agentId: string) {
  const { caller, requestId, note, intake } = scope;
  const { headers } = request;
  const hold = new BodyHold();
  const readBody = () => intake.readBody(request, caller.tenant, PROXY_BODY_BYTES_MAX, hold);
  const call = { caller, agentId, headers, requestId, readBody, note };
  const leave = options.admitting.enter();
  const answered: Record<string, string> = {};
  let id: string;
  try {
    const admitted = await admit(options, call);
    hold.end();
    id = admitted.id;
    note("invocation_id", id);
    answered["x-service-invocation-id"] = id;
    answered["location"] = `/v1/proxy/${agentId}/invocations/${id}`;
    if (!isSettled(admitted)) Object.assign(answered, await settle(options, call, admitted));
    if (admitted.isNew) options.meters.accepted();
    if (admitted.warning !== null) answered["x-service-policy-warning"] = admitted.warning;
  } finally {
    hold.end();
    leave();
  }
  const seconds = waitSeconds(headers);
  if (seconds > 0) await waitFor(options, { tenant: caller.tenant, id }, seconds, request.signal);
  // An ID needs no escape in JSON.
  return jsonText("accepted", `{"invocation_id":"${id}"}`, answered);
}

/** The call is accepted, so its caller must get the ID even if the store fails during the wait. */
async function waitFor(
  { store, completionWaiters }: ProxyRoutesOptions,
  key: InvocationKey,
  seconds: number,
  signal: AbortSignal,
): Promise<void> {
  const look = () => findInvocation(store.read, key.tenant, key.id);
  await completionWaiters.wait(key, seconds, signal, look).catch(() => null);
}

/** The fast path of POST /v1/proxy/:id for all but odd spellings of its path. */
export function fastCalls(options: ProxyRoutesOptions): FastPath {
  return {
    method: "POST",
    prefix: "/v1/proxy/",
    answer: (request, scope, agentId) => makeCall(options, request, scope, agentId),
  };
}

export function proxyRoutes(options: ProxyRoutesOptions) {
  const { store, completionWaiters } = options;

  const findCall = async (tenant: string, params: { id: string; inv_id: string }): Promise<InvocationRow> => {
    const row = await findInvocation(store.read, tenant, params.inv_id);
    if (row.agent_id !== params.id) throw new Fault("not_found", "no such invocation");
    return row;
  };

  return routes()
    .post("/v1/proxy/:id", ({ request, params }) => makeCall(options, request, scopeOf(request), params.id), {
      parse: "none",
      detail: proxyCall,
    })
    .get(
      "/v1/proxy/:id/invocations/:inv_id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const seconds = waitSeconds(request.headers);
        if (seconds === 0) return pollAnswer(store.read, request, await findCall(caller.tenant, params));
        const look = () => findCall(caller.tenant, params);
        const key = { tenant: caller.tenant, id: params.inv_id };
        return pollAnswer(store.read, request, await completionWaiters.wait(key, seconds, request.signal, look));
      },
      { detail: poll },
    )
    .post(
      "/v1/proxy/:id/invocations/:inv_id/cancel",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const { id, status } = await findCall(caller.tenant, params);
        const key = { tenant: caller.tenant, id };
        // An end is final, so a write could change nothing.
        if (isEnded(status)) throw hasEnded();
        await cancelCall(options, key);
        options.stop(key.id);
        return pollAnswer(store.read, request, await findCall(caller.tenant, params));
      },
      { parse: "none", detail: cancel },
    );
}
