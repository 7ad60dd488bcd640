// The version of the build, written in package.json alone and embedded when the binary is made.
import { version } from "../../package.json" with { type: "json" };

export const VERSION: string = version;
