// What a new user has after the start command and after the demo, on a machine with Node alone: the packages of the product and no
// others, and no install script of theirs is run; what the demo prints works. A copy of the source is started as a fresh clone
// would be.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runShell, type Shell } from "./support/readme.ts";

const ROOT = join(import.meta.dir, "..");
/** The packages come from Bun's cache, or else from the registry. */
const START_MS_MAX = 120_000;
setDefaultTimeout(150_000);

const manifest = JSON.parse(readFileSync(join(ROOT, "package.json"), "utf8")) as {
  dependencies: Record<string, string>;
  devDependencies: Record<string, string>;
  optionalDependencies: Record<string, string>;
  scripts: Record<string, string>;
};

const dir = mkdtempSync(join(tmpdir(), "tollgate-install-"));
const ranScript = join(dir, "ran");
let environment: Record<string, string>;
let started: Shell;
let url: string;

beforeAll(async () => {
  for (const name of ["bun.lock", "bunfig.toml", "tsconfig.json", "src", "db"]) {
    cpSync(join(ROOT, name), join(dir, name), { recursive: true });
  }
  // The project's own install script stands for those of packages: the one switch leaves out both.
  const scripts = { ...manifest.scripts, postinstall: `touch ${ranScript}` };
  writeFileSync(join(dir, "package.json"), JSON.stringify({ ...manifest, scripts }));
  // npx would have put it on the path.
  mkdirSync(join(dir, "bin"));
  symlinkSync(process.execPath, join(dir, "bin", "bun"));
  const own = Object.entries(process.env).filter(([name]) => !/^(TOLLGATE_|DATABASE_URL$)/.test(name));
  environment = {
    ...(Object.fromEntries(own) as Record<string, string>),
    PATH: `${dir}/bin:${process.env["PATH"]}`,
  };
  started = runShell(`cd ${dir} && bun run start --port 0`, environment, dir);
  await started.prints(/"event":"listening".*\n/, START_MS_MAX);
  url = /"event":"listening".*"url":"([^"]+)"/.exec(started.printed())?.[1] ?? "";
});

afterAll(async () => {
  await started[Symbol.asyncDispose]();
  rmSync(dir, { recursive: true, force: true });
});

const isInstalled = (name: string) => existsSync(join(dir, "node_modules", name));

test("a package that runs is installed, and those that build and test are not", () => {
  const { dependencies, devDependencies, optionalDependencies } = manifest;
  expect(Object.keys(dependencies).filter((name) => !isInstalled(name))).toEqual([]);
  const others = Object.keys({ ...devDependencies, ...optionalDependencies });
  expect(others.length).toBeGreaterThan(10);
  expect(others.filter(isInstalled)).toEqual([]);
});

test("the build of a fresh clone says in one line what to run first", () => {
  const bare = mkdtempSync(join(tmpdir(), "tollgate-bare-"));
  for (const name of ["package.json", "src/packaging"]) cpSync(join(ROOT, name), join(bare, name), { recursive: true });
  const { exitCode, stdout, stderr } = Bun.spawnSync([process.execPath, "run", "--silent", "build"], { cwd: bare });
  rmSync(bare, { recursive: true });
  const told = `the packages are not installed; install them first: npx --yes bun@${Bun.version} install --frozen-lockfile --ignore-scripts\n`;
  expect({ exitCode, told: `${stdout}${stderr}` }).toEqual({ exitCode: 1, told });
});

test("no install script was run", () => {
  expect(existsSync(ranScript)).toBe(false);
});

test("the installed gateway serves the health path, and the page and document that come from packages", async () => {
  for (const path of ["/healthz", "/swagger", "/swagger/json", "/docs/api"]) {
    const answer = await fetch(url + path);
    expect([path, answer.status]).toEqual([path, 200]);
    await answer.arrayBuffer();
  }
});

describe("the demo that a new user starts", () => {
  let demo: Shell;
  beforeAll(async () => {
    demo = runShell(`cd ${dir} && bun run demo`, environment, dir);
    await demo.prints(/Ctrl-C here stops everything/, START_MS_MAX);
  });
  afterAll(() => demo?.[Symbol.asyncDispose]());

  test("prints lines that pay for a call as they stand, on a machine that has Node and no more", async () => {
    const printed = demo.printed();
    const [, commands = "exit 1"] = /\n(export GATEWAY[\s\S]*)\n +Ctrl-C here/.exec(printed) ?? [];
    // The text between the commands is indented.
    const script = commands.replace(/^ {5}.*$/gm, "");
    const bare = join(dir, "node-only");
    mkdirSync(bare);
    for (const name of ["node", "npm"]) symlinkSync(Bun.which(name) ?? "", join(bare, name));
    const shell = Bun.spawn([Bun.which("sh") ?? "sh", "-ec", script], {
      cwd: dir,
      env: { ...environment, PATH: bare },
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
      timeout: START_MS_MAX,
    });
    const [shown, problems] = await Promise.all([shell.stdout.text(), shell.stderr.text()]);
    expect(shown, problems).toMatch(/^402 \{$[\s\S]*maxAmountRequired: '10000'/m);
    expect(shown, problems).toMatch(/^202 \{$[\s\S]*status: 'succeeded'/m);
    expect(shown).toContain(`"bytes":5`);
  });
});
