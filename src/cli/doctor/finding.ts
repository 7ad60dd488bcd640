// What the doctor has to say: findings, in one line each, and the exit status that they make.

/** `fail`: the service would refuse work. `warn`: it works, and the operator should do something about it. */
export type State = "ok" | "warn" | "fail";

/** What is wrong, and what to do about it. */
export interface Problem {
  readonly state: "warn" | "fail";
  readonly text: string;
  readonly advice: string;
}

export interface Finding {
  /** What was looked at. */
  readonly what: string;
  readonly state: State;
  readonly text: string;
  readonly advice: string | null;
}

export const warning = (text: string, advice: string): Problem => ({ state: "warn", text, advice });
export const failure = (text: string, advice: string): Problem => ({ state: "fail", text, advice });

/** Each problem, or one line that says that all is well. */
export function findings(what: string, problems: readonly (Problem | null)[], fine: string): Finding[] {
  const found = problems.filter((problem) => problem !== null);
  if (found.length === 0) return [{ what, state: "ok", text: fine, advice: null }];
  return found.map((problem) => ({ what, ...problem }));
}

export function isHealthy(found: readonly Finding[]): boolean {
  return found.every(({ state }) => state !== "fail");
}

/** Of what was looked at, which a tenant may have chosen: what is longer does not move the other lines. */
const WIDTH_MAX = 60;

export function report(found: readonly Finding[]): string {
  const width = Math.min(Math.max(...found.map(({ what }) => what.length)), WIDTH_MAX);
  const lines = found.map(({ what, state, text, advice }) => {
    const told = advice === null ? text : `${text}; ${advice}`;
    return `${state.padEnd(4)}  ${printable(what).padEnd(width)}  ${printable(told)}\n`;
  });
  return lines.join("");
}

/** Servers and tenants have chosen some of it: it must neither break the line nor steer the terminal. */
function printable(text: string): string {
  return text.replace(/[\p{Cc}\p{Cf}\u2028\u2029]+/gu, " ");
}
