// Sends a request again as long as it certainly never reached the upstream. One that may have arrived is never sent twice.
import type { Answer } from "./answer.ts";
import { type Outbound, OutboundError, type OutboundRequest } from "./outbound.ts";

const PAUSES_MS = [100, 400];

/**
 * Resolves with the response head, as `outbound.request` does.
 *
 * @throws OutboundError; the signal's reason
 */
export async function requestSafely(outbound: Outbound, url: string, request: OutboundRequest): Promise<Answer> {
  const { signal } = request;
  for (let attempt = 0; ; attempt++) {
    try {
      return await outbound.request(url, request);
    } catch (error) {
      const pause = PAUSES_MS[attempt];
      const isSafe = error instanceof OutboundError && error.kind === "unreached";
      if (!isSafe || pause === undefined || signal.aborted) throw error;
      await sleep(pause, signal);
    }
  }
}

function sleep(ms: number, signal: AbortSignal): Promise<void> {
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
