// Pages of the history of a million calls beside those of ten thousand, through the whole gateway and asked in turn:
// without a filter and with each single one, the longer history may not cost more. Then what may cost more: pages
// far behind, and filters together or dates, for which the matches are counted.
import { Database } from "bun:sqlite";
import { join } from "node:path";
import { SQL } from "bun";
import { startGateway } from "../support/gateway/gateway.ts";
import { FILTERS, longHistory } from "../support/stores/long-history.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { say } from "./report.ts";

const SHORT = 10_000;
const LONG = 1_000_000;
/** How many times as long the history of the tenant is as that of the other one, who is not asked for. */
const OTHERS = 10;
const ROUNDS = 3;
const PAGES_A_SECOND = 30;
const FAR = 1_000;

const ALL_TIME = "since=1970-01-01T00:00:00Z";
const AGENT = `agent_id=${FILTERS.agent_id[0]}`;
const DEAR: readonly string[] = [
  "offset=500000",
  `${AGENT}&offset=500000`,
  "offset=999999999",
  "mode=transactional&status=succeeded",
  `${AGENT}&status=failed`,
  `mode=transactional&model=${FILTERS.model[2]}`,
  ALL_TIME,
  `status=succeeded&${ALL_TIME}`,
  `status=pending&${ALL_TIME}`,
  "status=succeeded&since=2999-01-01T00:00:00Z",
];
const DEAR_TIMES = 5;

interface History extends AsyncDisposable {
  /** Asks for a page, and gives its milliseconds. */
  page(query: string): Promise<number>;
  total(query: string): Promise<number>;
}

type Execute = (statement: string) => Promise<unknown>;

async function fill(execute: Execute, calls: number): Promise<void> {
  for (const statement of longHistory("bench", calls)) await execute(statement);
  for (const statement of longHistory("other", calls / OTHERS)) await execute(statement);
}

async function fillSqlite(dataDir: string, calls: number): Promise<void> {
  const database = new Database(join(dataDir, "tollgate.db"));
  await fill(async (statement) => database.run(statement), calls);
  database.close();
}

async function fillPostgres(url: string, calls: number): Promise<void> {
  await using client = new SQL(url, { max: 1 });
  await fill((statement) => client.unsafe(statement), calls);
  // As the server does by itself after a while.
  await client.unsafe("vacuum analyze");
}

/** A gateway with a history of so many calls, on Postgres when there is a URL. */
async function openHistory(calls: number, databaseUrl: string | null): Promise<History> {
  const key = Buffer.from(crypto.getRandomValues(new Uint8Array(32))).toString("base64");
  const env = databaseUrl === null ? {} : { DATABASE_URL: databaseUrl, TOLLGATE_MASTER_KEY: key };
  const gateway = await startGateway({ env });
  try {
    await gateway.stop();
    if (databaseUrl === null) await fillSqlite(gateway.dataDir, calls);
    else await fillPostgres(databaseUrl, calls);
    await gateway.restart();
    const headers = { authorization: `Bearer ${await gateway.token({ tenant: "bench", user: "bench" })}` };
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
      [Symbol.asyncDispose]: () => gateway[Symbol.asyncDispose](),
    };
  } catch (error) {
    await gateway[Symbol.asyncDispose]();
    throw error;
  }
}

function at(times: readonly number[], share: number): number {
  const sorted = times.toSorted((a, b) => a - b);
  return sorted[Math.floor(sorted.length * share)] ?? 0;
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

/** Shows p50 and p99 of both, each that of the middle round, and gives how many times the long one's p99 is. */
function compare(name: string, rounds: readonly Times[]): number {
  const middle = (which: keyof Times, share: number) =>
    at(
      rounds.map((times) => at(times[which], share)),
      0.5,
    );
  const [few, many] = [middle("short", 0.99), middle("long", 0.99)];
  const shown = (which: keyof Times, p99: number) => `p50 ${middle(which, 0.5).toFixed(2)} p99 ${p99.toFixed(2)} ms`;
  line(name, `${shown("short", few)}; ${shown("long", many)}; ${(many / few).toFixed(2)} times`);
  return many / few;
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

async function pagesOf(name: string, urls: readonly [string | null, string | null], pages: number) {
  say(`history on ${name}: ${LONG} calls beside ${SHORT}, ${ROUNDS} rounds of ${pages} pages each`);
  await using short = await openHistory(SHORT, urls[0]);
  await using long = await openHistory(LONG, urls[1]);
  const all: Times[][] = [];
  let worst = 0;
  for (const query of await singleQueries(short)) {
    await checkTotal(long, query);
    const rounds = await measure(short, long, query, pages);
    worst = Math.max(worst, compare(query, rounds));
    all.push(rounds);
  }
  compare("all of them together", together(all));
  say(`  at worst the p99 of a page of the long history is ${worst.toFixed(2)} times that of the short one`);
  for (const query of DEAR) {
    const times: number[] = [];
    for (let i = 0; i < DEAR_TIMES; i++) times.push(await long.page(query));
    line(query, `p50 ${at(times, 0.5).toFixed(1)} ms of ${await long.total(query)} calls`);
  }
}

/** @param seconds of each page, about, when one takes some milliseconds */
export async function history(seconds: number): Promise<void> {
  const pages = seconds * PAGES_A_SECOND;
  await pagesOf("SQLite", [null, null], pages);
  const server = await startPostgres();
  await pagesOf("Postgres", [await server.freshDatabase(), await server.freshDatabase()], pages);
}
