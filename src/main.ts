// Chooses the command, loads the configuration, and for the gateway waits for the signal to drain. Nothing is
// started before everything that the operator wrote has been judged.
import { readCommandLine } from "./cli/command-line.ts";
import { helpText } from "./cli/help.ts";
import { migrate } from "./cli/migrate.ts";
import { openDataDir } from "./cli/open.ts";
import { mintToken, readTokenRequest, tokenRefusal } from "./cli/token.ts";
import { welcomeText } from "./cli/welcome.ts";
import { type Config, loadConfig, processEnvironment } from "./config.ts";
import { systemClock } from "./core/clock.ts";
import { StartupProblem } from "./core/startup.ts";
import { VERSION } from "./core/version.ts";
import { type OpenLog, openLog } from "./edge/log.ts";
import { isCompiled, restartInCleanEnvironment } from "./environment.ts";

const FAILED = 1;
const MISCONFIGURED = 2;
/** Ctrl-C reaches a program under npx twice, from the terminal and from npx; that is no second wish. */
const SECOND_SIGNAL_AFTER_MS = 1000;

async function main(words: readonly string[]): Promise<void> {
  const { command, flags, problems } = readCommandLine(words);
  if (problems.length === 0 && command === "help") return print(helpText());
  if (problems.length === 0 && command === "version") return print(`tollgate ${VERSION}\n`);
  const run = command === "token" || command === "migrate" ? command : "gateway";
  if (run === "gateway") restartInCleanEnvironment(processEnvironment);

  const loaded = loadConfig(run, flags, processEnvironment, process.stderr.isTTY);
  const token = run === "token" ? readTokenRequest(flags) : null;
  const all = [...problems, ...loaded.problems, ...(token?.problems ?? [])];
  const { config } = loaded;
  const refusal = token !== null && config !== null ? tokenRefusal(config) : null;
  if (refusal !== null) all.push(refusal);
  if (config === null || all.length > 0) return refuse(all);

  const log = openLog({ ...config.log, clock: systemClock });
  for (const warning of loaded.warnings) log.warn("configuration", { warning });
  if (run === "gateway") await runGateway(config, log);
  else if (token?.request) print(`${await mintToken(config, token.request, log)}\n`);
  else await migrate(config, log);
}

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
  const starting = startGateway(config, masterKey.key, log);
  drainOnSignal(async () => (await starting).stop(), log);
  const { url } = await starting;
  if (!masterKey.generated) return;
  log.flush();
  process.stderr.write(
    welcomeText(config, url, {
      cwd: process.cwd(),
      script: isCompiled() ? null : Bun.main,
      executable: process.execPath,
      bunVersion: Bun.version,
    }),
  );
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
