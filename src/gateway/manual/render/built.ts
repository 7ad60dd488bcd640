// The manual as the build renders it. `manualFiles` is a macro: the bundler calls it, and puts the result in place of the call.
// Only the binary loads this module: when run from source, the call would render all pages at once.
import { manualFiles } from "./render.ts" with { type: "macro" };

export const BUILT_MANUAL: Readonly<Record<string, string>> = await manualFiles();
