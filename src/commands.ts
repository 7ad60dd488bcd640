// The registry of commands, from which the command line is parsed, the help is printed, and commands are run.
//
// Each command imports its modules when it is called. A service replaces its process first (environment.ts), so this file is
// loaded twice before the service answers. Importing all modules here took 55 ms of CPU time; importing on call takes 10.
import { begin, type CliCommand, type Commands, configured, Misuse } from "./cli/command-line.ts";
import { type OpenLog, openLog } from "./cli/log.ts";
import { drainOnSignal, logStrayErrors, startWatchdog } from "./cli/process.ts";
import { type Config, type FacilitatorConfig, processEnvironment } from "./config.ts";
import { type Meters, silentMeters } from "./core/meters.ts";
import { ListenProblem, VERSION } from "./core/startup.ts";
import { systemClock } from "./core/time.ts";
import { restartInCleanEnvironment } from "./environment.ts";

const SERVICE = "[--host H] [--port N] [--data-dir DIR] [--env-file FILE]";
/** The flags of commands that work on the data. */
const DATA = "[--data-dir DIR] [--env-file FILE]";

const pki = (form: string, summary: string, about: string): CliCommand => {
  return { forms: [form], summary, about, run: async (line) => (await import("./cli/pki.ts")).pki(line) };
};
const account = (form: string, summary: string, about = summary): CliCommand => {
  const run: CliCommand["run"] = async (line) => (await import("./cli/account.ts")).account(line);
  return { forms: [`${form} ${DATA}`], summary, about, run };
};

/** The command that runs when the command line names none. */
export const SERVE: CliCommand = {
  forms: [`--mode gateway|facilitator ${SERVICE}`],
  summary: "run the gateway, or with --mode facilitator the facilitator",
  about: "run the gateway or the facilitator",
  async run(line) {
    // An environment that names the mode is one that a service is to start in.
    if (line.command === "" && !line.flags.has("mode") && !processEnvironment["TOLLGATE_MODE"]) {
      // A misspelt flag may be the one that names the mode.
      if (line.problems.length > 0) throw new Misuse(line.problems);
      if (line.flags.size === 0) return (await import("./cli/terminal/help.ts")).shortHelp(COMMANDS);
    }
    restartInCleanEnvironment(processEnvironment);
    const { config, log, located } = begin(line, "serve");
    const meters = await runService(config, log).catch((error) => {
      throw error instanceof ListenProblem ? error.told(line.flags, config.databaseUrl !== null, located) : error;
    });
    startWatchdog(config.log);
    const { watchLoop } = await import("./kernel/loop-watch.ts");
    // Started last: starting a service holds the event loop for a long time, but no caller is waiting yet.
    const stopWatching = watchLoop("main", config.blockedMs, log, meters.loopLate);
    process.on("exit", stopWatching);
    return undefined;
  },
};

/** Commands by their words on the command line, in the order in which help lists them. */
export const COMMANDS: Commands = {
  demo: {
    forms: [""],
    summary: "play paid calls on this machine, from the challenge to the money",
    about:
      "run paid calls on this machine, with a chain, both services and two agents, and keep all of it running to be tried",
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
  serve: {
    ...SERVE,
    forms: [`[--mode gateway|facilitator] ${SERVICE}`],
    about: "run the gateway, as --mode gateway does, or with --mode facilitator the facilitator",
  },
  doctor: {
    forms: [`[--mode gateway|facilitator] [--json] ${SERVICE}`],
    summary: "check everything that the configuration names, and change nothing",
    about: `check everything that the configuration names (database, keys, issuer, facilitators, nodes, wallets, clocks), and
change nothing; each line says ok, warn or fail, and what to do; the exit status is 1 after a fail, 2 on a bad configuration`,
    async run(line) {
      // The checks must run in the environment that a service would have.
      restartInCleanEnvironment(processEnvironment);
      // The doctor reports the warnings itself.
      const { config, unread } = configured(line, "serve");
      const { examine } = await import("./cli/doctor.ts");
      const { holds, text, document } = await examine(config, unread);
      const report = line.flags.has("json") ? `${JSON.stringify(document, null, 2)}\n` : text;
      // A check that is still pending must not keep the process alive.
      process.stdout.write(report, () => process.exit(holds ? 0 : 1));
      return undefined;
    },
  },
  token: {
    forms: [`--tenant T --user U [--scope "a b"] [--ttl 12h] ${DATA}`],
    summary: "print a token of the gateway's local issuer",
    about: "print a token of the gateway's local issuer; --ttl takes s, m, h or d, 12h if not given",
    run: async (line) => (await import("./cli/token.ts")).token(line),
  },
  "token revoke": {
    forms: [`--tenant T [--user U] ${DATA}`, `--all [--yes] ${DATA}`],
    summary: "revoke the tokens issued so far",
    about: `revoke all tokens that the user has so far, or without --user those of all users of the tenant; tokens issued later
are valid; --all replaces the key of the local issuer, and so revokes every token, even a forged one`,
    run: async (line) => (await import("./cli/token.ts")).revoke(line),
  },
  call: {
    forms: [
      "AGENT [--data @FILE|-|TEXT] [--stream] [--wait SECONDS] [--json] [--url U] [--token-file FILE] [--payer-key-file FILE] [--max-price USDC]",
    ],
    summary: "make a call through a gateway, and print the response",
    about: `call an agent by its ID or name, pay for the call if that is allowed, and print the response alone on standard output;
the token is TOLLGATE_TOKEN, or in a file; a price is paid only with a payer's key, and only up to --max-price.
Exit status: 0 success, 1 the call failed, 2 wrong command line, 3 the gateway took no call, 4 the outcome is not known
yet (the wait ran out; standard error has the ID), 130 Ctrl-C (a polled call goes on, a streamed one is cancelled)`,
    async run(line) {
      // Variables of the runtime could switch off the check of the gateway's certificate.
      restartInCleanEnvironment(processEnvironment);
      return (await import("./cli/call/call.ts")).call(line);
    },
  },
  "settlement set": {
    forms: [`--tenant T --facilitator URL --bundle FILE ${DATA}`],
    summary: "set the facilitator that collects a tenant's payments",
    about: `store the client certificate of a tenant (the bundle of tollgate pki client) as an encrypted credential, and name
the facilitator that collects the tenant's payments; works while the gateway runs, and again for a new bundle`,
    run: async (line) => (await import("./cli/settlement.ts")).setSettlement(line),
  },
  "account add": account(
    "NAME --cert FILE [--max-per-transaction N] [--daily-ceiling N]",
    "let the facilitator settle for the holder of a client certificate",
    `let the facilitator settle for the holder of this client certificate (PEM); limits are in smallest units and default
to those of the configuration; a running facilitator needs no restart`,
  ),
  "account list": account("[--json]", "print the facilitator's accounts"),
  "account disable": account("NAME", "disable an account, at once"),
  "account enable": account("NAME", "enable a disabled account, at once"),
  "account remove": account("NAME [--yes]", "remove an account with all its certificates, at once"),
  "account add-cert": account(
    "NAME --cert FILE",
    "add a client certificate to an account, at once",
    "add a client certificate to an account, at once, so that certificates rotate without a gap",
  ),
  "account remove-cert": account("NAME --cert FILE", "remove a client certificate from an account, at once"),
  "pki init": pki(
    "--dir DIR",
    "create a small private CA for mutual TLS",
    "create a small private CA for the mutual TLS between gateway and facilitator: ca.crt and ca.key",
  ),
  "pki server": pki(
    "--dir DIR --host H [--host H ...]",
    "issue the facilitator's certificate",
    "issue the facilitator's certificate: server.crt and server.key; H is a host name or an IP address",
  ),
  "pki client": pki(
    "--dir DIR --name N",
    "issue the certificate of a client of the facilitator",
    "issue a client's certificate: N.crt, N.key, and N.pem, the bundle for a credential of the gateway",
  ),
  "keys rotate": {
    forms: [`[--yes] [--json] ${DATA}`],
    summary: "renew every key while gateways run",
    about: `renew every key while gateways run: the master key, the key of each tenant, and the keys that sign tokens and
receipts; if a run is interrupted, the next run completes it (see tollgate help rotation). Earlier backups need the old
master key, so keep a copy of master.key; on a terminal the command asks first`,
    run: async (line) => (await import("./cli/keys.ts")).rotateKeys(line),
  },
  "receipt verify": {
    forms: ["FILE --jwks FILE|URL [--json]"],
    summary: "check trust receipts offline",
    about: `check trust receipts offline, one compact JWS per line: signatures, claims and the chain; names the first
invalid receipt and exits with 1; the keys are those that a gateway serves at /.well-known/jwks.json`,
    run: async (line) => (await import("./cli/receipt.ts")).verify(line),
  },
  migrate: {
    forms: [DATA],
    summary: "bring the database up to date and exit",
    about:
      "apply pending migrations of the database and exit; for a facilitator's database, set TOLLGATE_MODE=facilitator",
    run: async (line) => (await import("./cli/backup.ts")).migrate(line),
  },
  backup: {
    forms: [`FILE [--verify] [--json] ${DATA}`, `--verify FILE [--json] ${DATA}`],
    summary: "copy the SQLite database of a running service, or check a copy",
    about: `copy the SQLite database of a running or stopped service into a new file; with --verify also read the whole copy
and open its keys; no copy contains master.key, so keep that file too; --verify FILE checks an existing copy`,
    run: async (line) => (await import("./cli/backup.ts")).backup(line),
  },
  restore: {
    forms: [`[FILE] [--yes] ${DATA}`],
    summary: "restore a backup, or mark a database as restored (before starting the service)",
    about: `check FILE, a copy made by tollgate backup, and replace the SQLite database by it; without FILE, mark a
database that another tool has restored. What was open in that state may have happened since: waiting calls end unmade, and
payments that were signed before are refused. If calls are waiting and nothing marks the database as a copy, it asks first on
a terminal`,
    run: async (line) => (await import("./cli/backup.ts")).restore(line),
  },
  completion: {
    forms: ["SHELL"],
    summary: "print the completions for bash, zsh or fish",
    about: `print the script that completes commands and flags in SHELL, which is bash, zsh or fish; for bash write
source <(tollgate completion bash) into ~/.bashrc`,
    async run({ words: [shell = ""], problems }) {
      if (problems.length > 0 && shell === "") problems.push("SHELL must be bash, zsh or fish");
      if (problems.length > 0) throw new Misuse(problems);
      return (await import("./cli/terminal/completion.ts")).completionScript(shell, COMMANDS, SERVE);
    },
  },
  help: {
    forms: ["[TOPIC]", "COMMAND [COMMAND]", "WORD [WORD ...]", "--all"],
    summary: "print a page of the manual, or the help of a command",
    about: `print a page of the manual, or the help of a command, or look for words in the manual; with --all print every command and every variable, like tollgate --help;
tollgate help configuration is the page of all variables`,
    async run({ words, flags, problems }) {
      if (flags.has("all") && words.length > 0) problems.push("--all can't be combined with a topic or a command");
      if (problems.length > 0) throw new Misuse(problems);
      const { helpText, helpOn, searchHelp, shortHelp } = await import("./cli/terminal/help.ts");
      if (flags.has("all")) return helpText(COMMANDS, SERVE);
      if (words.length === 0) return shortHelp(COMMANDS);
      return helpOn(words, COMMANDS) ?? searchHelp(words.join(" "), COMMANDS);
    },
  },
  version: {
    forms: [""],
    summary: "print the version",
    about: "print the version",
    async run({ problems }) {
      if (problems.length > 0) throw new Misuse(problems);
      return `tollgate ${VERSION}\n`;
    },
  },
};

/** Opens the metrics port before anything else, so that a long start can be observed too. */
async function openMeters({ host, metricsPort: port, facilitator }: Config, log: OpenLog): Promise<Meters> {
  if (port === null) return silentMeters;
  const { startMetrics } = await import("./metrics/metrics.ts");
  return startMetrics({ host, port, endpoints: facilitator?.rpcUrls.length ?? null, log });
}

async function runService(config: Config, log: OpenLog): Promise<Meters> {
  const meters = await openMeters(config, log);
  if (config.facilitator === null) await runGateway(config, log, meters);
  else await runFacilitator(config.facilitator, log, meters);
  return meters;
}

async function runGateway(config: Config, log: OpenLog, meters: Meters): Promise<void> {
  const { prepareMasterKeys, requireOwnDataDir, requirePorts } = await import("./cli/open.ts");
  await requireOwnDataDir("gateway", config);
  requirePorts(config, config.host, { TOLLGATE_PORT: config.port });
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
  const { openDataDir, requireOwnDataDir, requirePorts } = await import("./cli/open.ts");
  const { host, port, openPort } = options;
  await requireOwnDataDir("facilitator", options);
  requirePorts(options, host, { TOLLGATE_PORT: port, TOLLGATE_OPEN_PORT: openPort });
  openDataDir(options, log);
  const { startFacilitator } = await import("./facilitator/start.ts");
  logStrayErrors(log);
  const starting = startFacilitator(options, log, meters);
  drainOnSignal(async () => (await starting).stop(), log);
  await starting;
}
