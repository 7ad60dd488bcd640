// The registry of commands, from which the command line is parsed, the help is printed, and commands are run.
//
// Each command imports its modules when it is called. A service replaces its process first (environment.ts), so this file is
// loaded twice before the service answers. Importing everything here took 55 ms of CPU time; this takes 10.
import { begin, type CliCommand, type Commands, configured, Misuse } from "./cli/command-line.ts";
import { type OpenLog, openLog } from "./cli/log.ts";
import { drainOnSignal, logStrayErrors, startWatchdog } from "./cli/process.ts";
import { type Config, type FacilitatorConfig, processEnvironment } from "./config.ts";
import { type Meters, silentMeters } from "./core/meters.ts";
import { systemClock } from "./core/time.ts";
import { restartInCleanEnvironment } from "./environment.ts";

const pki = (forms: string, about: string): CliCommand => ({
  forms: [forms],
  about,
  run: async (line) => (await import("./cli/pki.ts")).pki(line),
});
const account = (forms: string, about: string): CliCommand => ({
  forms: [`${forms} [--data-dir DIR]`.trimStart()],
  about,
  run: async (line) => (await import("./cli/account.ts")).account(line),
});

/** The command that runs when the command line names none. */
export const SERVE: CliCommand = {
  forms: ["--mode gateway|facilitator [--host H] [--port N] [--data-dir DIR]"],
  about: "run the gateway or the facilitator",
  async run(line) {
    restartInCleanEnvironment(processEnvironment);
    const { config, log } = begin(line, "serve");
    const meters = await openMeters(config, log);
    if (config.facilitator === null) await runGateway(config, log, meters);
    else await runFacilitator(config.facilitator, log, meters);
    startWatchdog(config.log);
    const { watchLoop } = await import("./kernel/loop-watch.ts");
    // Started last, since starting a service holds the event loop for long, when no caller waits yet.
    const stopWatching = watchLoop("main", config.blockedMs, log.warn, meters.loopLate);
    process.on("exit", stopWatching);
    return undefined;
  },
};

/** Commands by their words on the command line. */
export const COMMANDS: Commands = {
  token: {
    forms: ['--tenant T --user U [--scope "a b"] [--ttl 12h] [--data-dir DIR]'],
    about: "print a token of the gateway's local issuer; --ttl takes s, m, h or d, 12h if not given",
    run: async (line) => (await import("./cli/token.ts")).token(line),
  },
  "token revoke": {
    forms: ["--tenant T [--user U] [--data-dir DIR]", "--all [--data-dir DIR]"],
    about: `revoke the local issuer's tokens of this user, or of all users of the tenant, up to now; later ones are valid;
with --all revoke every token up to now, forged ones too, by replacing the issuer's key`,
    run: async (line) => (await import("./cli/token.ts")).revoke(line),
  },
  "keys rotate": {
    forms: ["[--data-dir DIR]"],
    about: `renew every key while gateways run: the master key, the key of each tenant, and the keys that sign tokens and
receipts; the next run resumes one that was interrupted (see tollgate help rotation)`,
    run: async (line) => (await import("./cli/keys.ts")).rotateKeys(line),
  },
  "account add": account(
    "NAME --cert FILE [--max-per-transaction N] [--daily-ceiling N]",
    `let the facilitator settle for the holder of this client certificate (PEM); limits are in atomic units and default
to those of the configuration; a running facilitator needs no restart`,
  ),
  "account list": account("", "print the facilitator's accounts"),
  "account disable": account("NAME", "disable an account, at once"),
  "account enable": account("NAME", "enable a disabled account, at once"),
  "account remove": account("NAME", "remove an account with all its certificates, at once"),
  "account add-cert": account(
    "NAME --cert FILE",
    "add a client certificate to an account, at once, so that certificates rotate without a gap",
  ),
  "account remove-cert": account("NAME --cert FILE", "remove a client certificate from an account, at once"),
  "pki init": pki(
    "--dir DIR",
    "create a small private CA for the mutual TLS between gateway and facilitator: ca.crt and ca.key",
  ),
  "pki server": pki(
    "--dir DIR --host H [--host H ...]",
    "issue the facilitator's certificate: server.crt and server.key; H is a host name or an IP address",
  ),
  "pki client": pki(
    "--dir DIR --name N",
    "issue a client's certificate: N.crt, N.key, and N.pem, the bundle for a credential of the gateway",
  ),
  "receipt verify": {
    forms: ["FILE --jwks FILE|URL"],
    about: `check trust receipts offline, one compact JWS per line: signatures, claims and the chain; exits with 1 and names
the first invalid one; the keys are those that a gateway serves at /.well-known/jwks.json`,
    run: async (line) => (await import("./cli/receipt.ts")).verify(line),
  },
  migrate: {
    forms: ["[--data-dir DIR]"],
    about: "apply pending migrations of the database and exit; for a facilitator's, set TOLLGATE_MODE=facilitator",
    run: async (line) => (await import("./cli/backup.ts")).migrate(line),
  },
  backup: {
    forms: ["FILE [--verify] [--data-dir DIR]", "--verify FILE [--data-dir DIR]"],
    about: `copy the SQLite database of a running or stopped service into a new file; --verify then reads the whole copy and
opens its keys; keep master.key with it, which no copy contains; --verify FILE checks an existing copy and
makes none`,
    run: async (line) => (await import("./cli/backup.ts")).backup(line),
  },
  restore: {
    forms: ["[FILE] [--data-dir DIR]"],
    about: `run once before the first start after a restore to an older state: ends the calls in flight of the copy, and keeps
payments signed before it from buying twice; FILE is checked and replaces the SQLite database`,
    run: async (line) => (await import("./cli/backup.ts")).restore(line),
  },
  doctor: {
    forms: ["[--mode gateway|facilitator] [--host H] [--port N] [--data-dir DIR]"],
    about: `check what the configuration names (database, keys, issuer, facilitators, nodes, wallets, clocks), changing nothing;
each line says ok, warn or fail, and what to do; exits with 1 after a fail, and with 2 on a bad configuration`,
    async run(line) {
      // The checks must run in the environment that a service would have.
      restartInCleanEnvironment(processEnvironment);
      // The doctor reports the warnings itself.
      const { config } = configured(line, "serve");
      const { examine } = await import("./cli/doctor.ts");
      const { isHealthy, text } = await examine(config);
      // A check that is still pending must not keep the process alive.
      process.stdout.write(text, () => process.exit(isHealthy ? 0 : 1));
      return undefined;
    },
  },
  demo: {
    forms: [""],
    about:
      "run paid calls on this machine, with a chain, both services and two agents of its own, and stay up to be tried",
    async run(line) {
      restartInCleanEnvironment(processEnvironment);
      const { config, warnings } = configured(line, "demo");
      // The demo prints its own progress, so its services log problems only.
      const log = openLog({ ...config.log, level: "warn", clock: systemClock });
      for (const warning of warnings) log.warn("configuration", { warning });
      const { runDemo } = await import("./cli/demo.ts");
      await runDemo(config.anvil, config.network, log);
      return undefined;
    },
  },
  help: {
    forms: ["[TOPIC]"],
    about: "print a page of the manual; the topics are listed below",
    async run({ words: [topic], problems }) {
      if (problems.length > 0) throw new Misuse(problems);
      const { helpText, topicText } = await import("./cli/help.ts");
      return topic === undefined ? helpText(COMMANDS, SERVE) : topicText(topic);
    },
  },
};

/** Opens the metrics port before anything else, so that a long start can be observed too. */
async function openMeters({ host, metricsPort: port, facilitator }: Config, log: OpenLog): Promise<Meters> {
  if (port === null) return silentMeters;
  const { startMetrics } = await import("./metrics/metrics.ts");
  return startMetrics({ host, port, endpoints: facilitator?.rpcUrls.length ?? null, log });
}

async function runGateway(config: Config, log: OpenLog, meters: Meters): Promise<void> {
  const { prepareMasterKeys } = await import("./cli/open.ts");
  const { keys, generated } = prepareMasterKeys(config, log);
  const { startGateway } = await import("./gateway/start.ts");
  logStrayErrors(log);
  const starting = startGateway(config, keys, log, meters);
  drainOnSignal(async () => (await starting).stop(), log);
  const { url } = await starting;
  // In JSON format standard error holds only log lines, so there is no welcome text.
  if (!generated || config.log.format === "json") return;
  const { welcomeText } = await import("./cli/program.ts");
  log.flush();
  process.stderr.write(welcomeText(config, url));
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
