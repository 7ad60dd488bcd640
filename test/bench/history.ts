// A million stored calls, through the whole gateway. Pages of that history beside those of ten thousand calls, asked
// for in turn: without a filter and with each single one, the longer history may not cost more. Then what may cost
// more: pages far behind, and filters together or dates, for which the matches are counted. And accepts with a million
// calls stored, beside those of an empty database.
import { FILTERS } from "../support/stores/long-history.ts";
import { DATABASES, type OpenDatabase } from "./databases.ts";
import { accepts, warmUp } from "./measure.ts";
import { type Report, say } from "./report.ts";
import { type Figures, latency, percentile } from "./table.ts";
import { type GatewayTarget, HELD_BACK, openGateway, silentUpstream, TENANT } from "./targets.ts";

const SHORT = 10_000;
const LONG = 1_000_000;
const ROUNDS = 3;
const PAGES_A_SECOND = 5;
const FAR = 1_000;

const ALL_TIME = "since=1970-01-01T00:00:00Z";
const AGENT = `agent_id=${FILTERS.agent_id[0]}`;
const DEAR: readonly string[] = [
  "offset=500000",
  `${AGENT}&offset=500000`,
  "offset=999999999",
  `${AGENT}&status=failed`,
  `mode=transactional&model=${FILTERS.model[2]}`,
  ALL_TIME,
  `status=succeeded&${ALL_TIME}`,
  `status=pending&${ALL_TIME}`,
];
const DEAR_TIMES = 2;

interface History {
  /** Asks for a page, and gives its milliseconds. */
  page(query: string): Promise<number>;
  total(query: string): Promise<number>;
}

async function historyOf({ gateway }: GatewayTarget): Promise<History> {
  const headers = { authorization: `Bearer ${await gateway.token({ tenant: TENANT, user: "bench" })}` };
  const get = async (query: string) => {
    const response = await fetch(`${gateway.url}/v1/invocations?${query}`, { headers });
    if (!response.ok) throw new Error(`${query} answers ${response.status}`);
    return (await response.json()) as { total: number };
  };
  return {
    async page(query) {
      const startedAt = performance.now();
      await get(query);
      return performance.now() - startedAt;
    },
    total: async (query) => (await get(`limit=1&${query}`)).total,
  };
}

interface Times {
  readonly short: number[];
  readonly long: number[];
}

/** The rounds of one page of either history, asked for in turn, so that what else the machine does falls on both. */
async function measure(short: History, long: History, query: string, pages: number): Promise<Times[]> {
  const rounds: Times[] = [];
  for (let round = 0; round < ROUNDS; round++) {
    const times: Times = { short: [], long: [] };
    for (let i = 0; i < pages; i++) {
      times.short.push(await short.page(query));
      times.long.push(await long.page(query));
    }
    rounds.push(times);
  }
  return rounds;
}

/** Of both, each that of the middle round. */
function middles(rounds: readonly Times[]): { few: Figures; many: Figures } {
  const middle = (which: keyof Times): Figures => {
    const all = rounds.map((times) => latency(times[which]));
    const of = (name: "p50_ms" | "p99_ms") =>
      percentile(
        all.map((figures) => figures[name] ?? 0),
        0.5,
      ) ?? 0;
    return { p50_ms: of("p50_ms"), p99_ms: of("p99_ms") };
  };
  return { few: middle("short"), many: middle("long") };
}

/** Shows p50 and p99 of both, and gives how many times the long one's p99 is. */
function compare(name: string, rounds: readonly Times[]): number {
  const { few, many } = middles(rounds);
  const shown = ({ p50_ms = 0, p99_ms = 0 }: Figures) => `p50 ${p50_ms.toFixed(2)} p99 ${p99_ms.toFixed(2)} ms`;
  const times = (many.p99_ms ?? 0) / (few.p99_ms ?? Number.NaN);
  line(name, `${shown(few)}; ${shown(many)}; ${times.toFixed(2)} times`);
  return times;
}

/** The rounds of all pages as if they were of one. */
function together(pages: readonly (readonly Times[])[]): Times[] {
  return Array.from({ length: ROUNDS }, (_, round) => ({
    short: pages.flatMap((rounds) => rounds[round]?.short ?? []),
    long: pages.flatMap((rounds) => rounds[round]?.long ?? []),
  }));
}

/** Without a filter and each single one, near and, where the short history goes as far, farther behind. */
async function singleQueries(short: History): Promise<string[]> {
  const filters = Object.entries(FILTERS).flatMap(([name, values]) => values.map((value) => `${name}=${value}`));
  const queries: string[] = [];
  for (const query of ["", ...filters]) {
    queries.push(query);
    if ((await short.total(query)) > FAR) queries.push(`${query === "" ? "" : `${query}&`}offset=${FAR}`);
  }
  return queries;
}

function line(query: string, rest: string): void {
  say(`  ${(query === "" ? "no filter" : query).padEnd(66)} ${rest}`);
}

/** A total that is kept must be what counting gives. */
async function checkTotal(history: History, query: string): Promise<void> {
  const [kept, counted] = [await history.total(query), await history.total(`${query}&${ALL_TIME}`)];
  if (kept !== counted) throw new Error(`the total of ${query} is ${kept}, and it should be ${counted}`);
}

async function pagesOf(database: string, [short, long]: readonly [History, History], pages: number, report: Report) {
  say(`history on ${database}: ${LONG} calls beside ${SHORT}, ${ROUNDS} rounds of ${pages} pages each`);
  await checkTotal(long, "");
  const all: Times[][] = [];
  let worst = 0;
  for (const query of await singleQueries(short)) {
    const rounds = await measure(short, long, query, pages);
    worst = Math.max(worst, compare(query, rounds));
    all.push(rounds);
  }
  const { few, many } = middles(together(all));
  const floor = report.add(`pages of ${SHORT} calls, ${database}`, few);
  report.add(`pages of ${LONG} calls, ${database}`, many, {
    floor: [floor, "p99_ms"],
    note: `at worst ${worst.toFixed(2)} times, for one filter`,
  });
  for (const query of DEAR) {
    const times: number[] = [];
    for (let i = 0; i < DEAR_TIMES; i++) times.push(await long.page(query));
    line(query, times.map((each) => `${each.toFixed(1)} ms`).join(", "));
  }
}

/** @param seconds of each load of accepts; pages take as long, about, when one takes some milliseconds */
export async function history(seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) await onDatabase(seconds, report, open);
}

async function onDatabase(seconds: number, report: Report, open: OpenDatabase): Promise<void> {
  await using upstream = silentUpstream();
  const gateway = async (stored: number) => openGateway(await open(), { upstream, env: HELD_BACK, stored });
  await using empty = await gateway(0);
  await using short = await gateway(SHORT);
  await using long = await gateway(LONG);
  const { name } = long.database;
  await pagesOf(name, [await historyOf(short), await historyOf(long)], seconds * PAGES_A_SECOND, report);
  await warmUp(empty);
  const few = await accepts(empty, { seconds });
  const floor = report.add(`accepts with nothing stored, ${name}`, few.figures, few);
  await warmUp(long);
  const many = await accepts(long, { seconds });
  report.add(`accepts with ${LONG} calls stored, ${name}`, many.figures, { floor: [floor, "cpu_us"], note: many.note });
}
