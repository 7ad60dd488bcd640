// Runs the command that was asked for, prints what it came to, and ends with the status that says so.
import { type CommandLine, type CommandOutcome, Misuse, readCommandLine } from "./cli/command-line.ts";
import { openLog } from "./cli/log.ts";
import { COMMANDS, SERVE } from "./commands.ts";
import { Fault } from "./core/fault.ts";
import { PassingStartupProblem, StartupProblem, VERSION } from "./core/startup.ts";
import { systemClock } from "./core/time.ts";

const FAILED = 1;
const MISCONFIGURED = 2;

async function outcomeOf(line: CommandLine): Promise<CommandOutcome> {
  if (line.command === "version") return `tollgate ${VERSION}\n`;
  const command = line.command === "serve" ? SERVE : COMMANDS[line.command ?? ""];
  if (command === undefined) throw new Misuse(line.problems);
  return command.run(line);
}

function refuse({ command }: CommandLine, problems: readonly string[]): void {
  const what = command === null || command === "serve" ? "can't start" : `${command} can't be done`;
  const list = problems.map((problem) => `  - ${problem}\n`).join("");
  process.stderr.write(`tollgate ${what}:\n${list}See tollgate --help.\n`);
}

/** Tells why the command failed. @returns the exit status */
function statusOf(line: CommandLine, error: unknown): number {
  if (error instanceof Misuse || error instanceof StartupProblem) {
    refuse(line, error instanceof Misuse ? error.problems : [error.message]);
    // A process manager restarts what ends with the first status, and does not restart what is misconfigured.
    return error instanceof PassingStartupProblem ? FAILED : MISCONFIGURED;
  }
  if (line.command !== "serve" && error instanceof Fault && error.kind === "unavailable") {
    process.stderr.write(`tollgate ${line.command} was cut short: ${error.message}. Run it again when it can.\n`);
    return FAILED;
  }
  const format = process.stderr.isTTY ? "pretty" : "json";
  openLog({ level: "error", format, clock: systemClock }).error("failed", { error });
  return FAILED;
}

const line = readCommandLine(process.argv.slice(2), COMMANDS, SERVE);
try {
  const outcome = await outcomeOf(line);
  const { holds, text } = typeof outcome === "object" ? outcome : { holds: true, text: outcome ?? "" };
  (holds ? process.stdout : process.stderr).write(text);
  if (!holds) process.exitCode = FAILED;
} catch (error) {
  process.exitCode = statusOf(line, error);
  // What was half started (connections, workers) must not keep the process.
  process.exit();
}
