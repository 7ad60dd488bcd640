// Payments of a gateway whose database was restored to an older state. It has forgotten those that were taken since, and
// their facilitator would call each of them collected: so one that may have bought a call before buys none.
//
// The end of an authorization tells. A gateway takes none that is valid for longer than LONGEST_SECONDS, so after a restore
// at the time R all that were taken before are over at R + LONGEST_SECONDS. One that ends later is new. Until then callers
// are asked for such ones: the challenge demands a longer timeout, and official clients sign just that.
//
//   taken                    now + 6 s <= validBefore <= now + 660 s
//   after a restore, until R + 840 s    R + 840 s < validBefore <= now + 840 s
import { MAX_TIMEOUT_SECONDS } from "../../x402/codec.ts";

/** How much longer than demanded a payment may be valid, usually. */
const AHEAD_SECONDS = 600;
const LONGEST_SECONDS = 840;
/** In place of the usual: from a minute after the restore on, what is signed for it ends late enough. */
const TIMEOUT_SECONDS = 780;

/** @param restoredAt milliseconds since the epoch, by the database's clock; null for never */
export function createRestoreGuard(restoredAt: number | null) {
  const until = restoredAt === null ? Number.NEGATIVE_INFINITY : Math.ceil(restoredAt / 1000) + LONGEST_SECONDS;
  const isOver = (now: number) => now > until;
  return {
    /** What a challenge demands. @param now Unix seconds, as everywhere here */
    timeoutSeconds: (now: number) => (isOver(now) ? MAX_TIMEOUT_SECONDS : TIMEOUT_SECONDS),
    /** The latest end of a payment that is taken now. */
    latest: (now: number) => now + (isOver(now) ? MAX_TIMEOUT_SECONDS + AHEAD_SECONDS : LONGEST_SECONDS),
    /** Whether a payment with this end may have been taken before the restore. */
    mayBeOlder: (validBefore: bigint | number) => validBefore <= until,
  };
}

export type RestoreGuard = ReturnType<typeof createRestoreGuard>;
