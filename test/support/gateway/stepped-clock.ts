// A wall clock that a test steps while a spawned gateway runs by it. Only what tells the time of day moves: timers
// and durations go on, as they do on a machine whose clock is set. The compiled binary lets nothing into its runtime,
// so such a gateway runs from its sources.
import { mkdtempSync, renameSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "./process.ts";

const MAIN = join(import.meta.dir, "../../../src/main.ts");

export interface SteppedClock {
  /** Goes by this clock from its start. */
  readonly program: readonly string[];
  /** From now on it is off by so much. */
  set(offsetMs: number): void;
}

/** Runs before the program. The file is read each time, so a step is in force at once. */
const preload = (file: string) => `
const { readFileSync } = require("node:fs");
const [real, now] = [Date, Date.now];
Date.now = () => now() + Number(readFileSync(${JSON.stringify(file)}, "utf8"));
globalThis.Date = new Proxy(real, {
  construct: (_, given, target) => Reflect.construct(real, given.length === 0 ? [real.now()] : given, target),
});
`;

export function steppedClock(offsetMs = 0): SteppedClock {
  const home = mkdtempSync(join(temporaryRoot(), "clock-"));
  const [file, script] = [join(home, "offset"), join(home, "clock.cjs")];
  const set = (ms: number) => {
    // Moved to its place, so that nobody reads half of it.
    writeFileSync(`${file}.new`, `${ms}`);
    renameSync(`${file}.new`, file);
  };
  set(offsetMs);
  writeFileSync(script, preload(file));
  return { program: [process.execPath, `--preload=${script}`, MAIN], set };
}
