// What the README and the manual show runs: their commands in a shell as they stand, and their examples against the
// gateway that the start command starts, which has the routes and the statuses that they describe.

import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { PAGES } from "../src/gateway/manual/pages.ts";
import { copyTour, manifest, manual, readme } from "./support/documentation.ts";
import { freePorts } from "./support/free-ports.ts";
import { type Exchange, exchanges, parseReadme, runShell, type Shell, tableRows } from "./support/readme.ts";

const START_MS_MAX = 30_000;
/** The packages come from Bun's cache, or else from the registry. */
const INSTALL_MS_MAX = 80_000;
describe("a reader of the documentation", () => {
  const home = mkdtempSync(join(tmpdir(), "tollgate-readme-"));
  const shells: Shell[] = [];
  /** Of the gateway, and the plain one of the facilitator. */
  let port = 0;
  let openPort = 0;
  /** The README's own text for this machine: its ports and hosts are free ports here, its Bun is the running one. */
  let localised: (text: string) => string;
  let environment: Record<string, string>;
  let gatewayShell: Shell;
  let demo: Shell;
  /** Resolves when the facilitator listens. */
  let collecting: Promise<void>;

  const shell = (script: string) => {
    const started = runShell(localised(script), environment, home);
    shells.push(started);
    return started;
  };
  const blocksOf = (info: string) => manual.blocks.filter((block) => block.info === info);

  beforeAll(async () => {
    const [gateway = 0, echo = 0, mcp = 0, mutual = 0, open = 0, nobody = 0] = freePorts(6);
    [port, openPort] = [gateway, open];
    localised = (text) =>
      text
        .replaceAll("https://echo.example.com/run", `http://127.0.0.1:${echo}/run`)
        .replaceAll('"echo.example.com"', '"127.0.0.1"')
        .replaceAll("https://mcp.example.com/mcp", `http://127.0.0.1:${mcp}/mcp`)
        .replaceAll(/\b8080\b/g, String(gateway))
        .replaceAll(/\b9001\b/g, String(echo))
        .replaceAll(/\b9002\b/g, String(nobody))
        .replaceAll(/\b3001\b/g, String(mcp))
        .replaceAll(/\b9443\b/g, String(mutual))
        .replaceAll(/\b9081\b/g, String(open))
        .replaceAll(/(?<![\w/])facilitator\/(?=pki|data)/g, `${home}/facilitator/`)
        .replaceAll("test/tour", join(home, "tour"))
        .replaceAll(/(?<![\w/])(\w+\.jsonl|jwks\.json)\b/g, `${home}/$1`)
        .replaceAll(new RegExp(`npx --yes (-- )?bun@${RegExp.escape(manifest.engines.bun)}`, "g"), process.execPath)
        .replaceAll(/ (?=backup\.db)/g, ` ${home}/`);
    environment = surroundings();
    copyTour(join(home, "tour"));
    demo = shell(blocksOf("sh demo")[0]?.text ?? "exit 1");
    collecting = startFacilitator();
    // Whoever needs it waits for it, and learns why it did not start.
    collecting.catch(() => {});
    // In a terminal, which a reader has, the log is for people.
    gatewayShell = shell(`export TOLLGATE_LOG_FORMAT=pretty\n${blocksOf("sh start")[0]?.text ?? "exit 1"}`);
    const [, upstreams] = blocksOf("sh upstreams").map(({ text }) => shell(text));
    await Promise.all([
      gatewayShell.prints(/a token .*\n/, START_MS_MAX),
      upstreams?.prints(/listening on port/, INSTALL_MS_MAX),
      answers(`http://127.0.0.1:${echo}/`),
    ]);
  });

  afterAll(async () => {
    for (const started of shells) await started[Symbol.asyncDispose]();
    rmSync(home, { recursive: true, force: true });
  });

  /** The manual's facilitator on the chain of the demo, whose address goes where the manual says so. */
  async function startFacilitator(): Promise<void> {
    await demo.prints(/chain RPC +\S+ /, START_MS_MAX);
    const [url = ""] = /(?<=chain RPC +)\S+/.exec(demo.printed()) ?? [];
    const blocks = blocksOf("sh facilitator").map(({ text }) => text);
    expect(blocks.length).toBe(2);
    await shell(blocks.join("").replace("the chain RPC that your demo printed", url)).prints(
      /"event":"listening"/,
      START_MS_MAX,
    );
  }

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
      .replaceAll(/\b(agt|inv|cred|rcpt)_[0-9a-f-]{36}/g, "$1_…")
      .replaceAll(/\b\d{4}-\d\d-\d\dT[\d:.]+Z/g, "<time>")
      .replaceAll(/ +\d[\d.]* m?s\b/g, " <duration>")
      .replaceAll(/\btx_hash: '0x[0-9a-f]{64}'|(?<=transaction +)0x[0-9a-f]{64}/g, "<transaction>")
      .replaceAll(/(?<=127\.0\.0\.1:)\d+|(?<=\bblock +|\blatency_ms: )\d+/g, "<number>")
      .replaceAll(/(?<=\bprevious: ')[0-9a-f]{64}/g, "<link>")
      .replaceAll(/\banvil (in|on|of) \w+( \w+)?/g, "anvil");
  }

  test("is told by the first start where things are", () => {
    const [welcome] = blocksOf("text welcome");
    const shown = localised(welcome?.text ?? "nothing");
    const printed = gatewayShell
      .printed()
      .replaceAll(home, "…")
      .replaceAll(process.cwd(), "…/tollgate")
      .replaceAll(" --data-dir …/data", "")
      .replaceAll(/(npx --yes bun@\S+|bun) src/g, `${process.execPath} src`);
    expect(printed).toContain(shown);
  });

  /** Each with what is shown to come of it. */
  function steps(text = ""): { readonly script: string; readonly shown: string }[] {
    const { blocks } = parseReadme(text);
    return blocks.flatMap((block, index) => {
      if (!/^sh (tour|curl)$/.test(block.info)) return [];
      if (block.info === "sh curl" && Bun.which("curl") === null) return [];
      const next = blocks[index + 1];
      return [{ script: block.text, shown: next === undefined || /^sh|http/.test(next.info) ? "" : next.text }];
    });
  }

  test("sees in the demo what is shown, and more", async () => {
    await demo.prints(/Ctrl-C here stops everything/, START_MS_MAX);
    const shown = blocksOf("text demo")[0]?.text ?? "";
    const wanted = shown.split("\n").filter((line) => !/^ *…?$/.test(line));
    expect(wanted.length).toBeGreaterThan(15);
    const printed = plain(demo.printed()).split("\n").values();
    // In this order, with others in between.
    const missing = wanted.map(plain).filter((line) => !printed.some((other) => plain(other) === line));
    expect([missing, demo.printed()]).toEqual([[], demo.printed()]);
  });

  /** Each step to be run in one shell after the other, which prints a mark behind the output of each. */
  const marked = (all: readonly { readonly script: string }[]) =>
    all.map(({ script }) => `${script}\nprintf '\\036'\n`);

  async function expectShown(all: readonly { readonly script: string; readonly shown: string }[], journey: Shell) {
    const outputs = (await journey.output).split("\x1e");
    for (const [index, { script, shown }] of all.entries()) {
      const context = `${script}\n--- all of it:\n${journey.printed()}`;
      expect([plain(outputs[index] ?? ""), context]).toEqual([plain(localised(shown)), context]);
    }
  }

  test("can do the tour of the README, word for word", async () => {
    const tour = steps(readme.section("Tour"));
    expect(tour.length).toBe(2);
    // In the tenant of the manual's first call, which many readers do next.
    await expectShown(tour, shell(marked(tour).join("")));
  });

  test("can do a first call, getting paid, streams, and receipts, page after page, word for word", async () => {
    const hasCurl = Bun.which("curl") !== null;
    // In the order of the navigation, in which most readers go on.
    const journeys = PAGES.filter(({ section, name }) => section === "Start" && !["install", "clients"].includes(name));
    expect(journeys.map(({ name }) => name)).toEqual(["start", "payments", "streaming", "receipts"]);
    const [first = [], ...others] = journeys.map(({ text }) => steps(text));
    const counts = [first, ...others].map(({ length }) => length);
    expect(counts).toEqual(hasCurl ? [9, 8, 5, 5] : [9, 7, 3, 1]);
    const payer = join(home, "payer");
    const wait = `until [ -f ${payer} ]; do sleep 0.1; done; . ${payer}\n`;
    const all = [...first, ...others.flat()];
    // A terminal shows both outputs, and a refusal is on standard error.
    const scripts = ["exec 2>&1\n", ...marked(all)];
    scripts.splice(1 + first.length, 0, wait);
    const journey = shell(scripts.join(""));
    await collecting;
    await demo.prints(/PAYER_KEY=\S+\n/, START_MS_MAX);
    const [key = ""] = /(?<=PAYER_KEY=)\S+/.exec(demo.printed()) ?? [];
    const line = blocksOf("sh payer")[0]?.text.replace("the PAYER_KEY that your demo printed", key) ?? "exit 1";
    writeFileSync(`${payer}.new`, line);
    renameSync(`${payer}.new`, payer);
    await expectShown(all, journey);
  });

  test("is told by the functions of the tour why a request was refused, and by nothing else", async () => {
    const [functions] = steps(readme.section("Tour"));
    const failing = `${functions?.script}\nexec 2>&1
      api GET /v1/agents/nobody; echo "[$?]"
      api POST /v1/agents '{"name": ""}' | field id; echo "[$?]"
      api GET /v1/agents | field nonsense; echo "[$?]"
      TOKEN=x api GET /v1/agents; echo "[$?]"\n`;
    const printed = await shell(failing.replace("--tenant acme", "--tenant refused")).output;
    const [nobody, unnamed, nonsense, stranger] = printed.split(/(?<=\[\d\])\n/);
    expect(nobody).toMatch(/^GET \/v1\/agents\/nobody: 404 \{"error":".+"\}\n\[1\]$/);
    expect(unnamed).toMatch(/^POST \/v1\/agents: 400 \{"error":"name: .+"\}\n\[1\]$/);
    expect(nonsense).toMatch(/^no nonsense in \{"data":.+\n\[1\]$/s);
    expect(stranger).toMatch(/^GET \/v1\/agents: 401 ?\n\[1\]$/);
  });

  test("can open the backup of a running gateway", async () => {
    const tollgate = `tollgate() { ${process.execPath} src/main.ts "$@"; }`;
    const backup = shell(`${tollgate}\n${blocksOf("sh backup")[0]?.text ?? "exit 1"}`);
    expect(await backup.output).toMatch(/^wrote .+ and verified it: /);
    const { Database } = await import("bun:sqlite");
    using copy = new Database(join(home, "backup.db"), { readonly: true });
    expect(copy.query("pragma integrity_check").values()).toEqual([["ok"]]);
    const names = copy.query("select name from agents where tenant = 'acme' order by id").values();
    expect(names).toEqual([["tour"], ["echo"], ["everything"]]);
  });

  test("can run the examples", async () => {
    const mint = `${process.execPath} src/main.ts token --tenant examples --user me --scope invocations:read_body`;
    const token = (await shell(mint).output).trim();
    const all = blocksOf("http").flatMap(({ text }) => exchanges(localised(text)));
    expect(all.length).toBeGreaterThan(20);
    const ids = new Map<string, string>();
    for (const exchange of all) await perform(exchange, token, ids);
    const others = blocksOf("http facilitator").flatMap(({ text }) => exchanges(text));
    expect(others.length).toBeGreaterThan(1);
    for (const exchange of others) await perform(exchange, token, ids, openPort);
  });

  /** `agt_…` in a request is the last agent that was seen. */
  async function perform(exchange: Exchange, token: string, ids: Map<string, string>, at = port) {
    const known = (text: string) => text.replaceAll(/\b(agt|inv|cred)_…/g, (_all, prefix) => String(ids.get(prefix)));
    const response = await fetch(`http://127.0.0.1:${at}${known(exchange.path)}`, {
      method: exchange.method,
      headers: { "content-type": "application/json", ...exchange.headers, authorization: `Bearer ${token}` },
      body: exchange.body === null ? null : known(exchange.body),
    });
    const text = await response.text();
    const what = `${exchange.method} ${exchange.path} ${exchange.body}: ${text}`;
    expect([response.status, what]).toEqual([exchange.status, what]);
    const body: unknown = text === "" ? null : JSON.parse(text);
    const { id, invocation_id } = (body ?? {}) as { id?: string; invocation_id?: string };
    for (const seen of [id, invocation_id ?? response.headers.get("x-service-invocation-id")])
      if (seen != null) ids.set(seen.slice(0, seen.indexOf("_")), seen);
    for (const [name, value] of Object.entries(exchange.answerHeaders)) {
      expect(response.headers.get(name)).toBe(known(value));
    }
    if (exchange.answer !== null) expect(body).toMatchObject(pattern(exchange.answer));
  }

  /** `…` in a shown text stands for anything, a time for any time, a latency for any number. */
  function pattern(shown: string): Record<string, unknown> {
    return JSON.parse(shown, (key, value) => {
      if (/^(latency|ttft)_ms$/.test(key) && value !== null) return expect.any(Number);
      if (typeof value !== "string" || key === "masked_hint") return value;
      if (/_at$/.test(key)) return expect.stringMatching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
      return value.includes("…")
        ? expect.stringMatching(new RegExp(`^${value.split("…").map(RegExp.escape).join(".+")}$`))
        : value;
    }) as Record<string, unknown>;
  }

  test("finds every route and every status of the API, and no other", async () => {
    const answer = await fetch(`http://127.0.0.1:${port}/swagger/json`);
    const { paths } = (await answer.json()) as {
      paths: Record<string, Record<string, { responses: object; servers?: object[] }>>;
    };
    const operations = Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, { responses, servers }]) => ({
        route: `${method.toUpperCase()} ${path}`,
        isElsewhere: servers !== undefined,
        statuses: Object.keys(responses).filter((status) => Number(status) >= 400),
      })),
    );
    const api = manual.text;
    const named = api.match(/(?<=`)(GET|POST|PUT|PATCH|DELETE) \/[^`?\s]*(?=`)/g) ?? [];
    // On a port of its own, and no part of the API.
    const described = named.filter((route) => route !== "GET /metrics");
    const routes = operations.map(({ route }) => route);
    expect([...new Set(described)].sort()).toEqual(
      [...routes, "GET /docs", "GET /swagger", "GET /swagger/json"].sort(),
    );
    const glance = readme.section("API at a glance").match(/(?<=`)(GET|POST|PUT|PATCH|DELETE) \/[^`?\s]*(?=`)/g);
    expect([...new Set(glance)].sort()).toEqual([...new Set(described)].sort());
    const statusesOf = (isElsewhere: boolean) =>
      operations.filter((each) => each.isElsewhere === isElsewhere).flatMap(({ statuses }) => statuses);
    const shown = (section: string) =>
      tableRows(manual.section(section), "| status | when |").map(([status]) => status);
    expect(shown("Errors")).toEqual([...new Set([...statusesOf(false), "405"])].sort());
    expect(shown("Endpoints")).toEqual([...new Set(["200", ...statusesOf(true)])].sort());
  });
});
