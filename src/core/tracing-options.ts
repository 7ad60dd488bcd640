// How traces are switched on and sent: the configuration, as far as it is theirs.

export const SAMPLERS = [
  "always_on",
  "always_off",
  "traceidratio",
  "parentbased_always_on",
  "parentbased_always_off",
  "parentbased_traceidratio",
] as const;
export type SamplerName = (typeof SAMPLERS)[number];

type Pairs = ReadonlyArray<readonly [name: string, value: string]>;

export interface TracingOptions {
  /** Base URL of the collector. */
  readonly endpoint: string;
  /** Of each request to it; they may hold a key. */
  readonly headers: Pairs;
  /** Null for the service's own name. */
  readonly serviceName: string | null;
  readonly resource: Pairs;
  readonly sampler: SamplerName;
  /** Of the samplers by ratio: from 0 to 1. */
  readonly ratio: number;
  /** The most that are recorded, whatever the sampler says. */
  readonly tracesPerSecond: number;
  /** PEM of extra trusted roots. */
  readonly extraCa: string | null;
}
