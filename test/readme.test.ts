// The README cannot rot: its commands run in a shell as they stand, its examples are sent to the gateway that the
// start command starts, and what it lists (variables, routes, statuses, dependencies, folders) is what there is.
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { VARIABLES } from "../src/config.ts";
import { type Exchange, exchanges, parseReadme, runShell, type Shell, tableRows } from "./support/readme.ts";

const ROOT = join(import.meta.dir, "..");
const START_MS_MAX = 30_000;
setDefaultTimeout(60_000);

const read = (path: string) => readFileSync(join(ROOT, path), "utf8");
const readme = parseReadme(read("README.md"));
const manifest = JSON.parse(read("package.json")) as {
  engines: { bun: string };
  scripts: Record<string, string>;
  dependencies: Record<string, string>;
  devDependencies: Record<string, string>;
};

describe("what it says is there:", () => {
  test("the two commands come first, and CI runs the second one", () => {
    const bun = `npx --yes bun@${manifest.engines.bun}`;
    expect(readme.blocks[0]).toEqual({ info: "", text: `${bun} run start\n${bun} run test\n` });
    expect(read(".ci/run")).toContain(`\n${bun} run test `);
    expect(new Set(readme.text.match(/\bbun@[\w.-]*\w/g))).toEqual(new Set([`bun@${manifest.engines.bun}`]));
    const scripts = [...readme.text.matchAll(/\brun (\w+)`/g)].map(([, name = ""]) => name);
    expect(Object.keys(manifest.scripts)).toEqual(expect.arrayContaining(scripts));
    expect(scripts.length).toBeGreaterThan(5);
  });

  test("the table of variables", () => {
    interface Row {
      readonly fallback: unknown;
      readonly shown?: string;
      readonly meaning: string;
      readonly flag?: string;
      readonly secret?: true;
    }
    const rows = Object.entries<Row>(VARIABLES).map(([name, row]) => {
      const flag = row.flag === undefined ? "" : ` \`--${row.flag}\``;
      const fallback = row.shown ?? (row.fallback === null ? "unset" : `\`${row.fallback}\``);
      return `| \`${name}\`${row.secret === true ? " \\*" : ""}${flag} | ${fallback} | ${row.meaning.replaceAll("<", "\\<")} |`;
    });
    const table = ["| variable | default | meaning |", "|---|---|---|", ...rows, "", ""].join("\n");
    expect(readme.section("Configuration")).toContain(table);
  });

  test("no variable that does not exist", () => {
    const known = Object.entries<{ secret?: true }>(VARIABLES).flatMap(([name, { secret }]) =>
      secret === true ? [name, `${name}_FILE`] : [name],
    );
    const named = new Set(readme.text.match(/\b(TOLLGATE_[A-Z_]*[A-Z]|DATABASE_URL)\b/g));
    expect([...named].filter((name) => !known.includes(name))).toEqual([]);
    expect(named.size).toBeGreaterThan(20);
  });

  test("links", () => {
    const broken = readme.links.filter((target) =>
      target.startsWith("#") ? !readme.anchors.has(target.slice(1)) : !existsSync(join(ROOT, target)),
    );
    expect(broken).toEqual([]);
    expect(readme.links.length).toBeGreaterThan(8);
  });

  test("every dependency with a reason", () => {
    const rows = tableRows(readme.section("Development"), "| dependency | why |");
    const all = Object.keys({ ...manifest.dependencies, ...manifest.devDependencies });
    expect(rows.map(([name]) => name).sort()).toEqual(all.map((name) => `\`${name}\``).sort());
    expect(rows.filter(([, reason = ""]) => reason.length < 8)).toEqual([]);
  });

  test("the layout of the source", () => {
    const shown = layoutPaths(readme.blocks.find(({ info }) => info === "text layout")?.text ?? "");
    expect(shown.filter((path) => !existsSync(join(ROOT, path)))).toEqual([]);
    const folders = ["src", "src/gateway", "test"].flatMap((parent) =>
      readdirSync(join(ROOT, parent), { withFileTypes: true })
        .filter((entry) => entry.isDirectory())
        .map((entry) => `${parent}/${entry.name}/`),
    );
    expect(shown).toEqual(expect.arrayContaining(folders));
  });

  /** Indented names become paths. */
  function layoutPaths(layout: string): string[] {
    const parents: string[] = [];
    return layout.split("\n").flatMap((line) => {
      const [, indent = "", name] = /^( *)(\S+)/.exec(line) ?? [];
      if (name === undefined) return [];
      parents.length = indent.length / 2;
      parents.push(name);
      return [parents.join("")];
    });
  }

  test("nothing that belongs to one machine", () => {
    expect(readme.text.match(/\/(home|root|tmp|work|Users|usr)\/|\bregistry\.\w|\bnpmjs\b/g) ?? []).toEqual(
      [],
    );
  });
});

describe("what it does works:", () => {
  const home = mkdtempSync(join(tmpdir(), "tollgate-readme-"));
  const shells: Shell[] = [];
  let port = 0;
  /** The README's own text for this machine: its ports and hosts are free ports here, its Bun is the running one. */
  let localised: (text: string) => string;
  let environment: Record<string, string>;

  const shell = (script: string) => {
    const started = runShell(localised(script), environment, home);
    shells.push(started);
    return started;
  };
  const blocksOf = (info: string) => readme.blocks.filter((block) => block.info === info);

  beforeAll(async () => {
    const [gateway = 0, echo = 0, mcp = 0] = freePorts(3);
    port = gateway;
    localised = (text) =>
      text
        .replaceAll("https://echo.example.com/run", `http://127.0.0.1:${echo}/run`)
        .replaceAll("https://mcp.example.com/mcp", `http://127.0.0.1:${mcp}/mcp`)
        .replaceAll(/\b8080\b/g, String(gateway))
        .replaceAll(/\b9001\b/g, String(echo))
        .replaceAll(/\b3001\b/g, String(mcp))
        .replaceAll(`npx --yes bun@${manifest.engines.bun}`, process.execPath)
        .replaceAll(/"(?=data\/tollgate\.db"|backup\.db")/g, `"${home}/`);
    environment = surroundings();
    const start = shell(blocksOf("sh start")[0]?.text ?? "exit 1");
    const upstreams = shell(blocksOf("sh upstreams")[0]?.text ?? "exit 1");
    await Promise.all([
      start.prints(/a token .*\n/, START_MS_MAX),
      upstreams.prints(/listening on port/, START_MS_MAX),
      answers(`http://127.0.0.1:${echo}/`),
    ]);
  });

  afterAll(async () => {
    for (const started of shells) await started[Symbol.asyncDispose]();
    rmSync(home, { recursive: true, force: true });
  });

  function surroundings(): Record<string, string> {
    const own = Object.entries(process.env).filter(([name]) => !/^(TOLLGATE_|DATABASE_URL|PORT$)/.test(name));
    // The start script calls `bun`, which npx would have put on the path.
    const bin = join(home, "bin");
    mkdirSync(bin);
    symlinkSync(process.execPath, join(bin, "bun"));
    return {
      ...(Object.fromEntries(own) as Record<string, string>),
      PATH: `${bin}:${process.env["PATH"]}`,
      TOLLGATE_PORT: String(port),
      TOLLGATE_DATA_DIR: join(home, "data"),
    };
  }

  /** All are held until all are known, so that none comes twice. */
  function freePorts(count: number): number[] {
    const held = Array.from({ length: count }, () =>
      Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } }),
    );
    return held.map((listener) => {
      listener.stop(true);
      return listener.port;
    });
  }

  async function answers(url: string): Promise<void> {
    const deadline = performance.now() + START_MS_MAX;
    while (performance.now() < deadline) {
      const answer = await fetch(url, { method: "POST", body: "{}" }).catch(() => null);
      if (answer?.ok) return;
      await Bun.sleep(20);
    }
    throw new Error(`nobody answers at ${url}`);
  }

  /** Less what differs from run to run. */
  function plain(text: string): string {
    return text
      .trim()
      .replaceAll(/\b(agt|inv|cred)_[0-9a-f-]{36}/g, "$1_…")
      .replaceAll(/\b\d{4}-\d\d-\d\dT[\d:.]+Z/g, "<time>")
      .replaceAll(/\blatency_ms: \d+/g, "latency_ms: <ms>");
  }

  test("the first start says where things are", () => {
    const index = readme.blocks.findIndex(({ info }) => info === "sh start");
    const shown = localised(readme.blocks[index + 1]?.text ?? "");
    const printed = (shells[0]?.printed() ?? "")
      .replaceAll(home, "…")
      .replaceAll(" --data-dir …/data", "")
      .replaceAll(/(npx --yes bun@\S+|bun) src/g, `${process.execPath} src`);
    expect(printed).toContain(shown);
  });

  test("the tour, word for word", async () => {
    const steps = readme.blocks.flatMap((block, index) => {
      if (block.info !== "sh tour") return [];
      const next = readme.blocks[index + 1];
      return [
        { script: block.text, shown: next === undefined || /^sh|http/.test(next.info) ? "" : next.text },
      ];
    });
    expect(steps.length).toBeGreaterThan(4);
    const tour = shell(steps.map(({ script }) => `${script}\nprintf '\\036'\n`).join(""));
    const outputs = (await tour.output).split("\x1e");
    for (const [index, { script, shown }] of steps.entries()) {
      const context = `${script}\n--- all of the tour:\n${tour.printed()}`;
      expect([plain(outputs[index] ?? ""), context]).toEqual([plain(shown), context]);
    }
  });

  test("the backup of a running gateway can be opened", async () => {
    const backup = shell(blocksOf("sh backup")[0]?.text ?? "exit 1");
    await backup.output;
    const { Database } = await import("bun:sqlite");
    using copy = new Database(join(home, "backup.db"), { readonly: true });
    expect(copy.query("pragma integrity_check").values()).toEqual([["ok"]]);
    expect(copy.query("select name from agents order by id").values()).toEqual([["echo"], ["everything"]]);
  });

  test("the examples", async () => {
    const mint = `${process.execPath} src/main.ts token --tenant examples --user me --scope invocations:read_body`;
    const token = (await shell(mint).output).trim();
    const all = blocksOf("http").flatMap(({ text }) => exchanges(localised(text)));
    expect(all.length).toBeGreaterThan(20);
    const ids = new Map<string, string>();
    for (const exchange of all) await perform(exchange, token, ids);
  });

  /** `agt_…` in a request is the last agent that was seen. */
  async function perform(exchange: Exchange, token: string, ids: Map<string, string>): Promise<void> {
    const known = (text: string) =>
      text.replaceAll(/\b(agt|inv|cred)_…/g, (_all, prefix) => String(ids.get(prefix)));
    const response = await fetch(`http://127.0.0.1:${port}${known(exchange.path)}`, {
      method: exchange.method,
      headers: { "content-type": "application/json", ...exchange.headers, authorization: `Bearer ${token}` },
      body: exchange.body === null ? null : known(exchange.body),
    });
    const text = await response.text();
    const what = `${exchange.method} ${exchange.path} ${exchange.body}: ${text}`;
    expect([response.status, what]).toEqual([exchange.status, what]);
    const body: unknown = text === "" ? null : JSON.parse(text);
    const { id, invocation_id } = (body ?? {}) as { id?: string; invocation_id?: string };
    for (const seen of [id, invocation_id])
      if (seen !== undefined) ids.set(seen.slice(0, seen.indexOf("_")), seen);
    for (const [name, value] of Object.entries(exchange.answerHeaders)) {
      expect(response.headers.get(name)).toBe(known(value));
    }
    if (exchange.answer !== null) expect(body).toMatchObject(pattern(exchange.answer));
  }

  /** `…` in a shown text stands for anything, a time for any time, a latency for any number. */
  function pattern(shown: string): Record<string, unknown> {
    return JSON.parse(shown, (key, value) => {
      if (key === "latency_ms" && value !== null) return expect.any(Number);
      if (typeof value !== "string" || key === "masked_hint") return value;
      if (/_at$/.test(key)) return expect.stringMatching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
      return value.includes("…")
        ? expect.stringMatching(new RegExp(`^${value.split("…").map(RegExp.escape).join(".+")}$`))
        : value;
    }) as Record<string, unknown>;
  }

  test("every route and every status of the document is described, and no other", async () => {
    const answer = await fetch(`http://127.0.0.1:${port}/swagger/json`);
    const { paths } = (await answer.json()) as {
      paths: Record<string, Record<string, { responses: object }>>;
    };
    const operations = Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, { responses }]) => ({
        route: `${method.toUpperCase()} ${path}`,
        statuses: Object.keys(responses).filter((status) => Number(status) >= 400),
      })),
    );
    const api = readme.section("API by example");
    const described = api.match(/(?<=`)(GET|POST|PUT|PATCH|DELETE) \/[^`?\s]*(?=`)/g) ?? [];
    const routes = operations.map(({ route }) => route);
    expect([...new Set(described)].sort()).toEqual([...routes, "GET /swagger", "GET /swagger/json"].sort());
    const statuses = new Set([...operations.flatMap((operation) => operation.statuses), "405"]);
    const rows = tableRows(readme.section("Errors"), "| status | when |");
    expect(rows.map(([status]) => status)).toEqual([...statuses].sort());
  });
});
