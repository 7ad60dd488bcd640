// What a process can tell at its start: the version and commit of its build, and problems that keep it from starting.
import { resolve } from "node:path";
import { version } from "../../package.json" with { type: "json" };
import { errorCode } from "./fault.ts";

/** A problem that only the operator can remove: its message is printed without a stack, and the exit status is 2. */
export class StartupProblem extends Error {
  override readonly name = "StartupProblem";
}

/** A problem that may pass by itself, such as an unreachable database: status 1 lets a process manager start tollgate again. */
export class PassingStartupProblem extends StartupProblem {}

/** A server can't listen on its address. The command line knows how the operator gave that address. */
export class ListenProblem extends StartupProblem {
  readonly #hint: string;

  /** @param hint how several processes share the port, which needs a database that they can share */
  constructor(message: string, hint: string, options: ErrorOptions) {
    super(`${message}${hint}`, options);
    this.#hint = hint;
  }

  /** The problem in the operator's terms. @param flags as given, by name @param located adds where a variable was set */
  told(flags: ReadonlyMap<string, string>, canShare: boolean, located: (problem: string) => string): StartupProblem {
    const message = canShare ? this.message : this.message.slice(0, this.message.length - this.#hint.length);
    const shown = message.replace(/^TOLLGATE_HOST\b/, flags.has("host") ? "--host" : "$&");
    const told = shown.replaceAll(/\bTOLLGATE_PORT\b/g, flags.has("port") ? "--port" : "$&");
    return new StartupProblem(located(told), { cause: this });
  }
}

/** Why a server could not listen on its address, with the variable to change. */
export function listenProblem(host: string, port: number, variable: string, cause: unknown, hint = ""): StartupProblem {
  const code = errorCode(cause);
  if (code === "EADDRINUSE") {
    const at = host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
    const taken = `${at} is already in use; choose another with ${variable}, or stop the program that uses it`;
    return new ListenProblem(`TOLLGATE_HOST and ${variable} must be free to listen on: ${taken}`, hint, { cause });
  }
  // A host name that does not resolve has no error code.
  const problem =
    code === "EACCES"
      ? `${variable} must be a port that tollgate may listen on: the system refuses ${port}`
      : `TOLLGATE_HOST must be an address to listen on: ${host} is not an address of this machine`;
  return new ListenProblem(problem, "", { cause });
}

/** Codes of errors at a path that the operator has to put right. A failing or full disk has other codes. */
const PATH_CODES = /^(EACCES|EPERM|EROFS|EISDIR|ENOTDIR)$/;

/** The problem of a path that this user may not use, or that is no file; null for any other error. */
export function pathProblem(error: unknown): StartupProblem | null {
  const code = errorCode(error) ?? "";
  const path: unknown = (error as { path?: unknown } | null | undefined)?.path;
  if (typeof path !== "string" || !PATH_CODES.test(code)) return null;
  const must = code === "EISDIR" ? "must be a file" : "must be readable and writable by this user";
  return new StartupProblem(`${resolve(path)} ${must} (${code})`, { cause: error });
}

/** The version in package.json, embedded into the binary by the build. */
export const VERSION: string = version;

declare const TOLLGATE_COMMIT: string | undefined;

/** The commit of the build; null when run from source, or built outside a repository. */
export const COMMIT: string | null = (typeof TOLLGATE_COMMIT === "string" && TOLLGATE_COMMIT) || null;
