// What a service tells Prometheus, read by a library that has not written it.
import parse from "parse-prometheus-text-format";

type Shape = readonly [type: "counter" | "gauge" | "histogram", ...labels: string[]];

/** All names of the services' own, each with its type and its labels. */
export const METRICS: Readonly<Record<string, Shape>> = {
  tollgate_accepted_total: ["counter"],
  tollgate_invocations_ended_total: ["counter", "mode", "status", "error_class"],
  tollgate_queue_depth: ["gauge"],
  tollgate_queue_oldest_age_seconds: ["gauge"],
  tollgate_running: ["gauge"],
  tollgate_limit_used_ratio: ["gauge", "limit"],
  tollgate_upstream_duration_seconds: ["histogram", "le"],
  tollgate_http_requests_total: ["counter", "route", "status"],
  tollgate_http_request_duration_seconds: ["histogram", "le", "route"],
  tollgate_policy_decisions_total: ["counter", "action"],
  tollgate_payments_total: ["counter", "outcome"],
  tollgate_settlements_total: ["counter", "outcome"],
  tollgate_settlement_duration_seconds: ["histogram", "le"],
  tollgate_wallet_balance_wei: ["gauge", "address"],
  tollgate_rpc_errors_total: ["counter", "endpoint"],
  tollgate_event_loop_lag_seconds: ["gauge"],
  tollgate_build_info: ["gauge", "version", "commit"],
};
export const PROCESS_METRICS: Readonly<Record<string, Shape>> = {
  process_cpu_seconds_total: ["counter"],
  process_resident_memory_bytes: ["gauge"],
  process_start_time_seconds: ["gauge"],
};

export interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

export interface Scrape {
  readonly text: string;
  /** By name, those of histograms included. */
  readonly types: ReadonlyMap<string, string>;
  readonly samples: readonly Sample[];
  /** The sum of all samples of this name with these labels; NaN when there is none. */
  value(name: string, labels?: Readonly<Record<string, string>>): number;
}

const NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*";
const LABEL = '[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\\\\n]|\\\\["\\\\n])*"';
const VALUE = "[-+]?(?:[0-9]+(?:\\.[0-9]+)?(?:e[-+]?[0-9]+)?|Inf)";
/** The library takes more than Prometheus does. */
const LINE = new RegExp(
  `^(?:# HELP ${NAME} .+|# TYPE ${NAME} (?:counter|gauge|histogram)|${NAME}(?:\\{${LABEL}(?:,${LABEL})*\\})? ${VALUE}|)$`,
);

export function parseMetrics(text: string): Scrape {
  const wrong = text.split("\n").filter((line) => !LINE.test(line));
  if (wrong.length > 0 || !text.endsWith("\n")) throw new Error(`no exposition format: ${wrong[0]}`);
  const types = new Map([...text.matchAll(/^# TYPE (\S+) (\S+)$/gm)].map(([, name = "", type = ""]) => [name, type]));
  // The library merges the label sets of a histogram, so its samples are read as what they are on the wire.
  const families = parse(text.replaceAll(/^# TYPE \S+ histogram$/gm, ""));
  const samples = families.flatMap(({ name, metrics }) =>
    metrics.map(({ labels = {}, value }) => ({ name, labels, value: Number(value.replace("Inf", "Infinity")) })),
  );
  const named = new Set(samples.map(({ name, labels }) => JSON.stringify([name, Object.entries(labels).sort()])));
  if (named.size !== samples.length) throw new Error("a sample stands there twice");
  return {
    text,
    types,
    samples,
    value(name, labels = {}) {
      const found = samples.filter(
        (sample) =>
          sample.name === name && Object.entries(labels).every(([label, value]) => sample.labels[label] === value),
      );
      return found.length === 0 ? Number.NaN : found.reduce((sum, { value }) => sum + value, 0);
    },
  };
}

/** Where the newest process of this log tells its metrics. */
export function metricsUrl({ log }: { log(): string }): string {
  const url = [...log().matchAll(/"event":"metrics_listening","url":"([^"]+)"/g)].at(-1)?.[1];
  if (url === undefined) throw new Error("no metrics port is open");
  return url;
}

export async function scrape(service: { log(): string }): Promise<Scrape> {
  const response = await fetch(metricsUrl(service));
  if (response.status !== 200) throw new Error(`/metrics answered ${response.status}`);
  return parseMetrics(await response.text());
}

/** Scrapes until it holds. */
export async function scrapeUntil(service: { log(): string }, holds: (found: Scrape) => boolean): Promise<Scrape> {
  for (;;) {
    const found = await scrape(service);
    if (holds(found)) return found;
    await Bun.sleep(50);
  }
}
