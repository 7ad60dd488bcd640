// How figures are shown: one line each, at once, so that a run can be watched and cut short.

export interface Rate {
  /** How many. */
  readonly count: number;
  /** What they took, of whatever the figure is about. */
  readonly seconds: number;
}

export function perSecond({ count, seconds }: Rate): number {
  return count / seconds;
}

export function say(line: string): void {
  process.stdout.write(`${line}\n`);
}

/** @param rest what else there is to say of it */
export function figure(name: string, rate: number, rest: string): void {
  say(`${name.padEnd(50)} ${shown(rate).padStart(7)}/s  ${rest}`);
}

/** How many times as fast the one is. */
export function times(ours: number, theirs: number): string {
  return theirs === 0 ? "∞" : shown(ours / theirs);
}

/** Small numbers with one decimal, which says more there. */
function shown(value: number): string {
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}
