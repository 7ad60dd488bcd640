// Hands a claimed call to a worker, with its credential, for as long as the claim is sure to hold: a process that was
// paused may have been taken for dead by other replicas, and they have ended its calls then.
import type { Log } from "../../core/log.ts";
import type { Tracer } from "../../core/tracing.ts";
import { untilStored } from "../../storage/retry-until-stored.ts";
import type { CallBody } from "../../wire/body.ts";
import type { InvocationKey, PendingCall } from "../invocations/service.ts";
import { beginCallSpan, endCallSpan, spanned } from "../upstream/call-span.ts";
import type { Claiming, RunningCall } from "./claiming.ts";
import type { Job, Outcome } from "./job.ts";
import { failed, newTrace } from "./outcome.ts";
import type { WorkerPool } from "./workers/pool.ts";

interface JobCredential {
  readonly header: Job["credential"];
  /** Changes when the secret changes. */
  readonly version: string;
}

const NO_CREDENTIAL: JobCredential = { header: null, version: "" };

export interface DispatchOptions {
  readonly log: Log;
  readonly pool: Pick<WorkerPool, "run">;
  resolveCredential(tenant: string, ref: string, url: string): Promise<JobCredential>;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
}

/** @param isDraining whether this process is about to stop: then it waits no more for a store that is away */
export function createDispatch(options: DispatchOptions, claiming: Claiming, isDraining: () => boolean) {
  const { log, pool, resolveCredential, tracer = null } = options;

  /** Null when it can't be had. */
  async function resolve({ tenant, id }: InvocationKey, credential_ref: string, url: string) {
    try {
      return await untilStored(() => resolveCredential(tenant, credential_ref, url), isDraining);
    } catch (error) {
      log.warn("credential_not_resolved", { tenant, id, credential_ref, error });
      return null;
    }
  }

  function send(job: Job): Promise<Outcome> {
    if (tracer === null) return pool.run(job);
    const { id: invocationId, tenant, agent_id: agentId, call } = job;
    const { url, headers } = call;
    const span = beginCallSpan(tracer, { tenant, agentId, invocationId, method: "POST", url, headers });
    return pool.run({ ...job, call: spanned(call, span) }).then((outcome) => {
      endCallSpan(span, outcome);
      return outcome;
    });
  }

  /** Right before the call is dialled, a claim that was not checked for a while is checked again. */
  return async function dispatch(running: RunningCall, { call, body }: PendingCall): Promise<Outcome> {
    const { agentId, key } = running;
    const { credential_ref, url } = call;
    const credential = credential_ref === null ? NO_CREDENTIAL : await resolve(key, credential_ref, url);
    if (credential === null) return failed(newTrace(), "credential_error", "credential not resolved", 0);
    const ended = () => failed(newTrace(), "cancelled", "ended before it was made", 0);
    const sendOnce = (sent: CallBody, claim_seen_at: number | null) =>
      send({
        id: key.id,
        tenant: key.tenant,
        agent_id: agentId,
        call,
        credential: credential.header,
        session_key:
          call.protocol === "mcp" ? JSON.stringify([agentId, url, credential_ref, credential.version]) : null,
        claim_seen_at,
        body: sent,
      });
    // The second look is for a cancel that came during the check.
    if (running.stopped || !(await claiming.stillHolds(running)) || running.stopped) return ended();
    const outcome = await sendOnce(body, running.believedAt.wall);
    if (!outcome.is_stale) return outcome;
    // Check the claim once more, and then trust it even if the clocks of the threads differ. The body is read again,
    // since the pool has taken over the first one.
    const again = await claiming.claim(running, null);
    return again === null || running.stopped ? ended() : sendOnce(again.body, null);
  };
}
