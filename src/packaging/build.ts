// `bun run build` makes the binary for this machine, dist/tollgate, and beside it the licences of everything in it. A binary is
// one file with the runtime, every module and every embedded file. release.ts makes one for each platform.
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import manifest from "../../package.json" with { type: "json" };

export const ROOT = join(import.meta.dir, "../..");

/** The entry points: the program first, then those of its threads, which are in the binary only if they are named here. */
const ENTRIES = [
  "src/main.ts",
  "src/gateway/executor/workers/worker.ts",
  "src/storage/sqlite/checkpoint-thread.ts",
  "src/compute/worker.ts",
  "src/cli/process.ts",
  "src/cli/terminal/interactive.ts",
];

const OPTIONS = ["--compile", "--bytecode", "--format=esm", "--splitting", "--sourcemap=linked"];
/** The router loads it only for uploads, which the API does not have. Only the tests need it installed, so the binary must not. */
const LEFT_OUT = ["--external=file-type"];
/** Files beside the binary must not configure it. */
const CLOSED = ["--no-compile-autoload-dotenv", "--no-compile-autoload-bunfig"];

export interface Runtime {
  /** Bun's name of the platform, such as `bun-linux-x64-musl`. */
  readonly target: string;
  /** The Bun that is put into the binary. Without a path Bun would download one without checking its hash. */
  readonly path: string;
}

/** The commit that the binary shows at `/version`. An image is built without a repository, so there a variable names it. */
export function commit(): string {
  const configured = process.env["TOLLGATE_COMMIT"];
  if (configured !== undefined && configured !== "") return configured;
  const git = Bun.spawnSync(["git", "rev-parse", "--short=12", "HEAD"], { cwd: ROOT, stderr: "ignore" });
  return git.success ? git.stdout.toString().trim() : "";
}

/** @param runtime null for the running Bun @throws Error with Bun's output when the build fails */
export function build(outfile: string, runtime: Runtime | null): Bun.BuildMetafile {
  const work = mkdtempSync(join(tmpdir(), "tollgate-build-"));
  try {
    // The source maps are in the binary already, so their copies are left in the temporary directory.
    const [binary, metafile] = [join(work, "tollgate"), join(work, "metafile.json")];
    const platform =
      runtime === null ? [] : [`--target=${runtime.target}`, `--compile-executable-path=${runtime.path}`];
    const naming = [`--outfile=${binary}`, `--metafile=${metafile}`, "--define", `TOLLGATE_COMMIT='${commit()}'`];
    run([process.execPath, "build", ...ENTRIES, ...OPTIONS, ...LEFT_OUT, ...CLOSED, ...platform, ...naming]);
    mkdirSync(dirname(outfile), { recursive: true });
    // Renamed into place, since a running binary can't be overwritten, and nobody must see half of a new one.
    copyFileSync(binary, `${outfile}.new`);
    renameSync(`${outfile}.new`, outfile);
    tellMade(outfile, `${Math.round(statSync(outfile).size / 1e6)} MB`);
    return JSON.parse(readFileSync(metafile, "utf8")) as Bun.BuildMetafile;
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

export function tellMade(path: string, what: string): void {
  process.stdout.write(`made ${path} (${what})\n`);
}

/** Runs a command. @throws Error with its output when it fails */
export function run(command: readonly string[]): void {
  const { success, exitCode, stdout, stderr } = Bun.spawnSync([...command], { cwd: ROOT });
  if (!success) throw new Error(`${command.join(" ")} ended with ${exitCode}:\n${stderr}${stdout}`);
}

export interface Manifest {
  readonly name: string;
  readonly version: string;
  readonly license?: string;
  readonly dependencies?: Readonly<Record<string, string>>;
}

export interface BundledPackage {
  /** The folder of the package, relative to the project's root; two versions of a package have two folders. */
  readonly folder: string;
  readonly manifest: Manifest;
  /** The hash by which bun.lock pins it. */
  readonly integrity: string;
  /** The folders of its dependencies that are in the bundle too. */
  readonly needs: readonly string[];
}

const FOLDER = /^(?:.*\/)?node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/;

/** The packages with at least one byte in the bundle, without those that are only installed or were dropped as unused. */
export function bundledPackages(metafile: Bun.BuildMetafile): BundledPackage[] {
  const sources = Object.values(metafile.outputs).flatMap(({ inputs }) => Object.entries(inputs));
  const present = sources.filter(([, { bytesInOutput }]) => bytesInOutput > 0);
  const folders = new Set(present.flatMap(([path]) => FOLDER.exec(path)?.[0] ?? []));
  const lock = Bun.JSONC.parse(readFileSync(join(ROOT, "bun.lock"), "utf8")) as {
    packages: Record<string, readonly unknown[]>;
  };
  const locked = Object.values(lock.packages);
  const integrities = new Map(locked.map((entry) => [String(entry[0]), String(entry.at(-1))]));
  return [...folders].sort().map((folder) => {
    const manifest = JSON.parse(readFileSync(join(ROOT, folder, "package.json"), "utf8")) as Manifest;
    const integrity = integrities.get(`${manifest.name}@${manifest.version}`);
    if (integrity === undefined) throw new Error(`${manifest.name}@${manifest.version} is not in bun.lock`);
    const needs = Object.keys(manifest.dependencies ?? {}).flatMap((name) => resolve(name, folder, folders) ?? []);
    return { folder, manifest, integrity, needs };
  });
}

/** The folder of a dependency. As in Node, the nearest node_modules folder that holds the package counts. */
function resolve(name: string, from: string, folders: ReadonlySet<string>): string | null {
  for (let base = from; base !== ""; base = base.slice(0, Math.max(base.lastIndexOf("/node_modules/"), 0))) {
    const candidate = `${base}/node_modules/${name}`;
    if (folders.has(candidate)) return candidate;
  }
  const top = `node_modules/${name}`;
  return folders.has(top) ? top : null;
}

const LICENCE = /^(licen[cs]e|copying|notice)|\.license\.txt$/i;

/** The licence texts in the package, which must be passed on with the binary. */
function licenceTexts({ folder }: BundledPackage): string[] {
  const names = readdirSync(join(ROOT, folder)).filter((name) => LICENCE.test(name));
  return names.sort().map((name) => readFileSync(join(ROOT, folder, name), "utf8").trim());
}

/** Licences that allow a package in a binary, on no condition but that their text comes with it. */
const ALLOWED = new Set(["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "0BSD"]);
const OWN = "Apache-2.0";

const RULE = `\n\n${"-".repeat(80)}\n\n`;

/** The licences of everything in a binary, which most demand. @throws Error for one that is not `ALLOWED`, or without its text */
export function licencesFile(packages: readonly BundledPackage[], bunVersion: string): string {
  const own = readFileSync(join(ROOT, "LICENSE"), "utf8").trim();
  const bun = readFileSync(join(ROOT, "src/packaging/bun-licence.txt"), "utf8").trim();
  const parts = packages.map((each) => {
    const { name, version, license } = each.manifest;
    if (license === undefined || !ALLOWED.has(license)) throw new Error(`${name} has the licence ${license}`);
    const texts = licenceTexts(each);
    if (texts.length === 0 && license !== OWN) throw new Error(`${name} comes without the text of its licence`);
    const text = texts.length === 0 ? `${OWN}, whose text is at the top.` : texts.join("\n\n");
    return `${name} ${version}\n${license}\n\n${text}`;
  });
  return `${[`tollgate\n${OWN}\n\n${own}`, bun.replaceAll("BUN_VERSION", bunVersion), ...parts].join(RULE)}\n`;
}

if (import.meta.main) {
  if (!existsSync(join(ROOT, "node_modules"))) {
    const install = `npx --yes bun@${Bun.version} install --frozen-lockfile --ignore-scripts`;
    process.stderr.write(`the packages are not installed; install them first: ${install}\n`);
    process.exit(1);
  }
  const metafile = build(join(ROOT, "dist/tollgate"), null);
  const licences = join(ROOT, "dist/licences.txt");
  writeFileSync(licences, licencesFile(bundledPackages(metafile), manifest.engines.bun));
  tellMade(licences, "the licences of everything in it");
}
