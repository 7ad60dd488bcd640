// Which packages are in the binary: those of which the bundle holds a byte, by what the bundler says of it. What is only
// installed, or was left out as unused, is none of them.
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { type Metafile, ROOT } from "./build.ts";

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
export function licenceTexts({ folder }: BundledPackage): string[] {
  const names = readdirSync(join(ROOT, folder)).filter((name) => LICENCE.test(name));
  return names.sort().map((name) => readFileSync(join(ROOT, folder, name), "utf8").trim());
}
