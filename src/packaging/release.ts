// Makes a release in dist/release: a binary for each platform, systemd units, alert rules, a dashboard, licences, bill of
// materials and checksums. `bun run package` makes all platforms, `bun run package linux-x64 …` only those named.
//
// The Bun in each binary comes from a package that src/packaging/runtimes/package-lock.json pins by its hash. The container
// image takes its Bun from that lock too.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Contrib, Enums, Models, Serialize, Spec } from "@cyclonedx/cyclonedx-library";
import { PackageURL } from "packageurl-js";
import parseSpdx from "spdx-expression-parse";
import manifest from "../../package.json" with { type: "json" };
import type { BundledPackage, Manifest, Runtime } from "./build.ts";
import { build, bundledPackages, commit, licencesFile, ROOT, run, tellMade } from "./build.ts";

const UNITS = join(ROOT, "src/packaging/systemd");
/** Files for monitoring, which users without the source need too. */
const MONITORING = {
  "tollgate-alerts.yaml": "prometheus/alerts.yaml",
  "tollgate-dashboard.json": "grafana/dashboard.json",
};

type RuntimeOf = (platform: Platform) => Runtime;

/** @param into the directory of the release, which is emptied first */
export function makeRelease(platforms: readonly Platform[], into: string, runtimeOf: RuntimeOf): void {
  rmSync(into, { recursive: true, force: true });
  mkdirSync(into, { recursive: true });
  const name = `tollgate-${manifest.version}`;
  let packages: readonly BundledPackage[] = [];
  const binaries: Binary[] = [];
  for (const platform of platforms) {
    const runtime = pinnedRuntime(platform);
    if (runtime.version !== manifest.engines.bun)
      throw new Error(`${runtime.name} has another version than package.json requires`);
    const file = `${name}-${platform}`;
    const metafile = build(join(into, file), runtimeOf(platform));
    // All platforms have the same packages, since all binaries are built from one source.
    packages = bundledPackages(metafile);
    binaries.push({ file, sha256: sha256(join(into, file)), runtime });
  }
  for (const unit of readdirSync(UNITS)) copyFileSync(join(UNITS, unit), join(into, unit));
  for (const [file, from] of Object.entries(MONITORING))
    copyFileSync(join(ROOT, "src/packaging", from), join(into, file));
  writeFileSync(join(into, `${name}-licences.txt`), licencesFile(packages, manifest.engines.bun));
  writeFileSync(join(into, `${name}.cdx.json`), bill(binaries, packages));
  const files = readdirSync(into).sort();
  const sums = files.map((file) => `${sha256(join(into, file))}  ${file}\n`);
  writeFileSync(join(into, "SHA256SUMS"), sums.join(""));
  tellMade(into, `${sums.length + 1} files; SHA256SUMS has their sums`);
}

const sha256 = (path: string): string => createHash("sha256").update(readFileSync(path)).digest("hex");

/** The date of the commit, not of today, so that each commit always gives the same files. */
function commitDate(): Date {
  const git = Bun.spawnSync(["git", "log", "-1", "--format=%ct"], { cwd: ROOT, stderr: "ignore" });
  return new Date(Number(git.stdout.toString().trim()) * 1000);
}

const isPlatform = (name: string): name is Platform => name in PLATFORMS;

/** Bun's names of the platforms. Its x64 build detects AVX2 by itself; the `baseline` build for x64 is byte for byte the same. */
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

/** The package with a Bun for the platform, as the lock pins it: `integrity` is its hash, `sha512-` and base64. */
export function pinnedRuntime(platform: Platform) {
  const name = `@oven/${PLATFORMS[platform]}`;
  const lock = JSON.parse(readFileSync(join(RUNTIMES, "package-lock.json"), "utf8")) as {
    packages: Record<string, { readonly version: string; readonly integrity: string }>;
  };
  const entry = lock.packages[`node_modules/${name}`];
  if (entry === undefined) throw new Error(`${name} is not in the lock of the runtimes`);
  return { name, version: entry.version, integrity: entry.integrity };
}

/** Installs the Bun of every platform, each compared with its hash in the lock. @param work an empty directory */
function installRuntimes(work: string): RuntimeOf {
  for (const name of ["package.json", "package-lock.json"]) copyFileSync(join(RUNTIMES, name), join(work, name));
  const all = ["--os=*", "--cpu=*", "--libc=*"];
  process.stdout.write("downloading the runtimes\n");
  // An empty cache, since Bun would trust the packages in an existing one.
  const strict = ["--frozen-lockfile", "--ignore-scripts", "--silent", `--cache-dir=${join(work, "cache")}`];
  run([process.execPath, "install", `--cwd=${work}`, ...strict, ...all]);
  return (platform) => {
    const target = PLATFORMS[platform];
    return { target, path: join(work, "node_modules/@oven", target, "bin/bun") };
  };
}

interface Binary {
  readonly file: string;
  readonly sha256: string;
  readonly runtime: ReturnType<typeof pinnedRuntime>;
}

const { FromNodePackageJson: fromManifest, License } = Contrib;
const components = new fromManifest.Builders.ComponentBuilder(
  new fromManifest.Factories.ExternalReferenceFactory(),
  new License.Factories.LicenseFactory(parseSpdx),
);

function component(manifest: Manifest, type: Enums.ComponentType): Models.Component {
  const made = components.makeComponent({ ...manifest }, type);
  if (made === undefined) throw new Error(`${manifest.name} can't be a component`);
  return made;
}

function packaged(manifest: Manifest, integrity: string, type: Enums.ComponentType): Models.Component {
  const made = component(manifest, type);
  const url = new PackageURL("npm", made.group, made.name, made.version, null, null).toString();
  made.purl = url;
  made.bomRef.value = url;
  made.hashes.set(...fromManifest.Utils.parsePackageIntegrity(integrity));
  return made;
}

/** In CycloneDX: each binary with its hash, its Bun, and each package in it. Two releases of one commit have equal bills. */
function bill(binaries: readonly Binary[], packages: readonly BundledPackage[]): string {
  const product = component(manifest, Enums.ComponentType.Application);
  product.bomRef.value = `tollgate@${manifest.version}`;
  const id = commit();
  if (id !== "") product.properties.add(new Models.Property("tollgate:commit", id));

  const parts = new Map(
    packages.map((each) => [each.folder, packaged(each.manifest, each.integrity, Enums.ComponentType.Library)]),
  );
  for (const { folder, needs } of packages) {
    for (const need of needs) link(parts.get(folder), parts.get(need));
  }
  for (const part of parts.values()) link(product, part);

  const bom = new Models.Bom({ metadata: new Models.Metadata({ timestamp: commitDate(), component: product }) });
  for (const part of parts.values()) bom.components.add(part);
  for (const { file, sha256: digest, runtime } of binaries) {
    const bun = packaged({ ...runtime, license: "MIT" }, runtime.integrity, Enums.ComponentType.Platform);
    const binary = new Models.Component(Enums.ComponentType.File, file, { bomRef: file, version: manifest.version });
    binary.hashes.set(Enums.HashAlgorithm["SHA-256"], digest);
    link(binary, bun);
    link(binary, product);
    bom.components.add(bun);
    bom.components.add(binary);
  }
  const serializer = new Serialize.JsonSerializer(new Serialize.JSON.Normalize.Factory(Spec.Spec1dot6));
  return `${serializer.serialize(bom, { sortLists: true, space: 2 })}\n`;
}

function link(from: Models.Component | undefined, to: Models.Component | undefined): void {
  if (from !== undefined && to !== undefined) from.dependencies.add(to.bomRef);
}

if (import.meta.main) {
  const names = process.argv.length > 2 ? process.argv.slice(2) : Object.keys(PLATFORMS);
  const unknown = names.filter((name) => !isPlatform(name));
  if (unknown.length > 0)
    throw new Error(`${unknown.join(", ")}: the platforms are ${Object.keys(PLATFORMS).join(", ")}`);
  const work = mkdtempSync(join(tmpdir(), "tollgate-runtimes-"));
  try {
    makeRelease(names.filter(isPlatform), join(ROOT, "dist/release"), installRuntimes(work));
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}
