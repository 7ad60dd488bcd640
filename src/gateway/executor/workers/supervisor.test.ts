import { afterEach, expect, test } from "bun:test";
import { LOOPBACK } from "../../../../test/support/jobs.ts";
import { silentLog } from "../../../core/log.ts";
import { createDecoderShare } from "../../../http/decoder-share.ts";
import { createKeeper, type Keeper } from "./supervisor.ts";

const SLOW_TO_CLOSE = new URL("../../../../test/support/slow-to-close-worker.ts", import.meta.url).href;

const open: Keeper[] = [];

afterEach(async () => {
  for (const keeper of open.splice(0)) await keeper.close();
});

/** A keeper whose worker dies of any work; `turn` resolves when the next one is ready. */
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
  const keeper = createKeeper(
    { kind: "start", settings: LOOPBACK, workers: 1 },
    { decoders: createDecoderShare(), log: silentLog, spawn },
    {
      onReady: () => turns[readied++]?.resolve(),
      onResults: () => {},
      onDeath: () => {},
    },
  );
  open.push(keeper);
  return { keeper, ready: turns.map(({ promise }) => promise), sessionsClosed: () => isClosed };
}

test("close waits until the worker has closed its sessions", async () => {
  const { keeper, ready, sessionsClosed } = start();
  await ready[0];
  await keeper.close();
  expect(sessionsClosed()).toBe(true);
});

test("close waits for the sessions of a worker that took the place of a dead one", async () => {
  const { keeper, ready, sessionsClosed } = start();
  await ready[0];
  keeper.post({ kind: "work", jobs: [], cancel: [], recorded: [] }, []);
  await ready[1];
  await keeper.close();
  expect(sessionsClosed()).toBe(true);
});

test("close ends early when the worker dies of it", async () => {
  const { keeper, ready, sessionsClosed } = start();
  await ready[0];
  keeper.post({ kind: "work", jobs: [], cancel: [], recorded: [] }, []);
  const started = performance.now();
  await keeper.close();
  expect(performance.now() - started).toBeLessThan(2000);
  expect(sessionsClosed()).toBe(false);
});
