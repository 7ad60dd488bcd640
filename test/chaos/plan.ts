// What happens to whom and when, decided beforehand by the seed, so that a run can be repeated as far as a busy machine
// allows.
import { seeded } from "../support/seeded.ts";

export const SERVICES = ["gateway 1", "gateway 2", "facilitator 1", "facilitator 2"] as const;
export type ServiceName = (typeof SERVICES)[number];

export type Fault =
  /** Killed, and started again after this time. */
  | { readonly kind: "kill"; readonly ms: number }
  /** Stopped by SIGTERM, and started again at once. */
  | { readonly kind: "restart" }
  /** Suspended for this time. */
  | { readonly kind: "suspend"; readonly ms: number }
  /** Its clock is off by so much from now on. */
  | { readonly kind: "skew"; readonly ms: number };

export interface Step {
  /** Milliseconds after the start of the load. */
  readonly at: number;
  readonly who: ServiceName;
  readonly fault: Fault;
}

export interface Plan {
  readonly steps: readonly Step[];
  /** When the primary is killed. */
  readonly failOverAt: number;
}

const [PAUSE_MS_LEAST, PAUSE_MS_MOST] = [500, 3_000];
const [KILLED_MS_LEAST, KILLED_MS_MOST] = [200, 3_000];
const SUSPENDED_MS_LEAST = 1_000;
/** Longer than a lease. */
const SUSPENDED_MS_MOST = 20_000;
const SKEW_MS = 20_000;
const SKEWS = [-SKEW_MS, SKEW_MS, 0];
const KINDS = ["kill", "restart", "suspend", "skew"] as const;

/** At most one gateway and one facilitator are away at a time: somebody is to be there, and to be seen. */
export function planOf(seed: number, seconds: number): Plan {
  const random = seeded(seed);
  const between = (least: number, most: number) => Math.round(least) + random(Math.round(most - least));
  const oneOf = <T>(list: readonly T[]): T => list[random(list.length) - 1] as T;
  const end = seconds * 1_000;
  const faultOf = (): Fault => {
    const kind = oneOf(KINDS);
    if (kind === "kill") return { kind, ms: between(KILLED_MS_LEAST, KILLED_MS_MOST) };
    if (kind === "suspend") return { kind, ms: between(SUSPENDED_MS_LEAST, Math.min(SUSPENDED_MS_MOST, end / 2)) };
    return kind === "skew" ? { kind, ms: oneOf(SKEWS) } : { kind };
  };
  const steps: Step[] = [];
  for (const pair of [SERVICES.slice(0, 2), SERVICES.slice(2)]) {
    for (let at = between(PAUSE_MS_LEAST, PAUSE_MS_MOST); at < end; ) {
      const fault = faultOf();
      steps.push({ at, who: oneOf(pair), fault });
      at += ("ms" in fault && fault.kind !== "skew" ? fault.ms : 0) + between(PAUSE_MS_LEAST, PAUSE_MS_MOST);
    }
  }
  return { steps: steps.toSorted((a, b) => a.at - b.at), failOverAt: between(end / 3, (2 * end) / 3) };
}
