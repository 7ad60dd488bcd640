// Tidiness is a test: the whole source is held to the rules of the house, and every rule is tried on a planted
// violation first, so that none of them can have stopped looking.
import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { Glob } from "bun";
import { FIGURES, unspokenWords } from "./support/figures.ts";
import { inspect, strayNames } from "./support/house.ts";

const ROOT = join(import.meta.dir, "..");

async function productSources(): Promise<Map<string, string>> {
  const paths = [...new Glob("{src,db}/**/*.{ts,js,mjs,sql}").scanSync({ cwd: ROOT })].sort();
  return new Map(
    await Promise.all(paths.map(async (path) => [path, await Bun.file(join(ROOT, path)).text()] as const)),
  );
}

test("the source keeps the rules of the house", async () => {
  const { violations, files, imports } = inspect(await productSources());
  expect(violations).toEqual([]);
  // A check that finds nothing to check has not checked anything.
  expect(files).toBeGreaterThan(60);
  expect(imports).toBeGreaterThan(200);
});

describe("a figure of the house may only fall:", () => {
  /** A figure may be so far below its bound before the bound has to follow. */
  const slack = (most: number) => Math.max(5, most / 50);
  const product = productSources().then((sources) => {
    return new Map([...sources].filter(([path]) => path.endsWith(".ts") && !/\.(test|d)\.ts$/.test(path)));
  });

  for (const { what, most, find } of FIGURES) {
    test(what, async () => {
      const places = find(await product);
      if (places.length > most) expect(places.slice(-10)).toEqual([`at most ${most} places, and not ${places.length}`]);
      expect(places.length).toBeGreaterThanOrEqual(Math.floor(most - slack(most)));
    });
  }

  const planted: [string, [string, string][]][] = [
    ["product files", [["src/core/a.ts", ""]]],
    ["product lines", [["src/core/a.ts", "export {};\n"]]],
    ["files in the kernel", [["src/kernel/a.ts", ""]]],
    [
      "imports of turns and slices, where work on many bytes stays on the main loop",
      [["src/core/a.ts", `import { inTurn } from "../kernel/turns.ts";\nawait inTurn(tenant, work);\n`]],
    ],
    [
      "mechanisms of the kernel with fewer than three users",
      [
        ["src/kernel/a.ts", "export function createA() {}\nexport function createB() {}\n"],
        ...["b", "c", "d"].map((name): [string, string] => [
          `src/core/${name}.ts`,
          `import { createA, } from "../kernel/a.ts";\n`,
        ]),
      ],
    ],
    ["kinds of rows that say whether a process lives", [["db/a.ts", "lease_until: c.whole(),\n"]]],
    [
      "short files with one importer in the same folder",
      [
        ["src/core/a.ts", `import { b } from "./b.ts";\n`],
        ["src/core/b.ts", "export const b = 1;\n"],
      ],
    ],
    [
      "folders with more than 14 files",
      Array.from({ length: 15 }, (_, at): [string, string] => [`src/core/a${at}.ts`, ""]),
    ],
    [
      "type names that several files declare",
      [
        ["src/core/a.ts", "export interface A {}\n"],
        ["src/core/b.ts", "type A = 1;\n"],
      ],
    ],
    [
      "exported functions that several files declare",
      [
        ["src/core/a.ts", "export function a() {}\n"],
        ["src/core/b.ts", "export async function a() {}\n"],
      ],
    ],
    ["values that may be promises", [["src/core/a.ts", "let a: Bun.MaybePromise<1>;\n"]]],
    ["questions for the database's kind outside storage", [["src/core/a.ts", "if (store.dialect) {}\n"]]],
    ["bounds outside kernel/limits.ts", [["src/core/a.ts", "const WAIT_MS = 5;\n"]]],
    ["comments that can't be read alone", [["src/core/a.ts", "// The same for others.\n"]]],
    ["words that we don't use", [["src/core/a.ts", "// Whoever comes.\n"]]],
  ];
  test("each is tried on a planted place", () => {
    expect(planted.map(([what]) => what)).toEqual(FIGURES.map(({ what }) => what));
    for (const [name, sources] of planted) {
      const found = FIGURES.find(({ what }) => what === name)?.find(new Map(sources)) ?? [];
      expect([name, found.length]).toEqual([name, 1]);
    }
  });
});

test("what users read holds none of the words that we don't use either", async () => {
  const { find } = FIGURES.find(({ what }) => what === "words that we don't use")!;
  const pages = ["README.md", ...new Glob("src/gateway/manual/*.md").scanSync({ cwd: ROOT })];
  const texts = pages.map(async (page) => [page, await Bun.file(join(ROOT, page)).text()] as const);
  expect(find(new Map(await Promise.all(texts)))).toEqual([]);
  expect(pages.length).toBeGreaterThan(10);
  expect(find(new Map([["page.md", "The answer broke off."]]))).toHaveLength(1);
});

test("each word of the glossary is one that the code uses", async () => {
  const manual = await Bun.file(join(ROOT, "src/gateway/manual/architecture.md")).text();
  const glossary = manual.slice(manual.indexOf("## Glossary"));
  expect(glossary).toContain("| claim | ");
  expect(unspokenWords(glossary, await productSources())).toEqual([]);
  const planted = "| word | means |\n|---|---|\n| fair share, unheard of | a thing |\n";
  expect(unspokenWords(planted, new Map([["a.ts", "const fairShares = 1; // unheard of"]]))).toEqual(["unheard of"]);
});

test("nothing but the house's own names lies at the top", () => {
  const listed = Bun.spawnSync(["git", "ls-files"], { cwd: ROOT }).stdout.toString().split("\n");
  const names = [...new Set(listed.flatMap((path) => (path === "" ? [] : path.split("/").slice(0, 1))))];
  expect(strayNames(names)).toEqual([]);
  expect(strayNames(["src", "notes.txt"])).toEqual(["notes.txt"]);
  // Outside a repository there is nothing to tell tracked files by.
  if (names.length > 0) expect(names.length).toBeGreaterThan(8);
});

const judge = (path: string, code: string) => inspect(new Map([[path, `// Planted.\n${code}\n`]])).violations;

describe("a planted violation is found:", () => {
  const imports: [string, string, string][] = [
    ["src/core/a.ts", `import { x } from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `import type { X } from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `import { type X } from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `import y, {\n  x,\n  type X,\n} from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `export type { X } from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `export * from "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `type X = import("../storage/store.ts").X;`, "core may not import storage"],
    ["src/core/a.ts", `const x = await import("../storage/store.ts");`, "core may not import storage"],
    ["src/core/a.ts", `import "../storage/store.ts";`, "core may not import storage"],
    ["src/core/a.ts", `new Worker(new URL("../gateway/w.ts", import.meta.url));`, "core may not import gateway"],
    ["src/storage/a.ts", `import { x } from "../http/server.ts";`, "storage may not import http"],
    ["src/http/a.ts", `import { x } from "../storage/store.ts";`, "http may not import storage"],
    ["src/keys/a.ts", `import { x } from "../http/server.ts";`, "keys may not import http"],
    ["db/a.ts", `import { x } from "../src/storage/store.ts";`, "db may not import storage"],
    ["src/gateway/a/b.ts", `import { x } from "../../config.ts";`, "gateway may not import config"],
    ["src/gateway/a/b.ts", `import { x } from "../../cli/token.ts";`, "gateway may not import cli"],
    ["src/gateway/a/b.ts", `import { x } from "../start.ts";`, "gateway may not import gateway/start"],
    ["src/gateway/a/b.ts", `import { x } from "../../facilitator/c.ts";`, "gateway may not import facilitator"],
    ["src/gateway/a/b.ts", `import { x } from "../c/rows.ts";`, "of c only the service and the store may be imported"],
    ["src/gateway/a/b.ts", `import { x } from "../proxy/service.ts";`, "proxy is the top: no feature may import it"],
    [
      "src/gateway/invocations/b.ts",
      `import { x } from "../receipts/service.ts";`,
      "invocations is the ground: it imports no feature",
    ],
    ["src/gateway/upstream/b.ts", `import { x } from "../streaming/service.ts";`, "upstream lies on invocations alone"],
    [
      "src/gateway/a.ts",
      `import { x } from "./c/service.ts";`,
      "only start.ts, compose.ts and retention.ts know all features",
    ],
    ["src/main.ts", `import { x } from "./gateway/agents/service.ts";`, "main may not import gateway"],
    ["src/core/a.ts", `import { x } from "./b.test.ts";`, "the product imports no test"],
    ["src/core/a.ts", `import { x } from "../../test/support/x.ts";`, "one of them belongs to no part of the house"],
  ];
  for (const [path, code, reason] of imports) {
    test(`${path}: ${code.replace(/\s+/g, " ")}`, () => {
      expect(judge(path, code)).toEqual([expect.stringContaining(reason)]);
    });
  }

  const owned: [string, string][] = [
    ["const a = process.env.HOME;", "the environment"],
    ["const a = Bun.env.HOME;", "the environment"],
    [`import { env } from "node:process"; export const a = env;`, "the environment"],
    [`import { env } from "bun"; export const a = env;`, "the environment"],
    [`export const a = import.meta["env"];`, "the environment"],
    ["export const { env } = process;", "a global object"],
    ["export const a = process;", "a global object"],
    [`export const a = process["env"];`, "a global object"],
    [`export const a = Bun["env"];`, "a global object"],
    ["export const { env } = Bun;", "a global object"],
    [`globalThis["fetch"](url);`, "a global object"],
    ["globalThis.fetch(url);", "a global object"],
    [`self["fetch"](url);`, "a global object"],
    ["const a = Date.now();", "wall time"],
    ["const a = new Date();", "wall time"],
    ["const a = new Date;", "wall time"],
    ["const clock = { now: Date.now };", "wall time"],
    ["await fetch(url);", "fetch"],
    ["const send = fetch;", "fetch"],
    ["run(fetch, 1);", "fetch"],
    ["Bun.fetch(url);", "fetch"],
    ["self.fetch(url);", "fetch"],
    ["export const send = fetch.bind(null);", "fetch"],
    ["export const parts = { fetch };", "fetch"],
    ["export const send = other ?? fetch;", "fetch"],
    ["export const send = () => fetch;", "fetch"],
    ["export const send = on ? fetch : off;", "fetch"],
    ["export const send = on ? off : fetch;", "fetch"],
    ["export const parts = { send: fetch };", "fetch"],
    [`import { fetch as send } from "bun"; send(url);`, "fetch"],
    [`new WebSocket("ws://x");`, "fetch"],
    ["new Bun.FetchSession().fetch(url);", "connection pools"],
    [`import { FetchSession } from "bun"; new FetchSession();`, "connection pools"],
    [`import { connect } from "node:net"; connect(1);`, "sockets"],
    [`import { isIP, connect } from "node:net"; connect(1);`, "sockets"],
    [`const net = await import("net"); net.connect(1);`, "sockets"],
    [`import { connect } from "bun"; connect({});`, "sockets"],
    ["Bun.connect({});", "sockets"],
    ["Bun.udpSocket({});", "sockets"],
    [`import dgram from "node:dgram"; dgram.createSocket("udp4");`, "sockets"],
    [`import tls from "node:tls"; tls.connect(1);`, "TLS contexts"],
    [`import dns from "node:dns/promises"; dns.lookup("x");`, "name resolution"],
    [`Bun.dns.lookup("x");`, "name resolution"],
    [`import { spawn } from "node:child_process"; spawn("x");`, "other processes"],
    [`import { $ } from "bun"; await $\`x\`;`, "other processes"],
    [`Bun.spawn(["x"]);`, "other processes"],
    ["await Bun.$`x`;", "other processes"],
    [`import { request } from "node:https"; request();`, "the HTTP module of Node"],
    [`import { createServer } from "node:http"; createServer();`, "the HTTP module of Node"],
    ["new Response(null, { status: 404 });", "HTTP statuses"],
    ["context.set.status = code;", "HTTP statuses"],
    ["console.log(1);", "the console"],
  ];
  for (const [code, what] of owned) {
    test(code, () => {
      expect(judge("src/core/a.ts", code)).toEqual([expect.stringContaining(`uses ${what}`)]);
    });
  }

  const states = [
    "let count = 0;",
    "export let count: number | null = null;",
    "const known = new Map<string, () => void>();",
    "const seen: Set<string> = new Set();",
    "const thrown = new WeakMap<Request, unknown>();",
    "const waiting = createRoundRobin<() => void>();",
    "const few = createLimiter({ size: 2 });",
  ];
  for (const code of states) {
    test(code, () => {
      const found = [expect.stringContaining("keeps state that is not handed in")];
      expect(judge("src/http/a.ts", code)).toEqual(found);
      expect(judge("src/core/id.ts", code)).toEqual(found);
      expect(judge("src/http/a.ts", `// One per thread, since it says so.\n${code}`)).toEqual(found);
      expect(judge("src/core/id.ts", `// One per thread, since it says so.\n${code}`)).toEqual([]);
    });
  }

  test("a file that may keep state and keeps none", () => {
    expect(judge("src/core/id.ts", "export {};")).toEqual([expect.stringContaining("keeps no state")]);
  });

  test("rooms that import each other, around a third one", () => {
    const sources = new Map([
      ["src/facilitator/a/x.ts", `// Planted.\nimport { y } from "../b/y.ts";\n`],
      ["src/facilitator/b/y.ts", `// Planted.\nimport type { Z } from "../c/z.ts";\n`],
      ["src/facilitator/c/z.ts", `// Planted.\nimport { x } from "../a/x.ts";\n`],
      ["src/facilitator/d/w.ts", `// Planted.\nimport { x } from "../a/x.ts";\n`],
    ]);
    expect(inspect(sources).violations).toEqual(
      ["a", "b", "c"].map((room) => `src/facilitator/${room} is part of a cycle of imports`),
    );
  });

  test("a file without an opening comment, and one that is too long", () => {
    expect(inspect(new Map([["src/core/a.ts", "export {};\n"]])).violations).toEqual([
      "src/core/a.ts does not open with a comment",
    ]);
    expect(judge("src/core/a.ts", "//\n".repeat(798))).toEqual([]);
    expect(judge("src/core/a.ts", "//\n".repeat(799))).toEqual([expect.stringContaining("801 lines")]);
  });
});

test("what the rules allow is left alone", () => {
  const allowed: [string, string][] = [
    ["src/gateway/a/b.ts", `import { x } from "../c/service.ts";`],
    ["src/gateway/a/b.ts", `import { x } from "../identity.ts"; import { y } from "./model.ts";`],
    ["src/gateway/a/b.ts", `import { x } from "../c/store.ts";`],
    ["src/gateway/a/b.ts", `import { x } from "../upstream/failure.ts";`],
    ["src/gateway/upstream/b.ts", `import { x } from "../invocations/service.ts";`],
    ["src/gateway/start.ts", `import { x } from "./c/routes.ts";`],
    ["src/gateway/proxy/b.ts", `import { x } from "../c/rows.ts";`],
    ["src/storage/a.ts", `import { x } from "../../db/schema.ts"; // fetch(url), process.env, Date.now()`],
    ["src/config.ts", "export const a = process.env;"],
    ["src/core/a.ts", `import { isIPv4, isIPv6 } from "node:net"; export const a = isIPv4("") || isIPv6("");`],
    ["src/http/a.ts", `import { SQL } from "bun"; export const a = [SQL, "a process, and fetch; Bun"];`],
    ["src/http/a.ts", "export const a = { fetch: (x) => x, b: process.pid + Bun.main };"],
    ["src/core/time.ts", "export const now = () => Date.now();"],
    [
      "src/http/a.ts",
      "export const a = { async fetch(request: Request) { return at(new Date(5), app.fetch(request)); } };",
    ],
    ["src/http/a.ts", "interface Server { fetch(request: Request): Response; status: 404; }"],
    ["src/http/a.ts", 'export type A = { type: string; from: "x" };'],
    ["src/http/a.ts", 'const NAMES = new Set(["x"]); export const a = () => { const b = new Map(); return b; };'],
    ["src/http/a.ts", "export function createA() {\n  let count = 0;\n  return () => ++count;\n}"],
  ];
  for (const [path, code] of allowed) expect([code, judge(path, code)]).toEqual([code, []]);
});
