// Sends a request again as long as it certainly never reached the upstream. One that may have arrived is never sent twice.
import type { StopSignal } from "../concurrency/stop.ts";
import type { Answer } from "./answer.ts";
import { type Outbound, OutboundError, type OutboundRequest } from "./outbound.ts";

const PAUSES_MS = [100, 400];

/**
 * Resolves with the response head, as `outbound.request` does.
 *
 * @throws OutboundError; the signal's reason
 */
export function requestSafely(outbound: Outbound, url: string, request: OutboundRequest): Promise<Answer> {
  // The first time without a frame that waits: most requests need no more.
  return outbound.request(url, request).catch((error) => again(outbound, url, request, error));
}

async function again(outbound: Outbound, url: string, request: OutboundRequest, first: unknown): Promise<Answer> {
  const { signal } = request;
  let failure = first;
  for (const pause of PAUSES_MS) {
    const isSafe = failure instanceof OutboundError && failure.kind === "unreached";
    if (!isSafe || signal.aborted) throw failure;
    await sleep(pause, signal);
    try {
      return await outbound.request(url, request);
    } catch (error) {
      failure = error;
    }
  }
  throw failure;
}

function sleep(ms: number, signal: StopSignal): Promise<void> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  const onAbort = () => {
    clearTimeout(timer);
    reject(signal.reason);
  };
  const timer = setTimeout(() => {
    signal.removeEventListener("abort", onAbort);
    resolve();
  }, ms);
  signal.addEventListener("abort", onAbort, { once: true });
  return promise;
}
