// The age of something that may be trusted only for a while. A suspended machine stops the monotonic clock, and a step
// moves the wall clock, so the larger of the two ages counts.
import { systemClock } from "../core/time.ts";

/** How long a claim that was read is acted upon without another look: much less than any lease lasts. */
export const CLAIM_BELIEVED_MS = 5_000;

export interface Moment {
  /** performance.now() of the thread that made it. */
  readonly monotonic: number;
  /** Milliseconds since the epoch; all threads and processes of a machine read the same. */
  readonly wall: number;
}

export const thisMoment = (): Moment => ({ monotonic: performance.now(), wall: systemClock.now() });

/** Whether `ms` may have passed since then. In doubt, yes. */
export const isOlder = ({ monotonic, wall }: Moment, ms: number): boolean =>
  performance.now() - monotonic >= ms || isWallOlder(wall, ms);

/** Whether `ms` may have passed since another thread, which has a monotonic clock of its own, made a Moment. @param wall of it */
export const isWallOlder = (wall: number, ms: number): boolean => Math.abs(systemClock.now() - wall) >= ms;
