// The process environment that a service runs in. Bun reads a few variables by itself, once at start or while it runs, and
// workers start with the environment that the process was executed with, whatever was deleted from process.env since. So a
// service replaces its own process image once (same pid, same streams), with an environment in which nothing steers Bun but us:
// - proxy variables could carry calls past the check of their address;
// - NODE_TLS_REJECT_UNAUTHORIZED=0 would switch certificate checks off, NODE_EXTRA_CA_CERTS would add roots
//   beside TOLLGATE_CA_FILE, BUN_CONFIG_VERBOSE_FETCH would print credentials, and so on through BUN_* and NODE_*;
// - BUN_JSC_forceRAMSize is what the garbage collector takes for all the memory there is. On a large machine it would let
//   garbage grow to gigabytes before it collects (measured: 1.1 GB for a thousand answers of 1 MB at once; so 0.5 GB, as fast).
// - BUN_JSC_largeHeapSize is what there may be before it collects at all: with the usual 32 MiB it collected so often that
//   a call took 7 % longer.
// - BUN_CONFIG_DNS_TIME_TO_LIVE_SECONDS is how long Bun goes on with the addresses that it has found for a name. With the
//   usual 30 a database whose name is given another address after a failover was found after 30 s, and with 5 after 5.
import { StartupProblem } from "./core/startup.ts";

export type Environment = Readonly<Record<string, string | undefined>>;

/** Names the process that has been replaced already: exec keeps the pid, and no child has the same one. */
const MARK = "TOLLGATE_RESTARTED_PID";

const FOREIGN = /^((https?|all|no|ftp|ws|wss|socks|socks5)_proxy|bun_.*|node_.*)$/i;

/** By NODE_ENV libraries decide whether error pages show their insides. */
const KEPT = {
  NODE_ENV: "production",
  BUN_JSC_forceRAMSize: String(256 * 1024 ** 2),
  BUN_JSC_largeHeapSize: String(96 * 1024 ** 2),
  BUN_CONFIG_DNS_TIME_TO_LIVE_SECONDS: "5",
};

export function cleanEnvironment(environment: Environment): Record<string, string> {
  const clean: Record<string, string> = {};
  for (const [name, value] of Object.entries(environment)) {
    if (value !== undefined && !FOREIGN.test(name)) clean[name] = value;
  }
  return { ...clean, ...KEPT };
}

/**
 * Goes on at once in a process that has been replaced already; else does not return.
 *
 * @throws StartupProblem when the environment can't be made clean: the calls would not be safe.
 */
export function restartInCleanEnvironment(environment: Environment): void {
  if (environment[MARK] === String(process.pid)) {
    requireClean(environment);
    return;
  }
  const next = { ...cleanEnvironment(environment), [MARK]: String(process.pid) };
  if (process.execve === undefined) throw new StartupProblem("this system can't replace a process (execve)");
  try {
    process.execve(process.execPath, ownCommandLine(), next);
  } catch (cause) {
    throw new StartupProblem("the process could not be replaced (execve)", { cause });
  }
}

/** A variable that is back after the restart was put back by something: another restart would not help. */
function requireClean(environment: Environment): void {
  const kept: Environment = KEPT;
  const dirty = Object.keys(environment).filter((name) => FOREIGN.test(name) && environment[name] !== kept[name]);
  if (dirty.length > 0) {
    throw new StartupProblem(`${dirty.join(", ")} must not be set, nor be put back by whatever starts tollgate`);
  }
}

/** A compiled binary sees its own embedded path as second argument; a script's path must be passed again. */
function ownCommandLine(): string[] {
  if (Bun.isStandaloneExecutable) return [process.argv0, ...process.argv.slice(2)];
  // Else Bun would put back what a `.env` file in the working directory says.
  const flags = ["--no-env-file", ...process.execArgv.filter((flag) => flag !== "--no-env-file")];
  return [process.execPath, ...flags, ...process.argv.slice(1)];
}

/** Names that the configuration must not take for misspelt settings. */
export const OWN_VARIABLES: readonly string[] = [MARK];
