import { afterEach, expect, test } from "bun:test";
import { LOOPBACK } from "../../../../test/support/stores/jobs.ts";
import { silentLog } from "../../../core/log.ts";
import { createDecoderShare } from "../../../http/client/decode.ts";
import { batchOfJobs } from "./messages.ts";
import { createSupervisor, type Supervisor } from "./supervisor.ts";

const SLOW_TO_CLOSE = new URL("../../../../test/support/gateway/slow-to-close-worker.ts", import.meta.url).href;

const open: Supervisor[] = [];

afterEach(async () => {
  for (const supervisor of open.splice(0)) await supervisor.close();
});

/** A supervisor whose worker dies of any work; `turn` resolves when the next one is ready. */
function start() {
  let isClosed = false;
  const turns = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  let readied = 0;
  const spawn = () => {
    const worker = new Worker(SLOW_TO_CLOSE);
    worker.addEventListener("message", ({ data }: MessageEvent<{ kind: string }>) => {
      isClosed ||= data.kind === "closed";
    });
    return worker;
  };
  const supervisor = createSupervisor(
    { kind: "start", settings: LOOPBACK, workers: 1 },
    { decoders: createDecoderShare(), log: silentLog, spawn },
    {
      onReady: () => turns[readied++]?.resolve(),
      onResults: () => {},
      onDeath: () => {},
    },
  );
  open.push(supervisor);
  supervisor.start();
  return { supervisor, ready: turns.map(({ promise }) => promise), sessionsClosed: () => isClosed };
}

test("closing a worker waits until it has closed its sessions", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  await supervisor.close();
  expect(sessionsClosed()).toBe(true);
});

test("closing a worker waits for the sessions of one that took the place of a dead one", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  supervisor.post({ kind: "work", jobs: batchOfJobs([]).batch, cancel: [], recorded: [] }, []);
  await ready[1];
  await supervisor.close();
  expect(sessionsClosed()).toBe(true);
});

test("closing a worker ends early when the worker dies of it", async () => {
  const { supervisor, ready, sessionsClosed } = start();
  await ready[0];
  supervisor.post({ kind: "work", jobs: batchOfJobs([]).batch, cancel: [], recorded: [] }, []);
  const started = performance.now();
  await supervisor.close();
  // The supervisor waits three seconds for a worker that does not answer.
  expect(performance.now() - started).toBeLessThan(2_950);
  expect(sessionsClosed()).toBe(false);
});
