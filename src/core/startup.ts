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
