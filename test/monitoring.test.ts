// Alert rules, the dashboard and the manual's page on monitoring say nothing that is not so: each name, label and value that
// they use is one that the metrics have, and the page lists every metric and every event of the log.
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { parser } from "@prometheus-io/lezer-promql";
import { Glob, YAML } from "bun";
import { Registry } from "prom-client";
import { VARIABLES } from "../src/config.ts";
import { createMeters, registerProcess } from "../src/metrics/metrics.ts";
import { pages, ROOT, read } from "./support/documentation.ts";
import { METRICS, PROCESS_METRICS, parseMetrics, type Scrape } from "./support/metrics.ts";
import { tableRows } from "./support/readme.ts";

interface Rule {
  readonly alert: string;
  readonly expr: string;
  readonly for?: string;
  readonly labels: { readonly severity: string };
  readonly annotations: { readonly summary: string; readonly description: string };
}

interface Panel {
  readonly id: number;
  readonly type: string;
  readonly title: string;
  readonly gridPos: { readonly h: number; readonly w: number; readonly x: number; readonly y: number };
  readonly targets?: readonly { readonly expr: string; readonly legendFormat: string }[];
}

const alerts = YAML.parse(read("src/packaging/prometheus/alerts.yaml")) as {
  readonly groups: readonly { readonly name: string; readonly rules: readonly Rule[] }[];
};
const rules = alerts.groups.flatMap((group) => group.rules);
const dashboard = JSON.parse(read("src/packaging/grafana/dashboard.json")) as {
  readonly panels: readonly Panel[];
  readonly annotations: { readonly list: readonly { readonly expr: string }[] };
};
const page = pages.get("monitoring");

/** Of a process that has counted one of everything. */
async function everything(): Promise<Scrape> {
  const registry = new Registry();
  const meters = createMeters(registry, 2);
  registerProcess(registry);
  const routes = ["/v1/proxy/:id", "/v1/proxy/:id/stream", "/readyz", "/healthz", "/settle"];
  const count = meters.requestsTo(routes.map((path) => ({ path })));
  for (const status of [200, 404, 500, 503]) for (const path of routes) count(path, status, 1);
  meters.gauges({ balances: async () => [["0xabc", 1n]], inUse: () => ({ runningCalls: 1 }) });
  return parseMetrics(await registry.metrics());
}

/** Labels that Prometheus adds to whatever it scrapes. */
const TARGET_LABELS = ["job", "instance"];

interface Matcher {
  readonly label: string;
  readonly operator: string;
  readonly value: string;
}

interface Selector {
  readonly metric: string;
  readonly matchers: readonly Matcher[];
}

/** @throws Error for what is no PromQL */
function selectorsOf(expr: string): { selectors: Selector[]; grouped: string[] } {
  // A dashboard's variables stand where a duration or a text may.
  const text = expr.replaceAll("$__rate_interval", "5m");
  const [selectors, grouped]: [Selector[], string[]] = [[], []];
  parser.parse(text).iterate({
    enter(node) {
      const own = text.slice(node.from, node.to);
      if (node.type.isError) throw new Error(`no PromQL at ${node.from}: ${text}`);
      if (node.name === "VectorSelector") {
        const matchers = node.node.getChildren("LabelMatchers").flatMap((list) =>
          list.getChildren("UnquotedLabelMatcher").map((matcher) => {
            const part = (name: string) => {
              const child = matcher.getChild(name);
              return child === null ? "" : text.slice(child.from, child.to);
            };
            return { label: part("LabelName"), operator: part("MatchOp"), value: part("StringLiteral").slice(1, -1) };
          }),
        );
        selectors.push({ metric: /^[\w:]+/.exec(own)?.[0] ?? "", matchers });
      }
      if (node.name === "GroupingLabels") grouped.push(...own.slice(1, -1).split(/\s*,\s*/));
    },
  });
  return { selectors, grouped };
}

/** What of an expression cannot be, in words. */
function problemsOf(expr: string, scrape: Scrape): string[] {
  const { selectors, grouped } = selectorsOf(expr);
  const problems: string[] = [];
  const labels = new Set(TARGET_LABELS);
  for (const { metric, matchers } of selectors) {
    const samples = scrape.samples.filter(({ name }) => name === metric);
    const own = new Set([...TARGET_LABELS, ...samples.flatMap((sample) => Object.keys(sample.labels))]);
    for (const label of own) labels.add(label);
    if (samples.length === 0 && metric !== "up") problems.push(`no metric ${metric}`);
    if (
      scrape.types.get(metric) === "counter" &&
      !new RegExp(`(rate|increase)\\(${metric}|by \\(.*\\) \\(${metric}`).test(expr)
    )
      problems.push(`a bare counter ${metric}`);
    for (const { label, operator, value } of matchers) {
      if (!own.has(label)) problems.push(`${metric} has no label ${label}`);
      if (TARGET_LABELS.includes(label) || !own.has(label)) continue;
      const isPattern = operator.includes("~");
      for (const alternative of isPattern ? value.split("|") : [value]) {
        const pattern = new RegExp(`^(?:${isPattern ? alternative : RegExp.escape(alternative)})$`);
        if (!samples.some((sample) => pattern.test(sample.labels[label] ?? "")))
          problems.push(`${metric} has no ${label} like ${alternative}`);
      }
    }
  }
  return [...problems, ...grouped.filter((label) => !labels.has(label)).map((label) => `no label ${label}`)];
}

describe("an expression is refused", () => {
  test.each([
    ["tollgate_accepted", "no metric tollgate_accepted"],
    ["rate(tollgate_upstream_duration_seconds[5m])", "no metric tollgate_upstream_duration_seconds"],
    ['rate(tollgate_policy_decisions_total{agent="x"}[5m])', "tollgate_policy_decisions_total has no label agent"],
    [
      'rate(tollgate_policy_decisions_total{action="refuse"}[5m])',
      "tollgate_policy_decisions_total has no action like refuse",
    ],
    [
      'rate(tollgate_policy_decisions_total{action=~"deny|x.*"}[5m])',
      "tollgate_policy_decisions_total has no action like x.*",
    ],
    ["sum by (tenant) (tollgate_queue_depth)", "no label tenant"],
    ["tollgate_accepted_total > 5", "a bare counter tollgate_accepted_total"],
  ])("%s: %s", async (expr, problem) => {
    expect(problemsOf(expr, await everything())).toEqual([problem]);
  });

  test("that is no PromQL", () => {
    expect(() => selectorsOf("sum(rate(tollgate_accepted_total[5m])")).toThrow("no PromQL");
    expect(() => selectorsOf("tollgate_accepted_total tollgate_running")).toThrow("no PromQL");
  });
});

describe("the alert rules", () => {
  test.each(rules)("$alert asks for what there is", async ({ alert, expr, labels, annotations, ...rule }) => {
    expect(alert).toMatch(/^Tollgate[A-Z][A-Za-z]+$/);
    expect(problemsOf(expr, await everything())).toEqual([]);
    expect(rule.for ?? "1m").toMatch(/^\d+[mh]$/);
    expect(["info", "warning", "critical"]).toContain(labels.severity);
    expect(annotations.summary.length).toBeGreaterThan(20);
    expect(annotations.description.length).toBeGreaterThan(40);
    // A label that the expression has summed away would be empty.
    const { grouped } = selectorsOf(expr);
    const shown = [...annotations.summary.matchAll(/\$labels\.(\w+)/g)].map(([, label = ""]) => label);
    if (/^(sum|max|min|count) by/.test(expr)) expect(grouped).toEqual(expect.arrayContaining(shown));
  });

  test("are of different names, and watch what an operator must hear of", () => {
    expect(new Set(rules.map(({ alert }) => alert)).size).toBe(rules.length);
    const watched = new Set(rules.flatMap(({ expr }) => selectorsOf(expr).selectors.map(({ metric }) => metric)));
    const needed = ["queue_depth", "queue_oldest_age_seconds", "invocations_ended_total", "settlements_total"];
    const chain = ["wallet_balance_wei", "rpc_errors_total", "event_loop_lag_seconds", "http_requests_total"];
    expect([...watched]).toEqual(expect.arrayContaining([...needed, ...chain].map((name) => `tollgate_${name}`)));
  });

  test("name no event of the log and no variable that is not there", () => {
    const said = rules.map(({ annotations }) => `${annotations.summary} ${annotations.description}`).join("\n");
    const words = [...said.matchAll(/\b[a-z]+(?:_[a-z]+)+\b/g)].map(([word]) => word);
    const fields = ["cpu_ms"];
    expect(words.filter((word) => !loggedEvents().has(word) && !fields.includes(word))).toEqual([]);
    const variables = said.match(/\bTOLLGATE_\w+/g) ?? [];
    expect(variables.filter((name) => !Object.hasOwn(VARIABLES, name))).toEqual([]);
    expect(words.length + variables.length).toBeGreaterThan(15);
  });
});

describe("the dashboard", () => {
  const drawn = dashboard.panels.flatMap(({ title, targets = [] }) => targets.map(({ expr }) => ({ title, expr })));

  test.each(drawn)("$title draws what there is: $expr", async ({ expr }) => {
    expect(problemsOf(expr, await everything())).toEqual([]);
  });

  test("has all metrics of the services, and panels that do not overlap", () => {
    const shown = new Set(drawn.flatMap(({ expr }) => selectorsOf(expr).selectors.map(({ metric }) => metric)));
    const all = Object.entries(METRICS).map(([name, [type]]) => (type === "histogram" ? `${name}_bucket` : name));
    expect(all.filter((name) => !shown.has(name))).toEqual([]);
    expect(new Set(dashboard.panels.map(({ id }) => id)).size).toBe(dashboard.panels.length);
    const cells = dashboard.panels.flatMap(({ gridPos: { x, y, w, h } }) =>
      Array.from({ length: w * h }, (_, at) => `${x + (at % w)},${y + Math.floor(at / w)}`),
    );
    expect(new Set(cells).size).toBe(cells.length);
    expect(Math.max(...dashboard.panels.map(({ gridPos: { x, w } }) => x + w))).toBe(24);
    for (const { expr } of dashboard.annotations.list) expect(() => selectorsOf(expr)).not.toThrow();
  });
});

/** Every event that the source logs, with its levels; those that pass as a variable have none. */
function loggedEvents(): Map<string, Set<string>> {
  const events = new Map<string, Set<string>>();
  const sources = [...new Glob("src/**/*.ts").scanSync({ cwd: ROOT })].filter((path) => !path.endsWith(".test.ts"));
  const calls =
    /(?:\b[lL]og|\b\w+Log|\blog\[[^\]]*\]|\)|\bwarn|\blogRarely)(?:\s*\.\s*(debug|info|warn|error)|\[(.*?)\])?\(\s*(?:"(debug|info|warn|error)",\s*)?"([a-z][a-z0-9]*(?:_[a-z0-9]+)*)"\s*[,)]/g;
  for (const path of sources) {
    const code = readFileSync(join(ROOT, path), "utf8").replaceAll(/\/\*[\s\S]*?\*\/|^\s*\/\/.*$/gm, "");
    for (const [whole, method, chosen, first, event = ""] of code.matchAll(calls)) {
      const levels = method ?? first ?? [...(chosen ?? whole).matchAll(/debug|info|warn|error/g)].join();
      if (levels === "") continue;
      const known = events.get(event) ?? new Set();
      for (const level of levels.split(",")) known.add(level);
      events.set(event, known);
    }
  }
  return events;
}

describe("the manual's page on monitoring", () => {
  const services = ["both services", "the gateway", "the facilitator", "the demo"].map((whose) => `Events of ${whose}`);
  const head = "| event | level | means, and what to do |";
  const listed = services.flatMap((service) => tableRows(page?.section(service) ?? "", head));

  test("lists every event of the log with its levels, and no other", () => {
    const logged = loggedEvents();
    // The log's own line is written past its own methods.
    logged.set("log_lines_dropped", new Set(["warn"]));
    const shown = listed.map(([event = "", levels = ""]) => [event.replaceAll("`", ""), levels.split(", ").sort()]);
    expect(Object.fromEntries(shown)).toEqual(
      Object.fromEntries([...logged].map(([event, levels]) => [event, [...levels].sort()])),
    );
    expect(listed.filter(([, , meaning = ""]) => meaning.length < 10)).toEqual([]);
    expect(new Set(shown.map(([event]) => event)).size).toBe(listed.length);
    expect(logged.size).toBeGreaterThan(110);
  });

  test("lists every metric with its labels, and no other", () => {
    const rows = tableRows(page?.section("Metrics") ?? "", "| metric | labels | what it is |");
    const shown = rows.map(([name = "", labels = ""]) => [
      name.replaceAll("`", ""),
      labels.match(/\w+/g)?.sort() ?? [],
    ]);
    const all = Object.entries({ ...METRICS, ...PROCESS_METRICS }).map(([name, [, ...labels]]) => [
      name,
      labels.sort(),
    ]);
    expect(Object.fromEntries(shown)).toEqual(Object.fromEntries(all));
  });

  test("lists every outcome", async () => {
    const scrape = await everything();
    for (const [metric, ...columns] of [
      ["tollgate_payments_total", "means"],
      ["tollgate_settlements_total", "service", "means"],
    ] as const) {
      const columnsOf = `| \`outcome\` of \`${metric}\` | ${columns.join(" | ")} |`;
      const rows = tableRows(page?.section("Metrics") ?? "", columnsOf).map(([outcome = ""]) =>
        outcome.replaceAll("`", ""),
      );
      const there = scrape.samples.filter(({ name }) => name === metric).map(({ labels }) => labels["outcome"] ?? "");
      expect(rows.sort()).toEqual(there.sort());
    }
  });
});
