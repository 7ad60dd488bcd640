// What a process can tell at its start: the version and commit of its build, and problems that keep it from starting.
import { version } from "../../package.json" with { type: "json" };

/**
 * A problem that only the operator can remove. The command line prints its message without a stack and exits with status 2,
 * as for a wrong configuration.
 */
export class StartupProblem extends Error {
  override readonly name = "StartupProblem";
}

/**
 * A problem that may pass by itself, such as an unreachable database. The process exits with status 1, and its process
 * manager should restart it.
 */
export class PassingStartupProblem extends StartupProblem {}

/** Why a server could not listen on its address, with the variable to change. */
export function listenProblem(host: string, port: number, variable: string, cause: unknown, hint = ""): StartupProblem {
  const code = cause instanceof Error && "code" in cause ? cause.code : null;
  if (code === "EADDRINUSE") {
    const taken = `${host} port ${port} is already in use${hint}`;
    return new StartupProblem(`TOLLGATE_HOST and ${variable} must be free to listen on: ${taken}`, { cause });
  }
  // A host name that does not resolve has no error code.
  const problem =
    code === "EACCES"
      ? `${variable} must be a port that tollgate may listen on: the system refuses ${port}`
      : `TOLLGATE_HOST must be an address to listen on: ${host} is not an address of this machine`;
  return new StartupProblem(problem, { cause });
}

/** The version in package.json, embedded into the binary by the build. */
export const VERSION: string = version;

declare const TOLLGATE_COMMIT: string | undefined;

/** The commit of the build; null when run from source, or built outside a repository. */
export const COMMIT: string | null = (typeof TOLLGATE_COMMIT === "string" && TOLLGATE_COMMIT) || null;
