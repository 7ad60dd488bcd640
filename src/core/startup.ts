// What a process tells at its start: the version of its build, and a problem that only its operator can remove.
import { version } from "../../package.json" with { type: "json" };

/** The command line prints the message without a stack and ends with status 2, as for a problem of the configuration. */
export class StartupProblem extends Error {
  override readonly name = "StartupProblem";
}

/**
 * A problem that may pass by itself, such as a database that is away for a moment. The process ends with status 1, and the
 * process manager should start it again.
 */
export class PassingStartupProblem extends StartupProblem {}

/** Why a server has not got its address, with the variable to change. */
export function listenProblem(host: string, port: number, variable: string, cause: unknown, hint = ""): StartupProblem {
  const code = cause instanceof Error && "code" in cause ? cause.code : null;
  if (code === "EADDRINUSE") {
    const taken = `${host} port ${port} is already in use${hint}`;
    return new StartupProblem(`TOLLGATE_HOST and ${variable} must be free to listen on: ${taken}`, { cause });
  }
  // A name that leads to no address has no code.
  const problem =
    code === "EACCES"
      ? `${variable} must be a port that tollgate may listen on: the system refuses ${port}`
      : `TOLLGATE_HOST must be an address to listen on: ${host} is not an address of this machine`;
  return new StartupProblem(problem, { cause });
}

/** Written in package.json alone, and embedded when the binary is made. */
export const VERSION: string = version;

declare const TOLLGATE_COMMIT: string | undefined;

/** Null when run from source, or built where nothing told the commit. */
export const COMMIT: string | null = (typeof TOLLGATE_COMMIT === "string" && TOLLGATE_COMMIT) || null;
