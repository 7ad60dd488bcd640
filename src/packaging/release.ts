// Makes a release in dist/release: a binary for each platform, the units for systemd, what watches over them, the licences, the
// bill of materials and the checksums. `bun run package` makes all of it, `bun run package linux-x64 …` only these platforms.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import manifest from "../../package.json" with { type: "json" };
import { build, commit, ROOT, type Runtime, tellMade } from "./build.ts";
import { type BundledPackage, bundledPackages } from "./bundled.ts";
import { licencesFile } from "./licences.ts";
import { installRuntimes, PLATFORMS, type Platform, pinnedRuntime } from "./platforms.ts";
import { type Binary, bill } from "./sbom.ts";

const UNITS = join(ROOT, "src/packaging/systemd");
/** Who has no source needs them too. */
const MONITORING = {
  "tollgate-alerts.yaml": "prometheus/alerts.yaml",
  "tollgate-dashboard.json": "grafana/dashboard.json",
};

/**
 * @param into a directory of its own, which is emptied
 * @param runtimeOf where the Bun of a platform is
 */
export function makeRelease(
  platforms: readonly Platform[],
  into: string,
  runtimeOf: (platform: Platform) => Runtime,
): void {
  rmSync(into, { recursive: true, force: true });
  mkdirSync(into, { recursive: true });
  const name = `tollgate-${manifest.version}`;
  let packages: readonly BundledPackage[] = [];
  const binaries: Binary[] = [];
  for (const platform of platforms) {
    const runtime = pinnedRuntime(platform);
    if (runtime.version !== manifest.engines.bun)
      throw new Error(`${runtime.name} has another version than package.json asks for`);
    const file = `${name}-${platform}`;
    const metafile = build(join(into, file), runtimeOf(platform));
    // The same source everywhere: no platform has a package of its own.
    packages = bundledPackages(metafile);
    binaries.push({ file, sha256: sha256(join(into, file)), runtime });
  }
  for (const unit of readdirSync(UNITS)) copyFileSync(join(UNITS, unit), join(into, unit));
  for (const [file, from] of Object.entries(MONITORING))
    copyFileSync(join(ROOT, "src/packaging", from), join(into, file));
  writeFileSync(join(into, `${name}-licences.txt`), licencesFile(packages, manifest.engines.bun));
  const release = { manifest, commit: commit(), date: commitDate(), binaries, packages };
  writeFileSync(join(into, `${name}.cdx.json`), bill(release));
  const sums = readdirSync(into)
    .sort()
    .map((file) => `${sha256(join(into, file))}  ${file}\n`);
  writeFileSync(join(into, "SHA256SUMS"), sums.join(""));
  tellMade(into, `${sums.length + 1} files; SHA256SUMS has their sums`);
}

function sha256(path: string): string {
  return createHash("sha256").update(readFileSync(path)).digest("hex");
}

/** Of the commit and not of today, so that the same commit makes the same files. */
function commitDate(): Date {
  const asked = Bun.spawnSync(["git", "log", "-1", "--format=%ct"], { cwd: ROOT, stderr: "ignore" });
  return new Date(Number(asked.stdout.toString().trim()) * 1000);
}

function isPlatform(name: string): name is Platform {
  return name in PLATFORMS;
}

if (import.meta.main) {
  const names = process.argv.length > 2 ? process.argv.slice(2) : Object.keys(PLATFORMS);
  const strange = names.filter((name) => !isPlatform(name));
  if (strange.length > 0)
    throw new Error(`${strange.join(", ")}: the platforms are ${Object.keys(PLATFORMS).join(", ")}`);
  const work = mkdtempSync(join(tmpdir(), "tollgate-runtimes-"));
  try {
    makeRelease(names.filter(isPlatform), join(ROOT, "dist/release"), installRuntimes(work));
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}
