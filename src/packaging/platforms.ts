// The platforms of a release, by their name in file names, and the Bun that each binary starts with. These come as packages
// that src/packaging/runtimes/package-lock.json pins by their hashes. The container image takes its Bun from the same lock.
import { copyFileSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { ROOT, type Runtime, run } from "./build.ts";

/** There is one Bun for every x64 processor: it asks by itself whether there is AVX2. (`baseline` is the same, byte for byte.) */
export const PLATFORMS = {
  "linux-x64": "bun-linux-x64",
  "linux-x64-musl": "bun-linux-x64-musl",
  "linux-arm64": "bun-linux-aarch64",
  "linux-arm64-musl": "bun-linux-aarch64-musl",
  "macos-x64": "bun-darwin-x64",
  "macos-arm64": "bun-darwin-aarch64",
} as const;

export type Platform = keyof typeof PLATFORMS;

const RUNTIMES = join(ROOT, "src/packaging/runtimes");

interface Lock {
  readonly packages: Readonly<Record<string, { readonly version: string; readonly integrity: string }>>;
}

/** A package of Bun as the lock pins it. */
export interface PinnedRuntime {
  readonly name: string;
  readonly version: string;
  /** As packages are pinned: `sha512-` and base64. */
  readonly integrity: string;
}

export function pinnedRuntime(platform: Platform): PinnedRuntime {
  const name = `@oven/${PLATFORMS[platform]}`;
  const lock = JSON.parse(readFileSync(join(RUNTIMES, "package-lock.json"), "utf8")) as Lock;
  const entry = lock.packages[`node_modules/${name}`];
  if (entry === undefined) throw new Error(`${name} is not in the lock of the runtimes`);
  return { name, version: entry.version, integrity: entry.integrity };
}

/**
 * Installs those of all platforms, and says where each is. Every archive comes from the registry anew, and is compared with its
 * hash in the lock.
 *
 * @param work an empty directory
 */
export function installRuntimes(work: string): (platform: Platform) => Runtime {
  for (const name of ["package.json", "package-lock.json"]) copyFileSync(join(RUNTIMES, name), join(work, name));
  const all = ["--os=*", "--cpu=*", "--libc=*"];
  // A cache of its own, since one that is there already would be trusted.
  const strict = ["--frozen-lockfile", "--ignore-scripts", "--silent", `--cache-dir=${join(work, "cache")}`];
  run([process.execPath, "install", `--cwd=${work}`, ...strict, ...all]);
  return (platform) => {
    const target = PLATFORMS[platform];
    return { target, path: join(work, "node_modules/@oven", target, "bin/bun") };
  };
}
