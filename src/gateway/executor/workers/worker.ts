// Entry point of a worker thread: makes upstream calls and nothing else. The worker knows neither database nor configuration:
// the first message brings its settings, later ones bring jobs and cancels (see job.ts).
import { startComputeThreads } from "../../../compute/threads.ts";
import { hostRules } from "../../../core/host.ts";
import type { LogFields } from "../../../core/log.ts";
import { createOutbound, ownAddresses } from "../../../http/client/outbound.ts";
import { watchLoop } from "../../../kernel/loop-watch.ts";
import { inTurns } from "../../../kernel/turns.ts";
import { Stop } from "../../../kernel/wait.ts";
import type { CallStop } from "../../upstream/failure.ts";
import { callHttp, ResponseMemory, runCall } from "../call.ts";
import type { FromWorker, Job, Result, ToWorker, WorkerSettings } from "../job.ts";
import { batchOfResults, jobsOf } from "../job.ts";
import { createMcp } from "../mcp/call.ts";

declare const self: Worker;

const CANCELLED: CallStop = "cancelled";

function post(message: FromWorker, transfer: ArrayBuffer[] = []): void {
  self.postMessage(message, transfer);
}

const logAt =
  (level: "info" | "warn") =>
  (event: string, fields: LogFields = {}): void => {
    post({ kind: "log", level, event, fields });
  };

function createCaller(settings: WorkerSettings, workers: number) {
  const outbound = createOutbound({
    rules: hostRules({ allow: settings.allow_hosts, deny: settings.deny_hosts, own: ownAddresses() }),
    extraCa: settings.extra_ca,
  });
  const upstreams = { outbound, settings, memory: new ResponseMemory(workers) };
  const mcp = createMcp(upstreams);
  const running = new Map<string, Stop>();
  /** Functions that release the memory of responses that are not recorded yet, by job. */
  const unrecorded = new Map<string, () => void>();
  let results: Result[] = [];

  function flush(): void {
    const { batch, transfer } = batchOfResults(results);
    results = [];
    post({ kind: "done", results: batch }, transfer);
  }

  async function run(job: Job, stop: Stop): Promise<void> {
    const call = job.call.protocol === "mcp" ? mcp.call : callHttp;
    const outcome = await runCall(job, upstreams, stop, call, (release) => unrecorded.set(job.id, release));
    running.delete(job.id);
    if (results.push({ id: job.id, outcome }) === 1) setImmediate(flush);
  }

  /** Starts a job in its turn, since hundreds may come at once and each takes time to start. */
  function begin(job: Job): void {
    const stop = new Stop();
    running.set(job.id, stop);
    inTurns(() => {
      void run(job, stop);
      return false;
    }, job.tenant);
  }

  return {
    take(jobs: readonly Job[], cancel: readonly string[], recorded: readonly string[]) {
      for (const job of jobs) begin(job);
      for (const id of cancel) running.get(id)?.abort(CANCELLED);
      for (const id of recorded) {
        unrecorded.get(id)?.();
        unrecorded.delete(id);
      }
    },
    /** Stops the calls, then closes the sessions. Never rejects. */
    close(): Promise<void> {
      for (const stop of running.values()) stop.abort(CANCELLED);
      return mcp.close();
    },
  };
}

/** Handles the messages of the main thread, the first of which brings the settings. */
function serve(): (message: ToWorker) => void {
  let caller: ReturnType<typeof createCaller> | null = null;
  return (message) => {
    switch (message.kind) {
      case "start":
        caller = createCaller(message.settings, message.workers);
        watchLoop("upstream calls", message.settings.blocked_ms, { info: logAt("info"), warn: logAt("warn") });
        startComputeThreads({ debug() {}, error: logAt("warn") }, 1);
        post({ kind: "ready" });
        break;
      case "work":
        caller?.take(jobsOf(message.jobs), message.cancel, message.recorded);
        break;
      case "close":
        void caller?.close().then(() => post({ kind: "closed" }));
        break;
    }
  };
}

const take = serve();
self.onmessage = ({ data }: MessageEvent<ToWorker>) => take(data);
