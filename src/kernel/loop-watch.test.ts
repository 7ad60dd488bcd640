import { afterEach, expect, test } from "bun:test";
import type { LogFields } from "../core/log.ts";
import { watchLoop } from "./loop-watch.ts";

/** Holds the event loop. */
function hold(ms: number): void {
  const until = performance.now() + ms;
  while (performance.now() < until);
}

let stop = () => {};
afterEach(() => stop());

/** What is told of a watched loop, line by line; a machine that is slow by itself may add to it. */
async function watched() {
  const lines: LogFields[] = [];
  let heard = () => {};
  stop = watchLoop("main", 100, (event, fields = {}) => {
    expect(event).toBe("event_loop_blocked");
    lines.push(fields);
    heard();
  });
  // Its timer runs from here on.
  await Bun.sleep(1);
  const line = () =>
    new Promise<void>((resolve) => {
      heard = resolve;
    });
  return { lines, line };
}

test("a pause is told with its thread and its length", async () => {
  const { lines, line } = await watched();
  const told = line();
  hold(220);
  await told;
  expect(lines[0]).toMatchObject({ thread: "main", times: 1 });
  expect(lines[0]?.["ms"]).toBeGreaterThanOrEqual(200);
});

test("a pause of waiting is told by how little was computed", async () => {
  const { lines, line } = await watched();
  const told = line();
  Bun.sleepSync(400);
  await told;
  expect(lines[0]?.["ms"]).toBeGreaterThanOrEqual(300);
  expect(lines[0]?.["cpu_ms"]).toBeLessThan(200);
});

test("the pauses of a second are one line, with the longest of them", async () => {
  const { lines, line } = await watched();
  const [first, startedAt] = [line(), performance.now()];
  hold(150);
  await first;
  const second = line();
  for (const ms of [150, 300, 150]) {
    hold(ms);
    // Until its timer has fired, which is due before this one.
    await Bun.sleep(25);
  }
  await second;
  expect(performance.now() - startedAt).toBeGreaterThanOrEqual(1_000);
  expect(lines).toHaveLength(2);
  expect(lines[1]?.["ms"]).toBeGreaterThanOrEqual(280);
  expect(lines[1]?.["times"]).toBeGreaterThanOrEqual(3);
});

test("a pause that is left is told at the end", async () => {
  const { lines, line } = await watched();
  const first = line();
  hold(150);
  await first;
  hold(150);
  await Bun.sleep(25);
  expect(lines).toHaveLength(1);
  stop();
  expect(lines).toHaveLength(2);
});
