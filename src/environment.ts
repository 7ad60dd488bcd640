// Gives a service a clean process environment. Bun reads some variables by itself, at the start or later, and workers start with
// the environment with which the process was executed, whatever was deleted from process.env since. So a service replaces its own
// process image once (same pid, same streams), with an environment in which only our settings steer Bun:
// - proxy variables could take calls past the check of their address, so they are removed;
// - so are all BUN_* and NODE_*: NODE_TLS_REJECT_UNAUTHORIZED=0 would switch certificate checks off, NODE_EXTRA_CA_CERTS would
//   add roots to those of TOLLGATE_CA_FILE, BUN_CONFIG_VERBOSE_FETCH would print credentials;
// - BUN_JSC_forceRAMSize is the memory size that the garbage collector assumes. With that of a large machine garbage would grow to
//   gigabytes before a collection (measured for a thousand answers of 1 MB at once: 1.1 GB; with our value 0.5 GB, as fast);
// - BUN_JSC_largeHeapSize is the heap size below which it does not collect: with the default of 32 MiB collections were so
//   frequent that a call took 7 % longer;
// - BUN_JSC_thresholdForJITAfterWarmUp is how much a function runs before it is compiled. With the default of 500 a sixth of the
//   processor time of a start went into compiling functions that only the start runs; a busy gateway compiles the rest in moments;
// - BUN_CONFIG_DNS_TIME_TO_LIVE_SECONDS is how long Bun caches the addresses of a name: after a failover that changed the
//   address of a database, the database was found after 30 s with the default of 30, and after 5 s with 5.
import { StartupProblem } from "./core/startup.ts";

export type Environment = Readonly<Record<string, string | undefined>>;

/** Holds the pid of the process that has been replaced already: exec keeps the pid, and a child has another one. */
const MARK = "TOLLGATE_RESTARTED_PID";

const FOREIGN = /^((https?|all|no|ftp|ws|wss|socks|socks5)_proxy|bun_.*|node_.*)$/i;

/** Our own settings. By NODE_ENV libraries decide whether their error pages show internals. */
const OWN_SETTINGS = {
  NODE_ENV: "production",
  BUN_JSC_forceRAMSize: String(256 * 1024 ** 2),
  BUN_JSC_largeHeapSize: String(96 * 1024 ** 2),
  BUN_JSC_thresholdForJITAfterWarmUp: "5000",
  BUN_CONFIG_DNS_TIME_TO_LIVE_SECONDS: "5",
};

export function cleanEnvironment(environment: Environment): Record<string, string> {
  const clean: Record<string, string> = {};
  for (const [name, value] of Object.entries(environment)) {
    if (value !== undefined && !FOREIGN.test(name)) clean[name] = value;
  }
  return { ...clean, ...OWN_SETTINGS };
}

/** Does not return, unless the process has been replaced already. @throws StartupProblem when calls would not be safe */
export function restartInCleanEnvironment(environment: Environment): void {
  if (environment[MARK] === String(process.pid)) return void requireClean(environment);
  const next = { ...cleanEnvironment(environment), [MARK]: String(process.pid) };
  const failed = "tollgate can't restart itself in a clean environment";
  if (process.execve === undefined) throw new StartupProblem(`${failed}: this system has no execve`);
  try {
    process.execve(process.execPath, ownCommandLine(), next);
  } catch (cause) {
    throw new StartupProblem(`${failed}: execve failed`, { cause });
  }
}

/** Checks the environment after the restart. If a variable is back, something else has set it, and restarting would not help. */
function requireClean(environment: Environment): void {
  const own: Environment = OWN_SETTINGS;
  const dirty = Object.keys(environment).filter((name) => FOREIGN.test(name) && environment[name] !== own[name]);
  const again = "must not be set: tollgate removes such variables, and something has set them again";
  if (dirty.length > 0) throw new StartupProblem(`${dirty.join(", ")} ${again}`);
}

/** The arguments for execve. A compiled binary has its embedded path as second argument; a script's path must be passed again. */
function ownCommandLine(): string[] {
  if (Bun.isStandaloneExecutable) return [process.argv0, ...process.argv.slice(2)];
  // Without the flag Bun would set the variables of a `.env` file in the working directory again.
  const flags = ["--no-env-file", ...process.execArgv.filter((flag) => flag !== "--no-env-file")];
  return [process.execPath, ...flags, ...process.argv.slice(1)];
}

/** Variables of this file, which the configuration must not report as unknown. */
export const OWN_VARIABLES: readonly string[] = [MARK];
