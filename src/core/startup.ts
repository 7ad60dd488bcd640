// A problem that keeps a process from starting and that only its operator can mend. The command line prints the message
// without a stack and ends with status 2, as it does for a problem of the configuration.

export class StartupProblem extends Error {
  override readonly name = "StartupProblem";
}

/**
 * One that may pass without anything being mended here, such as a database that is away for a moment. The process ends with
 * status 1, and whoever has started it should do so again.
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
