// Spans that wait for the collector: a bounded number. What finds no room is dropped, and so is what the collector does
// not take. Both are counted and told once a minute.
import { type ExportResult, ExportResultCode } from "@opentelemetry/core";
import { BatchSpanProcessor, type ReadableSpan, type SpanExporter, type SpanProcessor } from "@opentelemetry/sdk-trace";
import type { Log } from "../core/log.ts";

/** Spans that wait or are under way. */
const HELD_MAX = 4096;
/** Written in one piece: 2 ms of the event loop. */
const BATCH_MAX = 256;
const WAIT_MS = 1_000;
/** More than the exporter takes with all its tries. */
const EXPORT_MS = 100_000;
const TELL_MS = 60_000;

/** @param exporter whose `result.error` has a message for the log */
export function createSpanQueue(exporter: SpanExporter, log: Log): SpanProcessor {
  let held = 0;
  const drops = createDrops(log);
  const counting: SpanExporter = {
    export(spans, done) {
      exporter.export(spans, (result: ExportResult) => {
        held -= spans.length;
        if (result.code !== ExportResultCode.SUCCESS) drops.count(spans.length, result.error?.message ?? "failed");
        done(result);
      });
    },
    shutdown: () => exporter.shutdown(),
  };
  const batches = new BatchSpanProcessor({
    exporter: counting,
    maxQueueSize: HELD_MAX,
    maxExportBatchSize: BATCH_MAX,
    scheduledDelayMillis: WAIT_MS,
    exportTimeoutMillis: EXPORT_MS,
  });
  return {
    onStart() {},
    onEnd(span: ReadableSpan): void {
      if (held >= HELD_MAX) {
        drops.count(1, "too many wait for the collector");
        return;
      }
      held++;
      batches.onEnd(span);
    },
    forceFlush: () => batches.forceFlush(),
    async shutdown(): Promise<void> {
      const flushed = batches.shutdown().catch(() => {});
      // From here on nothing is tried again.
      await exporter.shutdown();
      await flushed;
      // That is over with the first batch that is not taken, and knows nothing of one that was under way before.
      await exporter.shutdown();
      drops.tell();
    },
  };
}

/** The first is told at once, and what follows within a minute together. */
function createDrops(log: Log) {
  let count = 0;
  let reason = "";
  let timer: ReturnType<typeof setTimeout> | null = null;

  function tell(): void {
    if (count > 0) log.warn("spans_dropped", { count, reason });
    count = 0;
  }

  function pause(): void {
    timer = setTimeout(() => {
      timer = null;
      if (count === 0) return;
      tell();
      pause();
    }, TELL_MS);
    timer.unref();
  }

  return {
    tell,
    count(spans: number, why: string): void {
      count += spans;
      reason = why;
      if (timer !== null) return;
      tell();
      pause();
    },
  };
}
