// Chooses the command, loads the configuration, and for the two services waits for the signal to drain. Nothing is
// started before everything that the operator wrote has been judged.
//
// Each command loads what it needs when it is called. A service replaces its process first (environment.ts), so what stands
// here is loaded twice before it answers. Loading everything at once took 55 ms of processor time; this takes 10.
import type { AccountCommand } from "./cli/account.ts";
import { type CommandLine, readCommandLine } from "./cli/command-line.ts";
import { type OpenLog, openLog } from "./cli/log.ts";
import type { PkiCommand } from "./cli/pki.ts";
import { drainOnSignal, logStrayErrors } from "./cli/process.ts";
import {
  type Config,
  type FacilitatorConfig,
  type Loaded,
  loadConfig,
  type Purpose,
  processEnvironment,
} from "./config.ts";
import { Fault } from "./core/fault.ts";
import { type Meters, silentMeters } from "./core/meters.ts";
import { PassingStartupProblem, StartupProblem, VERSION } from "./core/startup.ts";
import { systemClock } from "./core/time.ts";
import { restartInCleanEnvironment } from "./environment.ts";

const FAILED = 1;
const MISCONFIGURED = 2;

async function main(line: CommandLine): Promise<void> {
  switch (line.command) {
    case null:
      return refuse(line, line.problems);
    case "help":
      return printHelp(line);
    case "version":
      return print(`tollgate ${VERSION}\n`);
    case "serve":
      return serve(line);
    case "token":
      return token(line);
    case "token revoke":
      return revokeToken(line);
    case "keys rotate":
      return keys(line);
    case "migrate":
      return migrate(line);
    case "backup":
      return backup(line);
    case "restore":
      return restoreDatabase(line);
    case "doctor":
      return doctor(line);
    case "demo":
      return demo(line);
    case "pki init":
    case "pki server":
    case "pki client":
      return pki(line.command, line);
    case "receipt verify":
      return receipt(line);
    default:
      return account(line.command, line);
  }
}

async function printHelp(line: CommandLine): Promise<void> {
  if (line.problems.length > 0) return refuse(line, line.problems);
  const { helpText, topicText } = await import("./cli/help.ts");
  const [topic] = line.words;
  print(topic === undefined ? helpText() : topicText(topic));
}

function load(purpose: Purpose, { flags }: CommandLine): Loaded {
  return loadConfig(purpose, flags, processEnvironment, process.stderr.isTTY);
}

/** Null when there are problems; then all of them have been printed. */
function begin(
  line: CommandLine,
  { config, problems, warnings }: Loaded,
  own: readonly string[],
): { readonly config: Config; readonly log: OpenLog } | null {
  const all = [...line.problems, ...problems, ...own];
  if (config === null || all.length > 0) {
    // A variable that nothing reads may be a misspelt one.
    refuse(line, [...all, ...warnings]);
    return null;
  }
  const log = openLog({ ...config.log, clock: systemClock });
  for (const warning of warnings) log.warn("configuration", { warning });
  return { config, log };
}

async function serve(line: CommandLine): Promise<void> {
  restartInCleanEnvironment(processEnvironment);
  const ready = begin(line, load("serve", line), []);
  if (ready === null) return;
  const { config, log } = ready;
  const meters = await openMeters(config, log);
  if (config.facilitator === null) await runGateway(config, log, meters);
  else await runFacilitator(config.facilitator, log, meters);
  const { startWatchdog } = await import("./cli/process.ts");
  startWatchdog(config.log);
  const { watchLoop } = await import("./kernel/loop-watch.ts");
  // Begun last: a start holds the loop for long, and nobody waits yet.
  const stopWatching = watchLoop("main", config.blockedMs, log.warn, meters.loopLate);
  process.on("exit", stopWatching);
}

/** The port of the metrics is open before anything else is, so that a start that takes long can be seen too. */
async function openMeters({ host, metricsPort: port, facilitator }: Config, log: OpenLog): Promise<Meters> {
  if (port === null) return silentMeters;
  const { startMetrics } = await import("./metrics/metrics.ts");
  return startMetrics({ host, port, endpoints: facilitator?.rpcUrls.length ?? null, log });
}

async function migrate(line: CommandLine): Promise<void> {
  const ready = begin(line, load("migrate", line), []);
  if (ready === null) return;
  const { migrate: apply } = await import("./cli/backup.ts");
  await apply(ready.config, ready.log);
}

async function backup(line: CommandLine): Promise<void> {
  const { backUp, readBackupRequest } = await import("./cli/backup.ts");
  const { request, problems } = readBackupRequest(line);
  const ready = begin(line, load("backup", line), problems);
  if (ready !== null && request !== null) tell(backUp(ready.config, request, ready.log));
}

async function restoreDatabase(line: CommandLine): Promise<void> {
  const { restore } = await import("./cli/backup.ts");
  const ready = begin(line, load("restore", line), []);
  if (ready !== null) print(await restore(ready.config, line.words[0] ?? null, ready.log));
}

/** Restarts as a service does: what steers the runtime in the environment must not make a difference. */
async function doctor(line: CommandLine): Promise<void> {
  restartInCleanEnvironment(processEnvironment);
  const loaded = load("serve", line);
  // The doctor reports the warnings itself.
  const ready = begin(line, loaded.config === null ? loaded : { ...loaded, warnings: [] }, []);
  if (ready === null) return;
  const { examine } = await import("./cli/doctor.ts");
  const { isHealthy, text } = await examine(ready.config);
  // A check that is still waiting must not keep the process.
  process.stdout.write(text, () => process.exit(isHealthy ? 0 : FAILED));
}

async function token(line: CommandLine): Promise<void> {
  const { mintToken, readTokenRequest } = await import("./cli/token.ts");
  const loaded = load("token", line);
  const { request, problems } = readTokenRequest(line.flags, loaded.config);
  const ready = begin(line, loaded, problems);
  if (ready !== null && request !== null) print(`${await mintToken(ready.config, request, ready.log)}\n`);
}

async function revokeToken(line: CommandLine): Promise<void> {
  const { readRevokeRequest, revoke } = await import("./cli/token.ts");
  const loaded = load("token", line);
  const { request, problems } = readRevokeRequest(line.flags, loaded.config);
  const ready = begin(line, loaded, problems);
  if (ready !== null && request !== null) print(await revoke(ready.config, request, ready.log));
}

async function keys(line: CommandLine): Promise<void> {
  const { rotateKeys, rotationProblems } = await import("./cli/keys.ts");
  const loaded = load("keys", line);
  const ready = begin(line, loaded, rotationProblems(loaded.config));
  if (ready !== null) tell(await rotateKeys(ready.config, ready.log));
}

async function account(command: AccountCommand, line: CommandLine): Promise<void> {
  const { readAccountRequest, runAccount } = await import("./cli/account.ts");
  const { request, problems } = readAccountRequest(command, line);
  const ready = begin(line, load("account", line), problems);
  if (ready !== null && request !== null) print(await runAccount(ready.config, request, ready.log));
}

async function pki(command: PkiCommand, line: CommandLine): Promise<void> {
  const { readPkiRequest, runPki } = await import("./cli/pki.ts");
  const { request, problems } = readPkiRequest(command, line);
  const all = [...line.problems, ...problems];
  if (request === null || all.length > 0) refuse(line, all);
  else print(await runPki(request));
}

async function receipt(line: CommandLine): Promise<void> {
  const { readReceiptRequest, verifyReceipts } = await import("./cli/receipt.ts");
  const { request, problems } = readReceiptRequest(line);
  const all = [...line.problems, ...problems];
  if (request === null || all.length > 0) return refuse(line, all);
  tell(await verifyReceipts(request));
}

/** Prints the result of a check, on standard error if it does not hold. */
function tell({ holds, text }: { readonly holds: boolean; readonly text: string }): void {
  (holds ? process.stdout : process.stderr).write(text);
  if (!holds) process.exitCode = FAILED;
}

/** The demo shows what goes well, so its services log only what is wrong. */
async function demo(line: CommandLine): Promise<void> {
  restartInCleanEnvironment(processEnvironment);
  const { config, ...loaded } = load("demo", line);
  const quiet = config === null ? null : { ...config, log: { ...config.log, level: "warn" as const } };
  const ready = begin(line, { ...loaded, config: quiet }, []);
  if (ready === null) return;
  const { runDemo } = await import("./cli/demo.ts");
  await runDemo(ready.config.anvil, ready.log);
}

function print(text: string): void {
  process.stdout.write(text);
}

function refuse({ command }: CommandLine, problems: readonly string[]): void {
  const what = command === null || command === "serve" ? "can't start" : `${command} can't be done`;
  const list = problems.map((problem) => `  - ${problem}\n`).join("");
  process.stderr.write(`tollgate ${what}:\n${list}See tollgate --help.\n`);
  process.exitCode = MISCONFIGURED;
}

async function runGateway(config: Config, log: OpenLog, meters: Meters): Promise<void> {
  const { prepareMasterKeys } = await import("./cli/open.ts");
  const { keys, generated } = prepareMasterKeys(config, log);
  const { startGateway } = await import("./gateway/start.ts");
  logStrayErrors(log);
  const starting = startGateway(config, keys, log, meters);
  drainOnSignal(async () => (await starting).stop(), log);
  const { url } = await starting;
  // A log that programs read holds nothing but JSON lines.
  if (!generated || config.log.format === "json") return;
  const { welcomeText } = await import("./cli/program.ts");
  const { thisProgram } = await import("./cli/program.ts");
  log.flush();
  process.stderr.write(welcomeText(config, url, thisProgram()));
}

async function runFacilitator(options: FacilitatorConfig, log: OpenLog, meters: Meters): Promise<void> {
  const { openDataDir } = await import("./cli/open.ts");
  openDataDir(options, log);
  const { startFacilitator } = await import("./facilitator/start.ts");
  logStrayErrors(log);
  const starting = startFacilitator(options, log, meters);
  drainOnSignal(async () => (await starting).stop(), log);
  await starting;
}

const line = readCommandLine(process.argv.slice(2));
try {
  await main(line);
} catch (error) {
  if (error instanceof StartupProblem) {
    refuse(line, [error.message]);
    // A process manager restarts what ends with this status, and does not restart what is misconfigured.
    if (error instanceof PassingStartupProblem) process.exitCode = FAILED;
  } else if (line.command !== "serve" && error instanceof Fault && error.kind === "unavailable") {
    process.stderr.write(`tollgate ${line.command} was cut short: ${error.message}. Run it again when it can.\n`);
    process.exitCode = FAILED;
  } else {
    openLog({ level: "error", format: process.stderr.isTTY ? "pretty" : "json", clock: systemClock }).error("failed", {
      error,
    });
    process.exitCode = FAILED;
  }
  // What was half started (connections, workers) must not keep the process.
  process.exit();
}
