// A worker for tests of its keeper: needs a moment to close its sessions, and dies of any work.
import type { FromWorker, ToWorker } from "../../../src/gateway/executor/job.ts";

declare const self: Worker;

const post = (message: FromWorker) => self.postMessage(message);

self.onmessage = ({ data }: MessageEvent<ToWorker>) => {
  if (data.kind === "start") post({ kind: "ready" });
  if (data.kind === "work") process.exit(0);
  if (data.kind === "close") setTimeout(() => post({ kind: "closed" }), 100);
};
