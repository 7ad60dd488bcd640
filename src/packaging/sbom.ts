// The bill of materials of a release, as CycloneDX: each binary with its hash, the Bun that it begins with, and each package
// of which the binaries hold a part. Two releases of one commit have the same.
import { Contrib, Enums, Models, Serialize, Spec } from "@cyclonedx/cyclonedx-library";
import { PackageURL } from "packageurl-js";
import parseSpdx from "spdx-expression-parse";
import type { BundledPackage, Manifest } from "./bundled.ts";
import type { PinnedRuntime } from "./platforms.ts";

export interface Binary {
  readonly file: string;
  readonly sha256: string;
  readonly runtime: PinnedRuntime;
}

export interface Release {
  readonly manifest: Manifest;
  readonly commit: string;
  /** Of the commit. */
  readonly date: Date;
  readonly binaries: readonly Binary[];
  readonly packages: readonly BundledPackage[];
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

export function bill({ manifest, commit, date, binaries, packages }: Release): string {
  const product = component(manifest, Enums.ComponentType.Application);
  product.bomRef.value = `tollgate@${manifest.version}`;
  if (commit !== "") product.properties.add(new Models.Property("tollgate:commit", commit));

  const parts = new Map(
    packages.map((each) => [each.folder, packaged(each.manifest, each.integrity, Enums.ComponentType.Library)]),
  );
  for (const { folder, needs } of packages) {
    for (const need of needs) link(parts.get(folder), parts.get(need));
  }
  for (const part of parts.values()) link(product, part);

  const bom = new Models.Bom({ metadata: new Models.Metadata({ timestamp: date, component: product }) });
  for (const part of parts.values()) bom.components.add(part);
  for (const { file, sha256, runtime } of binaries) {
    const bun = packaged({ ...runtime, license: "MIT" }, runtime.integrity, Enums.ComponentType.Platform);
    const binary = new Models.Component(Enums.ComponentType.File, file, { bomRef: file, version: manifest.version });
    binary.hashes.set(Enums.HashAlgorithm["SHA-256"], sha256);
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
