// The compiled binary that black-box tests run: built by the package's own build script, and only when a source
// is newer than it, so that no test ever judges yesterday's code.
import { existsSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";

const ROOT = join(import.meta.dir, "..", "..");
const BINARY = join(ROOT, "dist", "tollgate");
const SOURCES = ["src", "db", "package.json", "bun.lock", "bunfig.toml", "tsconfig.json"];

let built: string | undefined;

/** The path of an up-to-date binary. */
export function tollgateBinary(): string {
  built ??= build();
  return built;
}

function build(): string {
  if (existsSync(BINARY) && newestSource() < statSync(BINARY).mtimeMs) return BINARY;
  const run = Bun.spawnSync([process.execPath, "run", "build"], {
    cwd: ROOT,
    stdout: "pipe",
    stderr: "pipe",
  });
  if (run.exitCode !== 0) throw new Error(`the build failed:\n${run.stderr}${run.stdout}`);
  return BINARY;
}

function newestSource(): number {
  const paths = SOURCES.map((name) => join(ROOT, name));
  const inside = paths.flatMap((path) =>
    statSync(path).isDirectory()
      ? readdirSync(path, { recursive: true }).map((name) => join(path, String(name)))
      : [],
  );
  return Math.max(...[...paths, ...inside].map((path) => statSync(path).mtimeMs));
}
