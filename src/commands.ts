// The registry of commands: from it come the reading of the command line, the help and what runs.
//
// Each command loads what it needs when it is called. A service replaces its process first (environment.ts), so what stands
// here is loaded twice before it answers. Loading everything at once took 55 ms of processor time; this takes 10.
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

/** The command without any words. */
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
    // Begun last: a start holds the loop for long, and nobody waits yet.
    const stopWatching = watchLoop("main", config.blockedMs, log.warn, meters.loopLate);
    process.on("exit", stopWatching);
    return undefined;
  },
};

/** By the words that call them. */
export const COMMANDS: Commands = {
  token: {
    forms: ['--tenant T --user U [--scope "a b"] [--ttl 12h] [--data-dir DIR]'],
    about: "print a token of the gateway's local issuer; --ttl takes s, m, h or d, 12h if not given",
    run: async (line) => (await import("./cli/token.ts")).token(line),
  },
  "token revoke": {
    forms: ["--tenant T [--user U] [--data-dir DIR]", "--all [--data-dir DIR]"],
    about: `refuse the tokens of the local issuer that this user, or each user of the tenant, has by now; new ones are taken;
with --all every token that there is by now, forged ones too: the issuer's key is replaced`,
    run: async (line) => (await import("./cli/token.ts")).revoke(line),
  },
  "keys rotate": {
    forms: ["[--data-dir DIR]"],
    about: `renew every key beside the gateways that run: the master key, the key of each tenant, and the keys that sign tokens
and receipts; a run that was cut short is taken up by the next (see tollgate help rotation)`,
    run: async (line) => (await import("./cli/keys.ts")).rotateKeys(line),
  },
  "account add": account(
    "NAME --cert FILE [--max-per-transaction N] [--daily-ceiling N]",
    `let the facilitator settle for the holder of this client certificate (PEM); limits are in atomic units, those
of the configuration if not given; a running facilitator needs no restart`,
  ),
  "account list": account("", "print the facilitator's accounts"),
  "account disable": account("NAME", "take an account out of use, at once"),
  "account enable": account("NAME", "put it back, at once"),
  "account remove": account("NAME", "remove it with all its certificates, at once"),
  "account add-cert": account(
    "NAME --cert FILE",
    "give an account one more client certificate, at once; so they rotate without a gap",
  ),
  "account remove-cert": account("NAME --cert FILE", "take one away, at once"),
  "pki init": pki(
    "--dir DIR",
    "make a small private CA for the mutual TLS between gateway and facilitator: ca.crt and ca.key",
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
    about: `check trust receipts offline, one compact JWS a line: signatures, claims and the chain; ends with 1 and names
the first that does not hold; the keys are those that a gateway shows at /.well-known/jwks.json`,
    run: async (line) => (await import("./cli/receipt.ts")).verify(line),
  },
  migrate: {
    forms: ["[--data-dir DIR]"],
    about: "apply pending migrations of the database and exit; for a facilitator's, set TOLLGATE_MODE=facilitator",
    run: async (line) => (await import("./cli/backup.ts")).migrate(line),
  },
  backup: {
    forms: ["FILE [--verify] [--data-dir DIR]", "--verify FILE [--data-dir DIR]"],
    about: `copy the SQLite database of a running or stopped service into a new file; with --verify the copy is read as a
whole then, and its keys are opened; keep master.key beside it, which no copy holds; --verify FILE checks a copy
that is there, and makes none`,
    run: async (line) => (await import("./cli/backup.ts")).backup(line),
  },
  restore: {
    forms: ["[FILE] [--data-dir DIR]"],
    about: `once before the first start after a restore to an older state: end the calls in flight of the copy, and keep payments
that may be older from buying twice; FILE is put in the place of the SQLite database, after a check`,
    run: async (line) => (await import("./cli/backup.ts")).restore(line),
  },
  doctor: {
    forms: ["[--mode gateway|facilitator] [--host H] [--port N] [--data-dir DIR]"],
    about: `try what the configuration names (database, keys, issuer, facilitators, nodes, wallets, clocks) and change nothing;
a line each says ok, warn or fail, and what to do; ends with 1 after a fail, and with 2 on a bad configuration`,
    async run(line) {
      // What steers the runtime in the environment must not make a difference to a service.
      restartInCleanEnvironment(processEnvironment);
      // The doctor reports the warnings itself.
      const { config } = configured(line, "serve");
      const { examine } = await import("./cli/doctor.ts");
      const { isHealthy, text } = await examine(config);
      // A check that is still waiting must not keep the process.
      process.stdout.write(text, () => process.exit(isHealthy ? 0 : 1));
      return undefined;
    },
  },
  demo: {
    forms: [""],
    about:
      "play paid calls on this machine, with a chain, both services and two agents of its own, and stay up to be tried",
    async run(line) {
      restartInCleanEnvironment(processEnvironment);
      const { config, warnings } = configured(line, "demo");
      // The demo shows what goes well, so its services log only what is wrong.
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

/** The port of the metrics is open before anything else is, so that a start that takes long can be seen too. */
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
  // A log that programs read holds nothing but JSON lines.
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
