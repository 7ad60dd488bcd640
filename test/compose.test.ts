// The compose.yaml of the manual: valid by the official schema, hardened, and in accordance with the image and with the
// configuration. Its secrets and databases are made as the manual says.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SQL } from "bun";
import { DCLinter } from "dclint";
import { parse } from "yaml";
import manifest from "../package.json" with { type: "json" };
import { loadConfig, VARIABLES } from "../src/config.ts";
import { pages } from "./support/documentation.ts";
import { readImage } from "./support/packaging/image.ts";
import { startPostgres } from "./support/stores/postgres.ts";

interface ComposeService {
  readonly image: string;
  readonly command?: readonly string[];
  readonly user?: string;
  readonly environment: Readonly<Record<string, string>>;
  readonly secrets: readonly string[];
  readonly volumes: readonly string[];
  readonly networks: readonly string[];
  readonly ports?: readonly string[];
  readonly [key: string]: unknown;
}

const page = pages.get("install");
const text = page?.blocks.find(({ info }) => info === "yaml compose")?.text ?? "";
const compose = parse(text, { merge: true }) as {
  services: Record<string, ComposeService>;
  secrets: Record<string, { file: string }>;
  networks: Record<string, { internal?: boolean }>;
  volumes: Record<string, object>;
};
const { postgres, ...ours } = compose.services;

describe("the compose file", () => {
  const home = mkdtempSync(join(tmpdir(), "tollgate-compose-"));
  beforeAll(() => {
    const made = page?.blocks.find(({ info }) => info === "sh compose")?.text ?? "exit 1";
    const run = Bun.spawnSync(["sh", "-e", "-c", made], { cwd: home, stderr: "pipe" });
    expect([run.exitCode, run.stderr.toString()]).toEqual([0, ""]);
  });
  afterAll(() => rmSync(home, { recursive: true, force: true }));

  const problems = (yaml: string) => {
    const path = join(home, "compose.yaml");
    writeFileSync(path, yaml);
    const linter = new DCLinter({ rules: {}, quiet: true, debug: false, exclude: [] });
    const found = linter.lintFiles([path], false).flatMap(({ messages }) => messages);
    return found.filter(({ rule }) => rule === "invalid-schema").map(({ message }) => message);
  };

  test("is one, by the official schema", () => {
    expect(problems(text)).toEqual([]);
    expect(problems(text.replace("stop_grace_period", "stop_grace_perod"))).not.toEqual([]);
  });

  test("has images with full versions", () => {
    for (const { image } of Object.values(ours)) expect(image).toBe(`tollgate:${manifest.version}`);
    expect(postgres?.image).toMatch(/^postgres:\d+\.\d+-bookworm@sha256:[0-9a-f]{64}$/);
  });

  test("gives no service more than it needs, and time to drain", () => {
    for (const [name, service] of Object.entries(compose.services)) {
      const hardened = {
        read_only: true,
        cap_drop: ["ALL"],
        security_opt: ["no-new-privileges:true"],
        restart: "unless-stopped",
      };
      expect([name, service]).toMatchObject([name, hardened]);
      expect(Number.parseInt(String(service["stop_grace_period"]), 10)).toBeGreaterThanOrEqual(40);
      expect(service["privileged"]).toBeUndefined();
    }
    for (const service of Object.values(ours)) {
      expect(service["depends_on"]).toEqual({ postgres: { condition: "service_healthy" } });
      // The image has its own.
      expect(service["healthcheck"]).toBeUndefined();
      expect(service.volumes.filter((volume) => volume.endsWith(":/data")).length).toBe(1);
      for (const port of service.ports ?? []) expect(port).toMatch(/^127\.0\.0\.1:8080:8080$/);
    }
    expect(postgres).toMatchObject({ user: "999:999", networks: ["database"] });
    expect(postgres?.["healthcheck"]).toBeDefined();
    expect(compose.networks["database"]).toEqual({ internal: true });
    expect(readImage().healthCheck.length).toBeGreaterThan(0);
  });

  test("names what it has: secrets, volumes, networks", () => {
    for (const { secrets, volumes, networks } of Object.values(compose.services)) {
      expect(Object.keys(compose.secrets)).toEqual(expect.arrayContaining([...secrets]));
      const named = volumes.map((volume) => volume.split(":")[0] ?? "").filter((name) => !name.startsWith("."));
      expect(Object.keys(compose.volumes)).toEqual(expect.arrayContaining(named));
      expect(Object.keys(compose.networks)).toEqual(expect.arrayContaining([...networks]));
    }
    const used = Object.values(compose.services).flatMap(({ secrets }) => secrets);
    expect(used.toSorted()).toEqual(Object.keys(compose.secrets).sort());
  });

  test.each(Object.keys(ours))("is a configuration of the %s, with the files that the manual makes", (name) => {
    const service = ours[name];
    const known = Object.entries<{ secret?: true }>(VARIABLES).flatMap(([variable, { secret }]) =>
      secret === true ? [variable, `${variable}_FILE`] : [variable],
    );
    expect(Object.keys(service?.environment ?? {}).filter((variable) => !known.includes(variable))).toEqual([]);
    const [flag, mode] = service?.command ?? [];
    expect([flag, mode]).toEqual(["--mode", name]);
    const inside = Object.entries({
      ...readImage().env,
      ...service?.environment,
      TOLLGATE_DATA_DIR: join(home, "data"),
    });
    const environment = Object.fromEntries(
      inside.map(([variable, value]) => {
        const secret = /^\/run\/secrets\/(.+)$/.exec(value)?.[1];
        if (secret === undefined) return [variable, value];
        expect(service?.secrets).toContain(secret);
        return [variable, join(home, compose.secrets[secret]?.file ?? "")];
      }),
    );
    // What the reader puts there, and what `pki` makes: their forms are judged elsewhere.
    const { problems } = loadConfig("serve", new Map([["mode", mode ?? ""]]), environment, false);
    expect(problems.filter((problem) => !/TLS|CLIENT_CA|SIGNER_KEY/.test(problem))).toEqual([]);
  });

  test("has databases that open with the URLs, each for its own service alone", async () => {
    if (Bun.which("psql") === null) return;
    const server = await startPostgres();
    const admin = await server.freshDatabase();
    const script = readFileSync(join(home, "secrets/postgres/databases.sql"), "utf8");
    // Other tests share the server: roles and databases of this one have names of their own.
    const suffix = `_${process.pid}`;
    const own = script
      .replaceAll("/run/secrets/", `${home}/secrets/postgres/`)
      .replaceAll(/\b(role|database|owner) (\w+)/g, `$1 $2${suffix}`);
    const run = Bun.spawnSync(["psql", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", admin, "-f", "-"], {
      stdin: Buffer.from(own),
    });
    expect([run.exitCode, run.stderr.toString()]).toEqual([0, ""]);
    for (const name of ["gateway", "facilitator"]) {
      const url = new URL(readFileSync(join(home, `secrets/tollgate/${name}-database-url`), "utf8").trim());
      expect(url.host).toBe("postgres:5432");
      expect([url.username, url.pathname]).toEqual([name, `/${name}`]);
      url.host = new URL(admin).host;
      url.username += suffix;
      url.pathname += suffix;
      await using client = new SQL(url.href);
      expect([...(await client`select current_user::text as user`)]).toEqual([{ user: `${name}${suffix}` }]);
    }
    await using client = new SQL(admin);
    for (const name of ["gateway", "facilitator"]) {
      await client.unsafe(`drop database ${name}${suffix}`);
      await client.unsafe(`drop role ${name}${suffix}`);
    }
  });
});
