// A run of chaos from the command line: `bun test/chaos/main.ts --seconds 120 --seed 7`. It ends with 1 when something does
// not agree, says what, and keeps the logs of all services.
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { runChaos } from "./run.ts";

const SECONDS_MAX = 3_600;

const { values } = parseArgs({
  options: {
    seconds: { type: "string", default: "120" },
    seed: { type: "string", default: String(crypto.getRandomValues(new Uint32Array(1))[0]) },
    "no-rates": { type: "boolean", default: false },
  },
});
const [seconds, seed] = [Number(values.seconds), Number(values.seed)];
if (!(Number.isInteger(seconds) && seconds >= 1 && seconds <= SECONDS_MAX && Number.isInteger(seed))) {
  throw new Error(`--seconds is a whole number from 1 to ${SECONDS_MAX}, and --seed is a whole number`);
}
const say = (line: string) => void process.stdout.write(`${line}\n`);
say(`seed ${seed}`);
const { problems, figures, logs } = await runChaos({ seconds, seed, checksRates: !values["no-rates"], say });
for (const [name, value] of Object.entries(figures)) say(`${name}: ${value}`);
for (const problem of problems) say(`NOT SO: ${problem}`);
if (problems.length > 0) {
  const dir = mkdtempSync(join(tmpdir(), "tollgate-chaos-"));
  for (const [name, log] of logs) writeFileSync(join(dir, `${name}.log`), log);
  say(`the logs of all services are in ${dir}; repeat with --seed ${seed}`);
}
process.exit(problems.length > 0 ? 1 : 0);
