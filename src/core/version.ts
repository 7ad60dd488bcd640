// The version of the build, written in package.json alone, and its commit; both are embedded when the binary is
// made.
import { version } from "../../package.json" with { type: "json" };

export const VERSION: string = version;

declare const TOLLGATE_COMMIT: string | undefined;

/** Null when run from source, or built where nothing told the commit. */
export const COMMIT: string | null = (typeof TOLLGATE_COMMIT === "string" && TOLLGATE_COMMIT) || null;
