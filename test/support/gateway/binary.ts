// The compiled binary that black-box tests run: built by the package's own build script, and only when a source
// is newer than it, so that no test ever judges yesterday's code.
import { existsSync, mkdtempSync, readdirSync, rmSync, statSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const ROOT = join(import.meta.dir, "..", "..", "..");
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
  // The script calls `bun`, which is only on the path when the tests were started by the package's own command.
  const bin = mkdtempSync(join(tmpdir(), "tollgate-bin-"));
  symlinkSync(process.execPath, join(bin, "bun"));
  const env = { ...process.env, PATH: `${bin}:${process.env["PATH"]}` };
  const run = Bun.spawnSync([process.execPath, "run", "build"], {
    cwd: ROOT,
    env,
    stdout: "pipe",
    stderr: "pipe",
  });
  rmSync(bin, { recursive: true });
  if (run.exitCode !== 0) throw new Error(`the build failed:\n${run.stderr}${run.stdout}`);
  return BINARY;
}

function newestSource(): number {
  const paths = SOURCES.map((name) => join(ROOT, name));
  const inside = paths.flatMap((path) =>
    statSync(path).isDirectory() ? readdirSync(path, { recursive: true }).map((name) => join(path, String(name))) : [],
  );
  return Math.max(...[...paths, ...inside].map((path) => statSync(path).mtimeMs));
}
