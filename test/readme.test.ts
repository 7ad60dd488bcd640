// The README and the manual cannot rot: what they list (variables, dependencies, folders, the files of recipes) is what
// there is. Their commands and examples run in readme-runs.test.ts.

import { describe, expect, test } from "bun:test";
import { existsSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { Glob } from "bun";
import { COMMON, DEMO, FACILITATOR, GATEWAY } from "../src/config/variables.ts";
import { VARIABLES } from "../src/config.ts";
import { PAGES } from "../src/gateway/manual/pages.ts";
import { files, MANUAL, manifest, manual, pages, ROOT, read, readme } from "./support/documentation.ts";
import { BASE } from "./support/network.ts";
import { parseReadme, tableRows } from "./support/readme.ts";

const README_LINES_MAX = 300;
const TOUR_LINES_MAX = 60;

describe("the documentation", () => {
  test("has a README that is a face, and a page of the manual for each file", () => {
    const linesOf = (text: string) => text.split("\n").length - 1;
    expect(linesOf(readme.text)).toBeLessThanOrEqual(README_LINES_MAX);
    expect(linesOf(readme.section("Tour"))).toBeLessThanOrEqual(TOUR_LINES_MAX);
    const there = readdirSync(join(ROOT, MANUAL)).filter((name) => name.endsWith(".md"));
    expect(there.sort()).toEqual(PAGES.map(({ name }) => `${name}.md`).sort());
    expect(PAGES.filter(({ title }) => title === "")).toEqual([]);
    expect(PAGES.filter(({ name }) => !readme.links.includes(`${MANUAL}/${name}.md`))).toEqual([]);
  });

  test("begins with the two commands, of which CI runs the second one", () => {
    const bun = `npx --yes bun@${manifest.engines.bun}`;
    expect(readme.blocks[0]).toEqual({ info: "", text: `${bun} run start\n${bun} run test\n` });
    expect(read(".ci/run")).toContain(`\n${bun} run test `);
    expect(new Set(manual.text.match(/\bbun@[\w.-]*\w/g))).toEqual(new Set([`bun@${manifest.engines.bun}`]));
    const scripts = [...manual.text.matchAll(/\brun (\w+)`/g)].map(([, name = ""]) => name);
    expect(Object.keys(manifest.scripts)).toEqual(expect.arrayContaining(scripts));
    expect(scripts.length).toBeGreaterThan(5);
  });

  describe("has a table of variables", () => {
    interface Row {
      readonly fallback: unknown;
      readonly flag?: string;
      readonly secret?: true;
    }
    const tables: [string, Readonly<Record<string, Row>>][] = [
      ["both services", COMMON],
      ["the gateway", GATEWAY],
      ["the facilitator", FACILITATOR],
      ["the demo", DEMO],
    ];
    const head = "| variable | default | meaning |";
    const rowsOf = (whose: string) =>
      tableRows(
        pages.get("configuration")?.section(`Variable${whose === "the demo" ? "" : "s"} of ${whose}`) ?? "",
        head,
      );
    /** Defaults that depend on the machine, or have a unit of their own. */
    const inWords = ["TOLLGATE_WORKERS", "TOLLGATE_MAX_FEE_GWEI"];
    const ofNetwork: Readonly<Record<string, unknown>> = {
      TOLLGATE_GAS_LOW_WATER_WEI: BASE.fees.lowWater,
      TOLLGATE_CONFIRMATIONS: BASE.confirmations,
      TOLLGATE_DAILY_GAS_WEI: BASE.fees.dailyGas,
    };
    test.each(tables)("for %s, as the program has them", (whose, variables) => {
      const rows = rowsOf(whose);
      const shown = Object.entries(variables).map(([name, { flag, secret, ...row }], index) => {
        const fallback = row.fallback ?? ofNetwork[name] ?? null;
        const isInWords = fallback === null || Array.isArray(fallback) || inWords.includes(name);
        return [
          `\`${name}\`${secret === true ? " \\*" : ""}${flag === undefined ? "" : ` \`--${flag}\``}`,
          isInWords ? rows[index]?.[1]?.replaceAll("`", "") : `\`${fallback}\``,
        ];
      });
      expect(rows.map((row) => row.slice(0, 2))).toEqual(shown as string[][]);
      expect(rows.filter(([, , meaning = ""]) => meaning.length < 10)).toEqual([]);
    });

    test("in the README, with rows of the manual's tables", () => {
      const all = pages.get("configuration")?.text.split("\n") ?? [];
      const shown = readme.section("Configuration").match(/^\| `.*$/gm) ?? [];
      expect(shown.filter((row) => !all.includes(row))).toEqual([]);
      expect(shown.length).toBeGreaterThan(10);
    });
  });

  test("names no variable that does not exist", () => {
    const known = Object.entries<{ secret?: true }>(VARIABLES).flatMap(([name, { secret }]) =>
      secret === true ? [name, `${name}_FILE`] : [name],
    );
    const named = new Set(manual.text.match(/\b(TOLLGATE_[A-Z_]*[A-Z]|DATABASE_URL)\b/g));
    expect([...named].filter((name) => !known.includes(name))).toEqual([]);
    expect(named.size).toBeGreaterThan(20);
  });

  test.each([...files.keys()])("has no broken link in %s", (path) => {
    const own = files.get(path)?.links.filter((target) => !target.startsWith("https://")) ?? [];
    const broken = own.filter((target) => {
      const [file = "", anchor = ""] = target.split("#");
      const place = file === "" ? path : join(dirname(path), file);
      if (anchor === "") return !existsSync(join(ROOT, place));
      return files.get(place)?.anchors.has(anchor) !== true;
    });
    expect(broken).toEqual([]);
    // What is no page is not there where the manual is served.
    const strays = own.filter((target) => path !== "README.md" && !/^([a-z]+\.md)?(#|$)/.test(target));
    expect(strays).toEqual([]);
  });

  test("has links at all", () => {
    expect(readme.links.length).toBeGreaterThan(20);
    expect(manual.links.length).toBeGreaterThan(40);
  });

  test("names no file in a recipe that is not there", () => {
    const recipes = pages.get("development")?.section("Recipes") ?? "";
    const named = recipes.match(/(?<=`)(src|db|test)\/[^`]+(?=`)/g) ?? [];
    expect(named.filter((path) => !existsSync(join(ROOT, path)))).toEqual([]);
    expect(new Set(named).size).toBeGreaterThan(40);
    expect(recipes.match(/^### /gm)?.length).toBeGreaterThanOrEqual(10);
    // Files are named in other pages as well, with their whole path.
    const others = manual.text.match(/(?<=`)(src|db|test)\/[\w./-]+\.\w+(?=`)/g) ?? [];
    expect(others.filter((path) => !existsSync(join(ROOT, path)))).toEqual([]);
  });

  test("quotes no message in the page on troubleshooting that the product does not have", async () => {
    const quoted = pages.get("troubleshooting")?.text.match(/(?<=`)(?!tollgate )[a-z']+( [a-z'-]+){2,}(?=`)/g) ?? [];
    const sources: string[] = [];
    for await (const path of new Glob("src/**/*.ts").scan({ cwd: ROOT })) {
      if (!path.endsWith(".test.ts")) sources.push(read(path));
    }
    const source = sources.join("\n");
    expect(quoted.filter((message) => !source.includes(message))).toEqual([]);
    expect(quoted).toContain("is already in use");
    expect(quoted.length).toBeGreaterThan(8);
    // A message on the address names the variable or the flag, whichever was given.
    expect(pages.get("troubleshooting")?.text).not.toMatch(/must be free to listen on|must be an address to listen on/);
  });

  test("names no file in a comment of the source that is not there", async () => {
    const broken: string[] = [];
    for await (const path of new Glob("{src,db}/**/*.{ts,sql}").scan({ cwd: ROOT })) {
      const named = read(path).match(/\b(src|db|test)\/[\w./-]+\.(ts|sql|md|json|yaml)\b/g) ?? [];
      broken.push(...named.filter((name) => !existsSync(join(ROOT, name))).map((name) => `${path}: ${name}`));
    }
    expect(broken).toEqual([]);
  });

  test("names all that a further engine has to be told to, which is whoever asks for the dialect", async () => {
    const engine = pages.get("development")?.section("A database engine") ?? "";
    const named: readonly string[] = engine.match(/(?<=`)src\/[^`]+(?=`)/g) ?? [];
    const asking: string[] = [];
    for await (const path of new Glob("src/**/*.ts").scan({ cwd: ROOT })) {
      const isItself = /\.test\.ts$|^src\/storage\/(sqlite|postgres)\//.test(path);
      if (!isItself && /\bdialect( [!=]==|\])/.test(read(path))) asking.push(path);
    }
    expect(asking.filter((path) => !named.includes(path)).sort()).toEqual([]);
    expect(asking).not.toEqual([]);
  });

  test("names every file of the way of a paid call as it is", () => {
    const drawn = pages.get("architecture")?.section("One paid call") ?? "";
    const named = drawn.match(/[a-z][\w/-]*\.ts\b/g) ?? [];
    const folders = ["src/gateway", "src/facilitator"];
    expect(named.filter((path) => !folders.some((folder) => existsSync(join(ROOT, folder, path))))).toEqual([]);
    expect(named.length).toBeGreaterThan(20);
  });

  test("names every file that a settlement passes as it is, of which there are few", () => {
    const listed = pages.get("architecture")?.section("One settlement, file by file") ?? "";
    const [, list = ""] = listed.split("```");
    const named = list.match(/[a-z][\w/-]*\.ts\b/g) ?? [];
    const folders = ["src/facilitator", "src"];
    expect(named.filter((path) => !folders.some((folder) => existsSync(join(ROOT, folder, path))))).toEqual([]);
    expect(listed).toContain(`passes ${named.length} files`);
    expect(new Set(named).size).toBe(named.length);
    expect(named.length).toBeLessThanOrEqual(40);
  });

  test("names every file that a call passes as it is, of which there are few", () => {
    const listed = pages.get("architecture")?.section("One call, file by file") ?? "";
    const [, list = ""] = listed.split("```");
    const [both = [], polled = [], streamed = [], paid = []] = list
      .split(/\n(?=both|polled|streamed|paid)/)
      .slice(1)
      .map((part) => part.match(/[a-z][\w/-]*\.ts\b/g) ?? []);
    const named = [...both, ...polled, ...streamed, ...paid];
    const folders = ["src/gateway", "src"];
    expect(named.filter((path) => !folders.some((folder) => existsSync(join(ROOT, folder, path))))).toEqual([]);
    expect(new Set(named).size).toBe(named.length);
    const kernel = (/kernel\/: [a-z, ]+/.exec(list)?.[0] ?? "").split(",").length;
    // The client of HTTP, the store and the core.
    const common = both.length + kernel + 3;
    expect([common + polled.length, common + polled.length + paid.length, common + streamed.length]).toEqual(
      [.../passes (\d+) files, .*? (\d+); a streamed call passes (\d+)/.exec(listed)!.slice(1)].map(Number),
    );
    expect(common + polled.length).toBeLessThanOrEqual(47);
    expect(common + polled.length + paid.length).toBeLessThanOrEqual(66);
    expect(common + streamed.length).toBeLessThanOrEqual(38);
  });

  test("has a reason for every dependency", () => {
    const rows = tableRows(manual.section("Dependencies"), "| dependency | why |");
    const all = [manifest.dependencies, manifest.optionalDependencies, manifest.devDependencies].flatMap(Object.keys);
    expect(rows.map(([name]) => name).sort()).toEqual(all.map((name) => `\`${name}\``).sort());
    expect(rows.filter(([, reason = ""]) => reason.length < 8)).toEqual([]);
  });

  test("shows the layout of the source as it is", () => {
    const shown = layoutPaths(readme.blocks.find(({ info }) => info === "text layout")?.text ?? "");
    expect(shown.filter((path) => !existsSync(join(ROOT, path)))).toEqual([]);
    const folders = ["src", "src/gateway", "src/facilitator", "test"].flatMap((parent) =>
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

  test("has no block that nothing looks at", () => {
    const shells = ["start", "upstreams", "echo", "tour", "demo", "chain", "facilitator", "payer", "curl", "backup"];
    const elsewhere = ["sh install", "sh postgres", "sh uninstall", "sh compose", "yaml compose"];
    // Those of packages run in a root of their own (packaging.test.ts). The commands of the container have no engine here.
    const known = ["sh", ...elsewhere, ...shells.map((name) => `sh ${name}`), "http", "http facilitator"];
    const outputs = ["", "json", "text", "text demo", "text layout", "text welcome"];
    const ofClients = pages.get("clients")?.blocks.map(({ info }) => info) ?? [];
    const others = manual.blocks.filter(({ info }) => ![...known, ...outputs, ...ofClients].includes(info));
    expect(others).toEqual([]);
    const [demo, chain] = ["sh demo", "sh chain"].map((name) => manual.blocks.find(({ info }) => info === name));
    expect(chain?.text).toBe(demo?.text);
  });

  test("defines the functions of its examples in one way, wherever it defines them", () => {
    const shells = [...files].flatMap(([path, { blocks }]) =>
      blocks.filter(({ info }) => info.startsWith("sh")).map(({ text }) => ({ path, text })),
    );
    const definitions = new Map<string, Map<string, string[]>>();
    for (const { path, text } of shells) {
      // The container has a tollgate of its own, for the few lines that make its certificates.
      for (const [whole, name = ""] of text.matchAll(/^(\w+)\(\) \{(?! docker run)[\s\S]*?\}(?=\n)/gm)) {
        const texts = definitions.get(name) ?? new Map<string, string[]>();
        definitions.set(name, texts.set(whole, [...(texts.get(whole) ?? []), path]));
      }
    }
    expect([...definitions].filter(([, texts]) => texts.size > 1)).toEqual([]);
    expect([...definitions.keys()].sort()).toEqual(["api", "call", "field", "tollgate"]);
    const echo = manual.blocks.filter(({ text }) => text.includes('require("node:http").createServer'));
    expect(new Set(echo.map(({ text }) => text)).size).toBe(1);
    expect(echo.map(({ info }) => info).sort()).toEqual(["sh echo", "sh upstreams"]);
  });

  test("has a changelog that begins with the version that is built, and pages that hosting sites lead to", () => {
    const [newest] = /(?<=^## ).+$/m.exec(pages.get("changelog")?.text ?? "") ?? [];
    expect(newest).toBe(manifest.version);
    for (const [name, page] of [
      ["SECURITY.md", "vulnerabilities"],
      ["CONTRIBUTING.md", "contributing"],
    ] as const) {
      const { links } = parseReadme(read(`.github/${name}`));
      expect(links).toContain(`../${MANUAL}/${page}.md`);
      expect(links.filter((target) => !existsSync(join(ROOT, ".github", target)))).toEqual([]);
    }
  });

  test("holds nothing that belongs to one machine", () => {
    expect(
      manual.text.match(
        /\/(home|root|work|Users|usr)\/(?!local\/bin\/|sbin\/nologin)|\/tmp\/|\bregistry\.\w|\bnpmjs\b/g,
      ) ?? [],
    ).toEqual([]);
  });
});
