// Chooses the command, loads the configuration, and for the gateway waits for the signal to drain. Nothing is
// started before everything that the operator wrote has been judged.
import { readCommandLine } from "./cli/command-line.ts";
import { helpText } from "./cli/help.ts";
import { migrate } from "./cli/migrate.ts";
import { openDataDir } from "./cli/open.ts";
import { mintToken, readTokenRequest } from "./cli/token.ts";
import { welcomeText } from "./cli/welcome.ts";
import { type Config, loadConfig, processEnvironment } from "./config.ts";
import { systemClock } from "./core/clock.ts";
import { StartupProblem } from "./core/startup.ts";
import { VERSION } from "./core/version.ts";
import { type OpenLog, openLog } from "./edge/log.ts";
import { restartInCleanEnvironment } from "./environment.ts";

const FAILED = 1;
const MISCONFIGURED = 2;
/** Ctrl-C reaches a program under npx twice, from the terminal and from npx; that is no second wish. */
const SECOND_SIGNAL_AFTER_MS = 1000;

async function main(words: readonly string[]): Promise<void> {
  const { command, flags, problems } = readCommandLine(words);
  if (command === "help") return print(helpText());
  if (command === "version") return print(`tollgate ${VERSION}\n`);
  if (command === "gateway") restartInCleanEnvironment(processEnvironment);

  const loaded = loadConfig(command, flags, processEnvironment, process.stderr.isTTY);
  const { config } = loaded;
  const token = command === "token" ? readTokenRequest(flags, config) : NO_TOKEN;
  const all = [...problems, ...loaded.problems, ...token.problems];
  if (config === null || all.length > 0) return refuse(all);

  const log = openLog({ ...config.log, clock: systemClock });
  for (const warning of loaded.warnings) log.warn("configuration", { warning });
  if (command === "gateway") await runGateway(config, log);
  else if (token.request !== null) print(`${await mintToken(config, token.request, log)}\n`);
  else await migrate(config, log);
}

const NO_TOKEN = { request: null, problems: [] };

function print(text: string): void {
  process.stdout.write(text);
}

function refuse(problems: readonly string[]): void {
  const list = problems.map((problem) => `  - ${problem}\n`).join("");
  process.stderr.write(`tollgate can't start:\n${list}See tollgate --help.\n`);
  process.exitCode = MISCONFIGURED;
}

async function runGateway(config: Config, log: OpenLog): Promise<void> {
  const masterKey = openDataDir(config, log);
  const { startGateway } = await import("./gateway/start.ts");
  logStrayErrors(log);
  const starting = startGateway(config, masterKey.key, log);
  drainOnSignal(async () => (await starting).stop(), log);
  const { url } = await starting;
  if (!masterKey.generated) return;
  log.flush();
  process.stderr.write(
    welcomeText(config, url, {
      cwd: process.cwd(),
      script: Bun.isStandaloneExecutable ? null : Bun.main,
      executable: process.execPath,
      bunVersion: Bun.version,
    }),
  );
}

/**
 * A promise that nobody waits for takes nothing down with it: what it was part of has failed, and only that. An
 * exception outside of any request leaves nobody knows what behind, so the process ends; what it had accepted is
 * durable.
 */
function logStrayErrors(log: OpenLog): void {
  process.on("unhandledRejection", (error) => log.error("unhandled rejection", { error }));
  process.on("uncaughtException", (error) => {
    log.error("uncaught exception", { error });
    log.flush();
    process.exit(FAILED);
  });
}

function drainOnSignal(stop: () => Promise<void>, log: OpenLog): void {
  let askedAt: number | null = null;
  const onSignal = async (signal: string) => {
    if (askedAt !== null) {
      if (performance.now() - askedAt > SECOND_SIGNAL_AFTER_MS) process.exit(FAILED);
      return;
    }
    askedAt = performance.now();
    log.info("draining", { signal });
    try {
      await stop();
      log.info("stopped");
      process.exit(0);
    } catch (error) {
      log.error("stopped badly", { error });
      process.exit(FAILED);
    }
  };
  process.on("SIGTERM", onSignal);
  process.on("SIGINT", onSignal);
}

try {
  await main(process.argv.slice(2));
} catch (error) {
  if (error instanceof StartupProblem) {
    refuse([error.message]);
  } else {
    openLog({ level: "error", format: process.stderr.isTTY ? "pretty" : "json", clock: systemClock }).error(
      "failed",
      { error },
    );
    process.exitCode = FAILED;
  }
  // Whatever was half started (connections, workers) must not keep the process.
  process.exit();
}
