import { expect, test } from "bun:test";
import { ROOT_CONTEXT, SpanKind, TraceFlags, trace } from "@opentelemetry/api";
import { type Sampler, SamplingDecision } from "@opentelemetry/sdk-trace";
import fc from "fast-check";
import { SAMPLERS } from "../core/tracing.ts";
import { createSampler } from "./tracer.ts";

const TRACE = "0af7651916cd43dd8448eb211c80319c";
const OPTIONS = { sampler: "parentbased_always_on", ratio: 1, tracesPerSecond: 8 } as const;

/** @param parent whether the trace that goes on is recorded; null for a new one */
function isRecorded(sampler: Sampler, kind: SpanKind, parent: boolean | null): boolean {
  const traceFlags = parent === true ? TraceFlags.SAMPLED : TraceFlags.NONE;
  const named = { traceId: TRACE, spanId: "b7ad6b7169203331", traceFlags, isRemote: true };
  const context = parent === null ? ROOT_CONTEXT : trace.setSpanContext(ROOT_CONTEXT, named);
  const { decision } = sampler.shouldSample(context, TRACE, "x", kind, {}, []);
  return decision === SamplingDecision.RECORD_AND_SAMPLED;
}

/** A sampler, and who pays for what it is asked next. */
function samplerFor(options: Partial<Parameters<typeof createSampler>[0]> = {}) {
  let payer = "";
  const sampler = createSampler({ ...OPTIONS, ...options }, () => payer);
  return (name: string, parent: boolean | null = null, kind = SpanKind.SERVER) => {
    payer = name;
    return isRecorded(sampler, kind, parent);
  };
}

test("each sampler decides as OpenTelemetry says, by the caller's flag where it is asked to", () => {
  const decisions = SAMPLERS.map((sampler) => {
    const next = samplerFor({ sampler, ratio: 0 });
    return [sampler, next("a"), next("a", true), next("a", false)];
  });
  expect(decisions).toEqual([
    ["always_on", true, true, true],
    ["always_off", false, false, false],
    ["traceidratio", false, false, false],
    ["parentbased_always_on", true, true, false],
    ["parentbased_always_off", false, true, false],
    ["parentbased_traceidratio", false, true, false],
  ]);
});

test("what is a part of a trace is recorded exactly if the trace is, whatever the sampler, and counts for nobody", () => {
  for (const sampler of SAMPLERS) {
    const next = samplerFor({ sampler, tracesPerSecond: 1 });
    for (const kind of [SpanKind.CLIENT, SpanKind.INTERNAL]) {
      for (let n = 0; n < 20; n++) expect([next("a", true, kind), next("a", false, kind)]).toEqual([true, false]);
    }
  }
});

test("no more than the bound are recorded in a second, and a newcomer finds something left", () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 2, max: 500 }),
      fc.array(fc.constantFrom("a", "b", "c"), { maxLength: 2000 }),
      (bound, payers) => {
        const next = samplerFor({ tracesPerSecond: bound });
        const startedAt = performance.now();
        const recorded = payers.filter((payer) => next(payer, true)).length;
        const newcomer = next("newcomer", true);
        // A run that a busy machine has spread over two seconds says nothing.
        if (performance.now() - startedAt > 900) return;
        expect(recorded).toBeLessThanOrEqual(bound);
        if (recorded < bound) expect(newcomer).toBe(true);
        if (bound >= 32) expect(newcomer).toBe(true);
      },
    ),
  );
});
