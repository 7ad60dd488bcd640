// The end of a call that was claimed here, made durable: the same for both paths.

import type { Log } from "../../core/log.ts";
import type { Clock } from "../../core/time.ts";
import { untilStored } from "../../storage/failures.ts";
import type { Store } from "../../storage/store.ts";
import { type ClaimedKey, type Claims, type Ending, finish } from "../invocations/service.ts";

export interface RecordEndOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly claims: Pick<Claims, "over">;
}

/**
 * Stores how a call ended, and waits for a store that is away. Never rejects: if the end can't be stored, the
 * comparison of claims (invocations/claims.ts) ends the call later.
 *
 * @param isGivenUp whether to stop waiting for a store that is away
 */
export async function recordEnd(
  { store, clock, log, claims }: RecordEndOptions,
  claimed: ClaimedKey,
  ending: Ending,
  isGivenUp: () => boolean,
): Promise<void> {
  const { key, token, request_id } = claimed;
  const named = { tenant: key.tenant, invocation_id: key.id, request_id };
  const write = (what: Ending) => untilStored(() => finish(store, claimed, what, clock.now()), isGivenUp);
  try {
    await write(ending).catch((error) => {
      if (isGivenUp()) throw error;
      log.error("outcome_not_recorded", { ...named, error });
      return write(onlyNumbersOf(ending));
    });
    claims.over(token);
  } catch (error) {
    log.error("invocation_left_open", { ...named, error });
    claims.over(token, true);
  }
}

/** For a database that refuses the upstream's answer but takes the rest of the end. */
function onlyNumbersOf(ending: Ending): Ending {
  return {
    ...ending,
    status: "failed",
    error_class: "internal",
    resp_sha256: null,
    response: null,
    response_truncated: false,
    response_content_type: null,
  };
}
