// The manual as the build renders it. The import below is a macro: the bundler calls it and puts what it returns in its place.
// The binary alone loads this module. From source the call would render all pages at once.
import { manualFiles } from "./render.ts" with { type: "macro" };

export const BUILT_MANUAL: Readonly<Record<string, string>> = await manualFiles();
