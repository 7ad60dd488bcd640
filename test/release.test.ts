// A release, made for this machine with the running Bun: the others differ in the Bun that they begin with. What it says of
// itself is true: sums, licences, and the bill of materials by the official schema.
import { afterAll, beforeAll, expect, setDefaultTimeout, spyOn, test } from "bun:test";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Spec, Validation } from "@cyclonedx/cyclonedx-library";
import manifest from "../package.json" with { type: "json" };
import { makeRelease, PLATFORMS, type Platform, pinnedRuntime } from "../src/packaging/release.ts";
import { pages } from "./support/documentation.ts";

setDefaultTimeout(120_000);

const ROOT = join(import.meta.dir, "..");
const HERE = `${process.platform === "darwin" ? "macos" : "linux"}-${process.arch}` as Platform;
const NAME = `tollgate-${manifest.version}`;

const home = mkdtempSync(join(tmpdir(), "tollgate-release-"));
const [first, second] = [join(home, "first"), join(home, "second")];
const read = (name: string) => readFileSync(join(first, name), "utf8");

interface Component {
  readonly "bom-ref": string;
  readonly type: string;
  readonly purl?: string;
  readonly hashes: readonly { alg: string; content: string }[];
  readonly licenses?: readonly object[];
}
let bom: {
  metadata: { component: Component };
  components: Component[];
  dependencies: { ref: string; dependsOn?: string[] }[];
};

/** What the making of both has printed. */
let told: string[] = [];

beforeAll(() => {
  const runtimeOf = (platform: Platform) => ({ target: PLATFORMS[platform], path: process.execPath });
  const write = spyOn(process.stdout, "write").mockReturnValue(true);
  for (const into of [first, second]) makeRelease([HERE], into, runtimeOf);
  told = write.mock.calls.map(([text]) => String(text));
  write.mockRestore();
  bom = JSON.parse(read(`${NAME}.cdx.json`));
});
afterAll(() => rmSync(home, { recursive: true, force: true }));

test("two releases of one commit are the same, byte for byte", () => {
  expect(readFileSync(join(first, "SHA256SUMS"), "utf8")).toBe(readFileSync(join(second, "SHA256SUMS"), "utf8"));
});

test("what was made is told, and where", () => {
  expect(told).toEqual(
    [first, second].flatMap((into) => [
      expect.stringMatching(new RegExp(`^made ${into}/${NAME}-${HERE} \\(\\d\\d+ MB\\)\\n$`)),
      `made ${into} (${readdirSync(into).length} files; SHA256SUMS has their sums)\n`,
    ]),
  );
});

test("every file has its sum, and the usual program finds it right", () => {
  const listed = read("SHA256SUMS").match(/(?<= {2}).+$/gm) ?? [];
  expect([...listed, "SHA256SUMS"].sort()).toEqual(readdirSync(first).sort());
  expect(listed).toContain(`${NAME}-${HERE}`);
  const told = (pages.get("install")?.section("Releases") ?? "").matchAll(/`(tollgate-[\w.-]+|\w+\.env|SHA256SUMS)`/g);
  const isElsewhere = (name: string) => /-(linux|macos)-/.test(name) && name !== `${NAME}-${HERE}`;
  const names = new Set([...told].map(([, name = ""]) => name).filter((name) => !isElsewhere(name)));
  expect([...names].sort()).toEqual(readdirSync(first).sort());
  const check = () =>
    Bun.spawnSync(["sha256sum", "--check", "--quiet", "SHA256SUMS"], { cwd: first, stderr: "ignore" });
  if (Bun.which("sha256sum") === null) return;
  expect(check().exitCode).toBe(0);
  const licences = read(`${NAME}-licences.txt`);
  writeFileSync(join(first, `${NAME}-licences.txt`), `${licences} `);
  expect(check().exitCode).toBe(1);
  writeFileSync(join(first, `${NAME}-licences.txt`), licences);
});

test("the binary runs where nothing else is, and says its version", () => {
  const cwd = join(home, "elsewhere");
  mkdirSync(cwd);
  const run = Bun.spawnSync([join(first, `${NAME}-${HERE}`), "--version"], { cwd, env: {} });
  expect(run.stdout.toString()).toBe(`tollgate ${manifest.version}\n`);
});

test("the bill of materials is one, by the official schema", async () => {
  const validator = new Validation.JsonStrictValidator(Spec.Version.v1dot6);
  expect(await validator.validate(read(`${NAME}.cdx.json`))).toBeNull();
  expect(await validator.validate(read(`${NAME}.cdx.json`).replace('"SHA-512"', '"SHA-5"'))).not.toBeNull();
});

test("it names what is in the binary, with hashes and licences, and nothing else", () => {
  const libraries = bom.components.filter(({ type }) => type === "library");
  const purls = libraries.map(({ purl }) => purl);
  for (const name of ["viem", "elysia", "undici", "swagger-ui-dist"]) {
    const version = (manifest.dependencies as Record<string, string>)[name];
    expect(purls).toContain(`pkg:npm/${name}@${version}`);
  }
  // The last one is installed only where tests are: with it the image would have another binary.
  expect(purls.filter((purl) => /fast-check|x402|biome|@types|file-type/.test(String(purl)))).toEqual([]);
  expect(libraries.length).toBeGreaterThan(35);
  const lock = readFileSync(join(ROOT, "bun.lock"), "utf8");
  for (const { hashes, licenses } of libraries) {
    expect([hashes.length, licenses?.length]).toEqual([1, 1]);
    expect(lock).toContain(`sha512-${Buffer.from(hashes[0]?.content ?? "", "hex").toString("base64")}`);
  }
});

test("it leads from the binary to the Bun that it begins with, and to every package", () => {
  const file = `${NAME}-${HERE}`;
  const binary = bom.components.find((each) => each["bom-ref"] === file);
  const sum = createHash("sha256")
    .update(readFileSync(join(first, file)))
    .digest("hex");
  expect(binary?.hashes).toEqual([{ alg: "SHA-256", content: sum }]);
  const needs = new Map(bom.dependencies.map(({ ref, dependsOn = [] }) => [ref, dependsOn]));
  const runtime = pinnedRuntime(HERE);
  const bun = `pkg:npm/${runtime.name.replace("@", "%40")}@${manifest.engines.bun}`;
  expect(needs.get(file)?.toSorted()).toEqual([bun, bom.metadata.component["bom-ref"]].sort());
  const pinned = Buffer.from(runtime.integrity.replace("sha512-", ""), "base64").toString("hex");
  expect(bom.components.find((each) => each["bom-ref"] === bun)?.hashes).toEqual([{ alg: "SHA-512", content: pinned }]);
  const reached = new Set<string>();
  const walk = (ref: string) => {
    if (!reached.has(ref)) [...(needs.get(reached.add(ref) && ref) ?? [])].forEach(walk);
  };
  walk(file);
  expect(bom.components.filter((each) => !reached.has(each["bom-ref"]))).toEqual([]);
});

test("the licences of all of it go with it, and the units for systemd", () => {
  const licences = read(`${NAME}-licences.txt`);
  expect(licences).toContain("Apache License");
  expect(licences).toContain(`\nBun ${manifest.engines.bun}\n`);
  expect(licences).not.toContain("BUN_VERSION");
  const names = bom.components
    .filter(({ type }) => type === "library")
    .map(({ purl = "" }) => purl.slice("pkg:npm/".length));
  for (const name of names) {
    const [, whole = "", version] = /^(.+)@([^@]+)$/.exec(decodeURIComponent(name)) ?? [];
    expect(licences).toContain(`\n${whole} ${version}\n`);
  }
  for (const unit of readdirSync(join(ROOT, "src/packaging/systemd"))) expect(existsSync(join(first, unit))).toBe(true);
});
