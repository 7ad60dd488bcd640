// The entry point: runs the command of the command line, prints its output, and exits with 0, 1 (failed), 2 (misconfigured) or a status of the command's own.
import type { CommandLine, CommandOutcome, CommandVerdict } from "./cli/command-line.ts";
import { Misuse, readCommandLine } from "./cli/command-line.ts";
import { openLog } from "./cli/log.ts";
import { COMMANDS, SERVE } from "./commands.ts";
import { Fault } from "./core/fault.ts";
import { PassingStartupProblem, pathProblem, StartupProblem } from "./core/startup.ts";
import { printableJson } from "./core/text.ts";
import { systemClock } from "./core/time.ts";

const FAILED = 1;
const MISCONFIGURED = 2;

async function outcomeOf(line: CommandLine): Promise<CommandOutcome> {
  const command = line.command === "" ? SERVE : COMMANDS[line.command ?? ""];
  if (command === undefined) throw new Misuse(line.problems);
  return command.run(line);
}

async function refuse({ command }: CommandLine, problems: readonly string[]): Promise<void> {
  const { programText } = await import("./cli/program.ts");
  const list = problems.map((problem) => `  - ${problem}\n`).join("");
  const what = isService(command) ? "can't start" : `${command} failed`;
  const said = command === null ? `tollgate: ${problems.join("; ")}\n` : `tollgate ${what}:\n${list}`;
  process.stderr.write(
    `${said}See ${programText()} ${command === null || command === "help" ? "help" : `${command || "serve"} --help`}.\n`,
  );
}

const isService = (command: string | null): boolean => command === "" || command === "serve";

/** Prints the one document that stands on standard output with --json. */
function printDocument(document: object): Promise<void> {
  const text = `${printableJson(JSON.stringify(document, null, 2))}\n`;
  return new Promise((resolve) => process.stdout.write(text, () => resolve()));
}

/** Why the command failed, in sentences. */
function problemsOf(error: unknown): readonly string[] {
  if (error instanceof Misuse) return error.problems;
  const isTold = error instanceof StartupProblem || error instanceof Fault;
  return [isTold ? error.message : "it failed; standard error says more"];
}

/** Reports why the command failed. @returns the exit status */
async function statusOf(line: CommandLine, error: unknown): Promise<number> {
  if (error instanceof Misuse || error instanceof StartupProblem) {
    await refuse(line, problemsOf(error));
    // A process manager restarts a process that exits with FAILED, but not one that is misconfigured.
    return error instanceof PassingStartupProblem ? FAILED : MISCONFIGURED;
  }
  if (!isService(line.command) && error instanceof Fault && error.kind === "unavailable") {
    process.stderr.write(`tollgate ${line.command} was cut short: ${error.message}. Run the command again later.\n`);
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
  const verdict: CommandVerdict = typeof outcome === "object" ? outcome : { holds: true, text: outcome ?? "" };
  const { holds, text, document, status = FAILED } = verdict;
  if (isJson && document !== undefined) await printDocument(document);
  // A service prints nothing here, and its standard output may be closed.
  else if (text !== "") (holds ? process.stdout : process.stderr).write(text);
  if (!holds) process.exitCode = status;
} catch (thrown) {
  const error = pathProblem(thrown) ?? thrown;
  process.exitCode = await statusOf(line, error);
  if (isJson) await printDocument({ problems: problemsOf(error) });
  // Connections and workers that were opened before the failure must not keep the process alive.
  process.exit();
}
