// The rules of the house as functions of source texts: who may import whom, who alone owns the environment, the
// clock, the network and HTTP statuses, and what every file looks like. Pure, so that the test can try each rule
// on a planted violation.
import { posix } from "node:path";

/** A file is one idea, whole. */
const LINES_MAX = 800;
/** Says at the top of a file why its state is not handed in. */
const STATE_REASON = /^(?:\/\/.*\n)*\/\/.*\bOne per thread, since /;
const STATE =
  /^(?:export )?(?:let\b|const (?:\w+|\{[^}]*\})[^=\n]*= (?:new (?:Weak)?(?:Map|Set)(?:<.*>)?\(\)|create[A-Z]\w*(?:<.*>)?\())/m;
/** The only files with state at their top level: it is one per thread, and each says why. */
const STATE_OWNERS = new Set(
  ["kernel/turns kernel/compute core/id http/client/response-parser"].flatMap((line) =>
    line.split(" ").map((name) => `src/${name}.ts`),
  ),
);
/** A suite is read test by test. */
const TEST_LINES_MAX = 650;

/** The areas of the source, the first prefix that fits. */
const AREAS = [
  ["src/core/", "core"],
  ["src/kernel/", "kernel"],
  ["src/wire/", "wire"],
  ["src/x402/", "x402"],
  ["src/compute/", "compute"],
  ["src/chain/", "chain"],
  ["db/", "db"],
  ["src/storage/", "storage"],
  ["src/http/", "http"],
  ["src/keys/", "keys"],
  ["src/metrics/", "metrics"],
  ["src/tracing/", "tracing"],
  ["src/gateway/start.ts", "gateway/start"],
  ["src/gateway/compose.ts", "gateway/start"],
  ["src/gateway/retention.ts", "gateway/start"],
  ["src/gateway/", "gateway"],
  ["src/facilitator/start.ts", "facilitator/start"],
  ["src/facilitator/", "facilitator"],
  ["src/cli/", "cli"],
  ["src/environment.ts", "environment"],
  ["src/config", "config"],
  ["src/main.ts", "main"],
  ["src/commands.ts", "main"],
  ["src/packaging/", "packaging"],
  ["package.json", "package.json"],
] as const;

type Area = (typeof AREAS)[number][1];

/** What each area may import beside itself. The schema is the store's vocabulary: who sees the one sees the other. */
const SERVICE = ["core", "kernel", "wire", "x402", "compute", "chain", "db", "storage", "http", "keys"] as const;
const MAY_IMPORT: Readonly<Record<Area, readonly Area[]>> = {
  core: ["package.json"],
  kernel: ["core"],
  wire: ["core", "kernel"],
  x402: ["core", "kernel", "wire"],
  compute: ["core", "kernel", "wire", "x402"],
  chain: ["core", "kernel", "wire", "x402", "http"],
  db: ["core"],
  storage: ["core", "kernel", "db"],
  http: ["core", "kernel", "wire"],
  keys: ["core", "kernel", "db", "storage"],
  metrics: ["core", "kernel", "http"],
  tracing: ["core", "kernel", "http"],
  gateway: SERVICE,
  "gateway/start": [...SERVICE, "gateway", "tracing"],
  facilitator: SERVICE,
  "facilitator/start": [...SERVICE, "facilitator", "tracing"],
  environment: ["core"],
  config: ["core", "environment", "x402"],
  cli: [...SERVICE, "tracing", "gateway", "facilitator", "gateway/start", "facilitator/start", "config", "environment"],
  main: ["core", "kernel", "metrics", "config", "environment", "cli", "gateway/start", "facilitator/start"],
  // It makes what is shipped, and is no part of it.
  packaging: ["package.json"],
  "package.json": [],
};

interface Ownership {
  readonly what: string;
  readonly owners: readonly string[];
  /** In the code without its comments and types. */
  readonly pattern?: RegExp;
  /** In the code without its texts as well, which are full of ordinary words. */
  readonly bare?: RegExp;
}

/** An import of one of these modules in any form. */
function modules(names: string): string {
  return `\\b(from|import|require)\\s*\\(?\\s*"(node:)?(${names})(/\\w+)?"`;
}

/** A member of the runtime by its name, or by an import from it. */
function runtime(names: string): string {
  return `\\bBun\\s*\\??\\.\\s*(${names})(?!\\w)|\\bimport\\s*\\{[^}]*(?<![\\w$])(${names})(?![\\w$])[^}]*\\}\\s*from "bun"`;
}

function anyOf(...patterns: (string | RegExp)[]): RegExp {
  return new RegExp(patterns.map((each) => (typeof each === "string" ? each : each.source)).join("|"));
}

const OWNERSHIPS: readonly Ownership[] = [
  {
    what: "the environment",
    owners: ["src/config.ts", "src/packaging/build.ts"],
    pattern: anyOf(
      /\bprocess\s*\??\.\s*env\b|\bimport\.meta\s*(\??\.\s*env\b|(\?\.)?\s*\[)/,
      modules("process"),
      runtime("env"),
    ),
  },
  {
    // Whoever holds one of them as a value, or reaches into it by a text, gets at everything that has an owner.
    what: "a global object as a whole, which nobody may use",
    owners: [],
    bare: /(?<![.\w$])(process|Bun)\b(?!\s*\??\.\s*[\w$])|\bglobalThis\b|\bself\s*(\?\.)?\s*\[/,
  },
  {
    what: "wall time",
    owners: ["src/core/time.ts"],
    pattern: /\bDate\.now\b|\bnew Date(\(\)|;|\s*$)|(?<![.\w]|new )Date\(|\bTemporal\.Now\b|\btimeOrigin\b/m,
  },
  {
    what: "fetch, which reads ahead of its reader without a bound",
    // It runs in the reader's browser.
    owners: ["src/gateway/manual/search.js"],
    // A call or the function as a value, but no method of that name and no property.
    pattern: anyOf(runtime("fetch")),
    bare: /(?<![.\w$])fetch\s*\((?![^()]*\)\s*\{)|(?<![.\w$])fetch\b(?!\s*[(:])|\?\s*fetch\s*:|:\s*fetch\b|\bself\.fetch\b|\bnew\s+(WebSocket|EventSource)\b/,
  },
  {
    what: "the HTTP module of Node",
    owners: ["src/http/http1.ts"],
    pattern: anyOf(modules("http|https|http2")),
  },
  { what: "connection pools of fetch", owners: [], pattern: /\bFetchSession\b/ },
  {
    what: "TLS contexts",
    owners: ["src/http/client/connections.ts", "src/facilitator/mtls.ts"],
    pattern: anyOf(modules("tls")),
  },
  {
    what: "sockets",
    owners: ["src/http/client/connections.ts", "src/http/plain-listener.ts"],
    // An import that only judges addresses opens no socket.
    pattern: anyOf(
      `(?<!\\bimport \\{ (?:isIP(?:v[46])?(?:, )?)+ \\} )${modules("net|dgram")}`,
      runtime("connect|listen|udpSocket"),
    ),
  },
  {
    what: "name resolution",
    owners: ["src/http/client/outbound.ts", "src/storage/failures.ts"],
    pattern: anyOf(modules("dns"), runtime("dns")),
  },
  {
    what: "other processes",
    owners: ["src/environment.ts", "src/cli/demo/chain.ts", "src/packaging/build.ts", "src/packaging/release.ts"],
    pattern: anyOf(/\bprocess\s*\??\.\s*execve\b/, modules("child_process|cluster"), runtime("spawn|spawnSync|\\$")),
  },
  {
    what: "HTTP statuses of answers",
    owners: ["src/http/responses.ts"],
    pattern: /\b(?<!upstream_)status:\s*[1-5]\d\d\b|\bset\.status\b/,
  },
  { what: "the console, which nobody may use", owners: [], pattern: /\bconsole\s*\./ },
];

export interface Findings {
  readonly violations: readonly string[];
  readonly files: number;
  readonly imports: number;
}

/** Judges the product's sources, by path from the project's root. Tests are not subject to it. */
export function inspect(sources: ReadonlyMap<string, string>): Findings {
  const violations: string[] = [];
  const arrows = new Map<string, Set<string>>();
  let files = 0;
  let imports = 0;
  for (const [path, source] of sources) {
    violations.push(...shape(path, source));
    if (/\.test\.ts$/.test(path)) continue;
    files++;
    if (path.endsWith(".d.ts") || !path.endsWith(".ts")) continue;
    for (const target of ownImports(path, source)) {
      imports++;
      const problem = importProblem(path, target);
      if (problem !== null) violations.push(`${path} imports ${target}: ${problem}`);
      arrows.set(roomOf(path), (arrows.get(roomOf(path)) ?? new Set()).add(roomOf(target)));
    }
    violations.push(...strangers(path, source));
    violations.push(...moduleState(path, source));
  }
  return { violations: [...violations, ...cycles(arrows)], files, imports };
}

/** A folder; of both services each by itself. */
function roomOf(path: string): string {
  return /^(src\/(?:gateway|facilitator)\/[^/]+|src\/[^/]+|db)\//.exec(path)?.[1] ?? path;
}

/** Rooms that import each other, however far around. */
function cycles(arrows: ReadonlyMap<string, ReadonlySet<string>>): string[] {
  const reachable = (from: string, seen = new Set<string>()): Set<string> => {
    for (const to of arrows.get(from) ?? []) {
      if (to === from || seen.has(to)) continue;
      seen.add(to);
      reachable(to, seen);
    }
    return seen;
  };
  return [...arrows.keys()]
    .filter((room) => reachable(room).has(room))
    .map((room) => `${room} is part of a cycle of imports`);
}

function moduleState(path: string, source: string): string[] {
  const isOwner = STATE_OWNERS.has(path);
  if (!STATE.test(source)) return isOwner ? [`${path} keeps no state, but is listed as if it did`] : [];
  return isOwner && STATE_REASON.test(source) ? [] : [`${path} keeps state that is not handed in`];
}

/** A unit test needs no opening comment: it stands beside the file that has one. */
function shape(path: string, source: string): string[] {
  const problems: string[] = [];
  if (!/\.test\.ts$|\.sql$/.test(path) && !source.startsWith("//")) {
    problems.push(`${path} does not open with a comment`);
  }
  const lines = source.split("\n").length - 1;
  const most = path.endsWith(".test.ts") ? TEST_LINES_MAX : LINES_MAX;
  if (lines > most) problems.push(`${path} has ${lines} lines, more than ${most}`);
  return problems;
}

const transpiler = new Bun.Transpiler({ loader: "ts" });
const IMPORT_CLAUSE =
  /^(import|export)\s+(?:type\s+)?((?:\w+\s*,\s*)?\{[^}]*\}|\*(?:\s+as\s+\w+)?|\w+)(?=\s*from\s*")/gm;

/** The files of ours that a source imports. Types count as well, so they are made plain before the scan. */
function ownImports(path: string, source: string): Set<string> {
  const plain = source.replace(IMPORT_CLAUSE, (_all, keyword: string, clause: string) => {
    return `${keyword} ${clause.replace(/([{,]\s*)type\s+(?=\w)/g, "$1")}`;
  });
  const paths = transpiler.scanImports(plain).map((found) => found.path);
  for (const [, found] of source.matchAll(/\b(?:import\(|new URL\()\s*"([^"]+)"/g)) if (found) paths.push(found);
  const own = paths.filter((found) => found.startsWith("."));
  return new Set(own.map((found) => posix.normalize(posix.join(posix.dirname(path), found))));
}

function importProblem(from: string, to: string): string | null {
  const [own, other] = [areaOf(from), areaOf(to)];
  if (own === null || other === null) return "one of them belongs to no part of the house";
  if (/\.test\.ts$/.test(to)) return "the product imports no test";
  if (own !== other) return MAY_IMPORT[own].includes(other) ? null : `${own} may not import ${other}`;
  const [feature, sibling] = [featureOf(from), featureOf(to)];
  if (own !== "gateway" || sibling === null || feature === sibling) return null;
  if (feature === null) return "only start.ts, compose.ts and retention.ts know all features";
  if (sibling === "proxy") return "proxy is the top: no feature may import it";
  if (feature === "invocations") return "invocations is the ground: it imports no feature";
  if (feature === "upstream" && sibling !== "invocations") return "upstream lies on invocations alone";
  const isOpen = feature === "proxy" || sibling === "upstream" || /\/(service|store)\.ts$/.test(to);
  return isOpen ? null : `of ${sibling} only the service and the store may be imported`;
}

function areaOf(path: string): Area | null {
  return AREAS.find(([prefix]) => path.startsWith(prefix))?.[1] ?? null;
}

/** The feature folder inside the gateway. */
function featureOf(path: string): string | null {
  return /^src\/gateway\/([^/]+)\//.exec(path)?.[1] ?? null;
}

const TEXT = /"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'/g;

function strangers(path: string, source: string): string[] {
  // A macro would run here.
  const code = transpiler.transformSync(source.replaceAll(' with { type: "macro" }', ""));
  const bareCode = code.replace(TEXT, '""');
  return OWNERSHIPS.filter(({ owners, pattern, bare }) => {
    return !owners.includes(path) && (pattern?.test(code) === true || bare?.test(bareCode) === true);
  }).map(({ what, owners }) => `${path} uses ${what}${owners.length > 0 ? `, which only ${owners} may` : ""}`);
}

const TOP_LEVEL = new Set([
  ...["package.json", "bun.lock", "bunfig.toml", "tsconfig.json", "biome.json"],
  ...["src", "db", "test", ".ci", ".github", "Dockerfile", "README.md", "LICENSE", ".gitignore", ".dockerignore"],
]);

/** Names at the top of the project that have no place there. */
export function strayNames(topLevel: readonly string[]): string[] {
  return topLevel.filter((name) => !TOP_LEVEL.has(name));
}
