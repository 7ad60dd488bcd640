// How a binary is made: one file with the runtime, every module and every embedded file. `bun run build` (binary.ts) makes it
// for this machine with the running Bun. A release (release.ts) makes one for each platform, with the same options.
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

export const ROOT = join(import.meta.dir, "../..");

/** The program first, then each thread: a worker is in the binary only when it is named here. */
const ENTRIES = [
  "src/main.ts",
  "src/gateway/executor/workers/worker.ts",
  "src/storage/checkpoint-thread.ts",
  "src/x402/verifier/worker.ts",
  "src/cli/watchdog.ts",
];

const OPTIONS = ["--compile", "--bytecode", "--format=esm", "--splitting", "--sourcemap=linked"];
/**
 * What the router loads only to judge uploaded files, which nobody uploads here. It is installed by chance, for some package of
 * the tests, and the binary must not depend on that.
 */
const LEFT_OUT = ["--external=file-type"];
/** No file beside the binary steers it. */
const CLOSED = ["--no-compile-autoload-dotenv", "--no-compile-autoload-bunfig"];

/** What a bundle is made of, as esbuild defined it: by output, the bytes that each source has in it. */
export interface Metafile {
  readonly outputs: Readonly<Record<string, { readonly inputs: Readonly<Record<string, { bytesInOutput: number }>> }>>;
}

export interface Runtime {
  /** Bun's name of the platform, such as `bun-linux-x64-musl`. */
  readonly target: string;
  /** The Bun that the binary starts with. Without a path Bun would download one, and check no hash of it. */
  readonly path: string;
}

/** Commits are named in the binary (`/version`). An image is built without a repository and says it by the variable. */
export function commit(): string {
  const told = process.env["TOLLGATE_COMMIT"];
  if (told !== undefined && told !== "") return told;
  const asked = Bun.spawnSync(["git", "rev-parse", "--short=12", "HEAD"], { cwd: ROOT, stderr: "ignore" });
  return asked.success ? asked.stdout.toString().trim() : "";
}

/**
 * @param runtime if null, the running Bun
 * @throws when it can't be built, with what Bun says
 */
export function build(outfile: string, runtime: Runtime | null): Metafile {
  const work = mkdtempSync(join(tmpdir(), "tollgate-build-"));
  try {
    // The source maps are in the binary already. Their copies beside it stay in the working directory.
    const [binary, metafile] = [join(work, "tollgate"), join(work, "metafile.json")];
    const platform =
      runtime === null ? [] : [`--target=${runtime.target}`, `--compile-executable-path=${runtime.path}`];
    const naming = [`--outfile=${binary}`, `--metafile=${metafile}`, "--define", `TOLLGATE_COMMIT='${commit()}'`];
    run([process.execPath, "build", ...ENTRIES, ...OPTIONS, ...LEFT_OUT, ...CLOSED, ...platform, ...naming]);
    mkdirSync(dirname(outfile), { recursive: true });
    // Beside the outfile first: a running binary can't be written over, and nobody sees half of a new one.
    copyFileSync(binary, `${outfile}.new`);
    renameSync(`${outfile}.new`, outfile);
    tellMade(outfile, `${Math.round(statSync(outfile).size / 1e6)} MB`);
    return JSON.parse(readFileSync(metafile, "utf8")) as Metafile;
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

/** A line of the output: what there is now, and where. */
export function tellMade(path: string, what: string): void {
  process.stdout.write(`made ${path} (${what})\n`);
}

/** @throws with what it has printed, when it does not end with 0 */
export function run(command: readonly string[]): void {
  const { success, exitCode, stdout, stderr } = Bun.spawnSync([...command], { cwd: ROOT });
  if (!success) throw new Error(`${command.join(" ")} ended with ${exitCode}:\n${stderr}${stdout}`);
}
