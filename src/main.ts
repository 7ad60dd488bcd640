// The entry point: runs the command of the command line, prints its output, and exits with 0, 1 (failed) or 2 (misconfigured).
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

/** Reports why the command failed. @returns the exit status */
function statusOf(line: CommandLine, error: unknown): number {
  if (error instanceof Misuse || error instanceof StartupProblem) {
    refuse(line, error instanceof Misuse ? error.problems : [error.message]);
    // A process manager restarts a process that exits with FAILED, but not one that is misconfigured.
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
  // A service prints nothing here, and its standard output may be closed.
  if (text !== "") (holds ? process.stdout : process.stderr).write(text);
  if (!holds) process.exitCode = FAILED;
} catch (error) {
  process.exitCode = statusOf(line, error);
  // Connections and workers that were opened before the failure must not keep the process alive.
  process.exit();
}
