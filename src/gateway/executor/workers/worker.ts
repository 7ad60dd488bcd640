// Entry point of a worker thread: makes upstream calls and nothing else. It knows neither database nor
// configuration; its settings come with the first message, then jobs and cancels, a batch per turn each way.

import { watchLoop } from "../../../concurrency/loop-watch.ts";
import { hostRules } from "../../../core/host.ts";
import { ownAddresses } from "../../../http/interfaces.ts";
import { createOutbound } from "../../../http/outbound.ts";
import { callHttp, runCall } from "../call.ts";
import type { Job, WorkerSettings } from "../job.ts";
import { createMcp } from "../mcp/call.ts";
import type { CallStop } from "../outcome.ts";
import { type Borrower, createBorrower } from "./decoder-loans.ts";
import { detached, type FromWorker, type Result, type ToWorker, transferable } from "./messages.ts";
import { createResponseMemory } from "./response-memory.ts";

declare const self: Worker;

const CANCELLED: CallStop = "cancelled";

interface UpstreamCaller {
  readonly decoders: Borrower;
  take(jobs: readonly Job[], cancel: readonly string[], recorded: readonly string[]): void;
  /** Stops the calls, then closes the sessions. Never rejects. */
  close(): Promise<void>;
}

function post(message: FromWorker, transfer: ArrayBuffer[] = []): void {
  self.postMessage(message, transfer);
}

function createCaller(settings: WorkerSettings, workers: number): UpstreamCaller {
  const outbound = createOutbound({
    rules: hostRules({ allow: settings.allow_hosts, deny: settings.deny_hosts, own: ownAddresses() }),
    extraCa: settings.extra_ca,
  });
  const memory = createResponseMemory(workers);
  const decoders = createBorrower((requests) => post({ kind: "loans", requests }));
  const upstreams = { outbound, settings, memory, decoders };
  const mcp = createMcp(upstreams);
  const running = new Map<string, AbortController>();
  /** What lets go of the memory for responses that are not recorded yet. */
  const kept = new Map<string, () => void>();
  let results: Result[] = [];

  function flush(): void {
    const batch = results;
    results = [];
    post({ kind: "done", results: batch }, transferable(batch.map(({ outcome }) => outcome.response)));
  }

  async function run(job: Job): Promise<void> {
    const stop = new AbortController();
    running.set(job.id, stop);
    const call = job.call.protocol === "mcp" ? mcp.call : callHttp;
    const outcome = await runCall(job, upstreams, stop, call, (release) => kept.set(job.id, release));
    running.delete(job.id);
    const response = outcome.response === null ? null : detached(outcome.response);
    if (results.push({ id: job.id, outcome: { ...outcome, response } }) === 1) setImmediate(flush);
  }

  return {
    decoders,
    take(jobs, cancel, recorded) {
      for (const job of jobs) void run(job);
      for (const id of cancel) running.get(id)?.abort(CANCELLED);
      for (const id of recorded) {
        kept.get(id)?.();
        kept.delete(id);
      }
    },
    close() {
      for (const stop of running.values()) stop.abort(CANCELLED);
      return mcp.close();
    },
  };
}

let caller: UpstreamCaller | null = null;

self.onmessage = ({ data }: MessageEvent<ToWorker>) => {
  switch (data.kind) {
    case "start":
      caller = createCaller(data.settings, data.workers);
      watchLoop("upstream calls", data.settings.blocked_ms, (event, fields = {}) =>
        post({ kind: "blocked", event, fields }),
      );
      post({ kind: "ready" });
      break;
    case "work":
      caller?.take(data.jobs, data.cancel, data.recorded);
      break;
    case "loans":
      caller?.decoders.told(data.news);
      break;
    case "close":
      void caller?.close().then(() => post({ kind: "closed" }));
      break;
  }
};
