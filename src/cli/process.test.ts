import { expect, test } from "bun:test";
import { join } from "node:path";

const LIMIT_MS = 500;

/** A process under the watch that runs `then` once it stands, and what it has printed when it is gone. */
async function watched(then: string) {
  const script = `
    import { startWatchdog } from ${JSON.stringify(join(import.meta.dir, "process.ts"))};
    startWatchdog({ level: "info", format: "json" }, ${LIMIT_MS});
    setTimeout(() => { ${then} }, ${LIMIT_MS / 2});`;
  const child = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", stderr: "pipe" });
  const printed = new Response(child.stderr).text();
  return { child, ended: async () => [await child.exited, child.signalCode, await printed] as const };
}

test("a process whose main loop stands still ends by a signal, with one line that says so", async () => {
  const { ended } = await watched("for (;;);");
  const [, signal, printed] = await ended();
  expect(signal).toBe("SIGKILL");
  const lines = printed
    .trim()
    .split("\n")
    .map((line) => JSON.parse(line));
  expect(lines).toMatchObject([{ level: "error", event: "main_loop_stuck" }]);
  expect(lines[0].stuck_ms).toBeGreaterThanOrEqual(LIMIT_MS);
});

test("a process that was stopped goes on", async () => {
  const { child, ended } = await watched(`console.log("up"); setTimeout(() => process.exit(0), ${3 * LIMIT_MS});`);
  for await (const _ of child.stdout) break;
  child.kill("SIGSTOP");
  await Bun.sleep(4 * LIMIT_MS);
  child.kill("SIGCONT");
  expect(await ended()).toEqual([0, null, ""]);
});

test("a process that has nothing to do ends by itself", async () => {
  const { ended } = await watched("");
  expect(await ended()).toEqual([0, null, ""]);
});
