// `bun run build` makes the binary for this machine in dist/tollgate, and beside it the licences of what it holds. A binary is
// one file with the runtime, every module and every embedded file. A release (release.ts) makes one for each platform.
import {
  copyFileSync,
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

/** The program first, then each thread: a worker is in the binary only when it is named here. */
const ENTRIES = [
  "src/main.ts",
  "src/gateway/executor/workers/worker.ts",
  "src/storage/sqlite/checkpoint-thread.ts",
  "src/compute/worker.ts",
  "src/cli/process.ts",
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
interface Metafile {
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

export interface Manifest {
  readonly name: string;
  readonly version: string;
  readonly license?: string;
  readonly dependencies?: Readonly<Record<string, string>>;
}

export interface BundledPackage {
  /** Its folder, from the project's root: two versions of a package have two. */
  readonly folder: string;
  readonly manifest: Manifest;
  /** As bun.lock pins it. */
  readonly integrity: string;
  /** Folders of the packages that it needs and that are in the bundle as well. */
  readonly needs: readonly string[];
}

const FOLDER = /^(?:.*\/)?node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/;

/** The packages of which the bundle holds a byte. What is only installed, or was left out as unused, is none of them. */
export function bundledPackages(metafile: Metafile): BundledPackage[] {
  const sources = Object.values(metafile.outputs).flatMap(({ inputs }) => Object.entries(inputs));
  const present = sources.filter(([, { bytesInOutput }]) => bytesInOutput > 0);
  const folders = new Set(present.flatMap(([path]) => FOLDER.exec(path)?.[0] ?? []));
  const integrities = lockedIntegrities();
  return [...folders].sort().map((folder) => {
    const manifest = JSON.parse(readFileSync(join(ROOT, folder, "package.json"), "utf8")) as Manifest;
    const integrity = integrities.get(`${manifest.name}@${manifest.version}`);
    if (integrity === undefined) throw new Error(`${manifest.name}@${manifest.version} is not in bun.lock`);
    const needs = Object.keys(manifest.dependencies ?? {}).flatMap((name) => resolve(name, folder, folders) ?? []);
    return { folder, manifest, integrity, needs };
  });
}

/** A package that is installed beneath another one is found before one of its name further up. */
function resolve(name: string, from: string, folders: ReadonlySet<string>): string | null {
  for (let base = from; base !== ""; base = base.slice(0, Math.max(base.lastIndexOf("/node_modules/"), 0))) {
    const candidate = `${base}/node_modules/${name}`;
    if (folders.has(candidate)) return candidate;
  }
  const top = `node_modules/${name}`;
  return folders.has(top) ? top : null;
}

function lockedIntegrities(): Map<string, string> {
  const lock = Bun.JSONC.parse(readFileSync(join(ROOT, "bun.lock"), "utf8")) as {
    packages: Record<string, readonly unknown[]>;
  };
  return new Map(Object.values(lock.packages).map((entry) => [String(entry[0]), String(entry.at(-1))]));
}

const LICENCE = /^(licen[cs]e|copying|notice)|\.license\.txt$/i;

/** The texts that its licence asks to be passed on, as they are in the package. */
function licenceTexts({ folder }: BundledPackage): string[] {
  const names = readdirSync(join(ROOT, folder)).filter((name) => LICENCE.test(name));
  return names.sort().map((name) => readFileSync(join(ROOT, folder, name), "utf8").trim());
}

/** What may be passed on in a binary, with the text beside it and nothing else to do. */
const ALLOWED = new Set(["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "0BSD"]);
const OWN = "Apache-2.0";

const RULE = `\n\n${"-".repeat(80)}\n\n`;

/**
 * The licences of everything that a binary holds. Most packages, and the engine in Bun, ask that their licence goes with it.
 *
 * @throws when a package has a licence that nobody has looked at yet, or has to come with a text and has none
 */
export function licencesFile(packages: readonly BundledPackage[], bunVersion: string): string {
  const own = readFileSync(join(ROOT, "LICENSE"), "utf8").trim();
  const bun = readFileSync(join(ROOT, "src/packaging/bun-licence.txt"), "utf8").trim();
  const parts = packages.map((each) => {
    const { name, version, license } = each.manifest;
    if (license === undefined || !ALLOWED.has(license)) throw new Error(`${name} has the licence ${license}`);
    const texts = licenceTexts(each);
    if (texts.length === 0 && license !== OWN) throw new Error(`${name} comes without the text of its licence`);
    const text = texts.length === 0 ? `${OWN}, whose text stands at the top.` : texts.join("\n\n");
    return `${name} ${version}\n${license}\n\n${text}`;
  });
  return `${[`tollgate\n${OWN}\n\n${own}`, bun.replaceAll("BUN_VERSION", bunVersion), ...parts].join(RULE)}\n`;
}

if (import.meta.main) {
  const metafile = build(join(ROOT, "dist/tollgate"), null);
  const licences = join(ROOT, "dist/licences.txt");
  writeFileSync(licences, licencesFile(bundledPackages(metafile), manifest.engines.bun));
  tellMade(licences, "the licences of what is in it");
}
