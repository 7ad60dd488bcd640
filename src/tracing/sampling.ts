// Which traces are recorded. The operator's sampler decides, by the caller's wish where it is asked to, and a bound on
// traces a second holds whatever it says, so that no caller can make the gateway record without end. Of the bound each
// tenant has its share. What is a part of a trace is recorded if the trace is.
import { type Context, SpanKind, TraceFlags, trace } from "@opentelemetry/api";
import {
  AlwaysOffSampler,
  AlwaysOnSampler,
  ParentBasedSampler,
  type Sampler,
  SamplingDecision,
  TraceIdRatioBasedSampler,
} from "@opentelemetry/sdk-trace";
import { createReservedShare } from "../concurrency/reserved-share.ts";
import type { SamplerName } from "../core/tracing-options.ts";

const WINDOW_MS = 1000;
const LEFT_OUT = { decision: SamplingDecision.NOT_RECORD };
const RECORDED = { decision: SamplingDecision.RECORD_AND_SAMPLED };

export interface SamplingOptions {
  readonly sampler: SamplerName;
  /** Of the samplers by ratio: from 0 to 1. */
  readonly ratio: number;
  readonly tracesPerSecond: number;
}

/**
 * @param payerOf whose share a trace takes that is begun in this context
 */
export function createSampler(
  { sampler, ratio, tracesPerSecond }: SamplingOptions,
  payerOf: (context: Context) => string,
): Sampler {
  const chosen = samplerOf(sampler, ratio);
  const mayRecord = createPace(tracesPerSecond);
  return {
    shouldSample(context, traceId, name, kind, attributes, links) {
      const parent = trace.getSpanContext(context);
      if (kind !== SpanKind.SERVER && parent !== undefined && trace.isSpanContextValid(parent)) {
        return (parent.traceFlags & TraceFlags.SAMPLED) === 0 ? LEFT_OUT : RECORDED;
      }
      const result = chosen.shouldSample(context, traceId, name, kind, attributes, links);
      if (result.decision !== SamplingDecision.RECORD_AND_SAMPLED) return LEFT_OUT;
      return mayRecord(payerOf(context)) ? result : LEFT_OUT;
    },
    toString: () => `${chosen}, at most ${tracesPerSecond} a second`,
  };
}

function samplerOf(name: SamplerName, ratio: number): Sampler {
  const root = rootOf(name.replace(/^parentbased_/, ""), ratio);
  return name.startsWith("parentbased_") ? new ParentBasedSampler({ root }) : root;
}

function rootOf(name: string, ratio: number): Sampler {
  if (name === "always_off") return new AlwaysOffSampler();
  return name === "traceidratio" ? new TraceIdRatioBasedSampler(ratio) : new AlwaysOnSampler();
}

/** So many a second, an eighth of them for who has had none. */
function createPace(perSecond: number): (payer: string) => boolean {
  let share = createReservedShare(perSecond);
  let endsAt = performance.now() + WINDOW_MS;
  return (payer) => {
    const now = performance.now();
    if (now >= endsAt) [share, endsAt] = [createReservedShare(perSecond), now + WINDOW_MS];
    return share.take(payer);
  };
}
