// The routes of calls on the transactional path: made, polled, cancelled.
import type { UnderWay } from "../../concurrency/under-way.ts";
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import { PROXY_BODY_BYTES_MAX } from "../../core/limits.ts";
import { json } from "../../http/answers.ts";
import { routes } from "../../http/elysia.ts";
import { readBytes } from "../../http/intake.ts";
import { scopeOf } from "../../http/server.ts";
import type { Store } from "../../storage/store.ts";
import type { CompletionWaiters } from "../invocations/completion-waiters.ts";
import { findInvocation } from "../invocations/history.ts";
import { abandon, type InvocationKey, type InvocationRow } from "../invocations/service.ts";
import { pollAnswer } from "../invocations/views.ts";
import { type AdmitOptions, type Admitted, admit } from "./admit.ts";
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
  if (!isCancelled) throw new Fault("conflict", "the invocation has already ended");
}

/** The memory of the body counts until it is stored. A stop waits until the call is admitted or refused. */
async function admitted(options: ProxyRoutesOptions, request: Request, agentId: string): Promise<Admitted> {
  const { caller, requestId, note } = scopeOf(request);
  const { promise: held, resolve: stored } = Promise.withResolvers<void>();
  const readBody = () => readBytes(request, caller.tenant, PROXY_BODY_BYTES_MAX, { until: held });
  const leave = options.admitting.enter();
  try {
    return await admit(options, {
      caller,
      agentId,
      headers: request.headers,
      requestId,
      readBody,
      stored,
      note,
    });
  } finally {
    stored();
    leave();
  }
}

export function proxyRoutes(options: ProxyRoutesOptions) {
  const { store, completionWaiters } = options;

  const findCall = async (tenant: string, params: { id: string; inv_id: string }): Promise<InvocationRow> => {
    const row = await findInvocation(store.read, tenant, params.inv_id);
    if (row.agent_id !== params.id) throw new Fault("not_found", "no such invocation");
    return row;
  };

  return routes()
    .post(
      "/v1/proxy/:id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const { id, headers } = await admitted(options, request, params.id);
        const seconds = waitSeconds(request.headers);
        if (seconds > 0) {
          const look = () => findInvocation(store.read, caller.tenant, id);
          // The call is accepted, so its caller must get the ID even if the store fails during the wait.
          await completionWaiters.wait({ tenant: caller.tenant, id }, seconds, request.signal, look).catch(() => null);
        }
        const location = `/v1/proxy/${params.id}/invocations/${id}`;
        const own = { "x-service-invocation-id": id, location };
        return json("accepted", { invocation_id: id }, { ...own, ...headers });
      },
      { parse: "none", detail: proxyCall },
    )
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
        const key = { tenant: caller.tenant, id: (await findCall(caller.tenant, params)).id };
        await cancelCall(options, key);
        options.stop(key.id);
        return pollAnswer(store.read, request, await findCall(caller.tenant, params));
      },
      { parse: "none", detail: cancel },
    );
}
