// The entry point: runs the command of the command line, prints its output, and exits with 0, 1 (failed) or 2 (misconfigured).
import {
  type CommandLine,
  type CommandOutcome,
  type CommandVerdict,
  Misuse,
  readCommandLine,
} from "./cli/command-line.ts";
import { openLog } from "./cli/log.ts";
import { COMMANDS, SERVE } from "./commands.ts";
import { Fault } from "./core/fault.ts";
import { PassingStartupProblem, StartupProblem } from "./core/startup.ts";
import { systemClock } from "./core/time.ts";

const FAILED = 1;
const MISCONFIGURED = 2;

async function outcomeOf(line: CommandLine): Promise<CommandOutcome> {
  const command = line.command === "serve" ? SERVE : COMMANDS[line.command ?? ""];
  if (command === undefined) throw new Misuse(line.problems);
  return command.run(line);
}

function refuse({ command }: CommandLine, problems: readonly string[]): void {
  const what = command === null || command === "serve" ? "can't start" : `${command} can't be done`;
  const list = problems.map((problem) => `  - ${problem}\n`).join("");
  const help = command === null ? "help" : command === "serve" ? "--help" : `${command} --help`;
  process.stderr.write(`tollgate ${what}:\n${list}See tollgate ${help}.\n`);
}

/** Prints the one document that stands on standard output with --json. */
function printDocument(document: object): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  process.stdout.write(`${JSON.stringify(document, null, 2)}\n`, () => resolve());
  return promise;
}

/** Why the command failed, in sentences. */
function problemsOf(error: unknown): readonly string[] {
  if (error instanceof Misuse) return error.problems;
  const isTold = error instanceof StartupProblem || error instanceof Fault;
  return [isTold ? error.message : "it failed; standard error says more"];
}

/** Reports why the command failed. @returns the exit status */
function statusOf(line: CommandLine, error: unknown): number {
  if (error instanceof Misuse || error instanceof StartupProblem) {
    refuse(line, problemsOf(error));
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
const isJson = line.flags.has("json");
try {
  const outcome = await outcomeOf(line);
  const { holds, text, document }: CommandVerdict =
    typeof outcome === "object" ? outcome : { holds: true, text: outcome ?? "" };
  if (isJson && document !== undefined) await printDocument(document);
  // A service prints nothing here, and its standard output may be closed.
  else if (text !== "") (holds ? process.stdout : process.stderr).write(text);
  if (!holds) process.exitCode = FAILED;
} catch (error) {
  process.exitCode = statusOf(line, error);
  if (isJson) await printDocument({ problems: problemsOf(error) });
  // Connections and workers that were opened before the failure must not keep the process alive.
  process.exit();
}
