// A worker for tests of the pool: answers each job with its own body, and dies of what the body says.
import {
  batchOfResults,
  type FromWorker,
  type Job,
  jobsOf,
  type Outcome,
  type ToWorker,
} from "../../../src/gateway/executor/job.ts";
import { bodyPartsOf, type CallBody } from "../../../src/wire/body.ts";

declare const self: Worker;

const bytesOf = (body: CallBody) => (body instanceof Uint8Array ? body : Buffer.concat(bodyPartsOf(body)));

const post = (message: FromWorker) => self.postMessage(message);

function echo({ body }: Job): Outcome {
  return {
    status: "succeeded",
    error_class: null,
    upstream_status: 200,
    latency_ms: 0,
    resp_size: body.byteLength,
    resp_sha256: null,
    response: bytesOf(body),
    response_truncated: false,
    response_content_type: null,
    detail: null,
  };
}

function answer(job: Job): void {
  const { batch, transfer } = batchOfResults([{ id: job.id, outcome: echo(job) }]);
  self.postMessage({ kind: "done", results: batch } satisfies FromWorker, transfer);
}

function take(job: Job): void {
  switch (new TextDecoder().decode(bytesOf(job.body).subarray(0, 20))) {
    case "throw":
      throw new Error("boom");
    case "throw later":
      setTimeout(() => {
        throw new Error("boom");
      });
      break;
    case "reject":
      void Promise.reject(new Error("boom"));
      break;
    case "exit":
      process.exit(0);
      break;
    case "hang":
      break;
    case "spin":
      for (;;);
    case "slow":
      setTimeout(answer, 100, job);
      break;
    default:
      answer(job);
  }
}

self.onmessage = ({ data }: MessageEvent<ToWorker>) => {
  if (data.kind === "start") post({ kind: "ready" });
  if (data.kind === "work") jobsOf(data.jobs).forEach(take);
  if (data.kind === "close") post({ kind: "closed" });
};
