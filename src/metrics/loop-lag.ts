// The longest pause of an event loop within the last minute. It does not begin anew with each reader, so that several may
// read it.
const HALF_MS = 30_000;

/** @param monotonic milliseconds of a clock that never goes back */
export function createLoopLag(monotonic: () => number = () => performance.now()) {
  let [before, longest] = [0, 0];
  let halfEndsAt = monotonic() + HALF_MS;

  function move(): void {
    const now = monotonic();
    if (now < halfEndsAt) return;
    before = now < halfEndsAt + HALF_MS ? longest : 0;
    longest = 0;
    halfEndsAt = now + HALF_MS;
  }

  return {
    late(ms: number): void {
      move();
      longest = Math.max(longest, ms);
    },
    /** Milliseconds, of at least the last 30 seconds and at most the last 60. */
    longest(): number {
      move();
      return Math.max(before, longest);
    },
  };
}
