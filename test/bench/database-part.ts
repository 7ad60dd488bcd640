// The database's part of a whole call, without HTTP and upstream: the store's own accept, take and finish, as many at a
// time as a busy gateway has, in this process and the database's server together; beside a bare table that is written
// by one statement for each turn.
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { silentLog } from "../../src/core/log.ts";
import { systemClock } from "../../src/core/time.ts";
import { accept, finish, takeCommand } from "../../src/gateway/invocations/service.ts";
import { openStore } from "../../src/storage/open.ts";
import type { Store } from "../../src/storage/store.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { accepted, SUCCESS } from "../support/stores/invocations.ts";
import { ownCoreSeconds } from "./cores.ts";
import { type BenchDatabase, DATABASES } from "./databases.ts";
import { type FloorStore, openFloorStore } from "./floor-store.ts";
import { CONNECTIONS } from "./measure.ts";
import type { Report } from "./report.ts";
import { type Figures, latency } from "./table.ts";

const BODY = "x".repeat(247);
const ANSWER = Buffer.from(JSON.stringify({ answer: 42 }));
const TOKEN = "token";
const OWNER = "rep_bench";
const WARM_CALLS = 2_000;

type OneCall = () => Promise<void>;

/** @param seconds of each */
export async function databasePart(seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) {
    const database = await open();
    const bare = await openFloorStore(database.url ?? mkdtempSync(join(temporaryRoot(), "floor-")), "calls");
    const bareFigures = await repeat(() => bareCall(bare), seconds, database);
    await bare.close();
    const floor = report.add(`bare table: accept, claim, finish, ${database.name}`, bareFigures);

    const own = await open();
    const dataDir = mkdtempSync(join(temporaryRoot(), "store-"));
    const store = await openStore({ databaseUrl: own.url, dataDir, log: silentLog, clock: systemClock });
    const take = createTaker(store);
    const figures = await repeat(() => storedCall(store, take), seconds, own);
    await store.close();
    report.add(`store: accept, claim, finish, ${own.name}`, figures, {
      floor: [floor, "cpu_us"],
      note: "CPU µs is client and server together",
    });
  }
}

async function bareCall(store: FloorStore): Promise<void> {
  const id = Bun.randomUUIDv7();
  const call = { id, body: Buffer.from(BODY) };
  await store.accept(call);
  await store.claim(call);
  await store.finish({ id, body: ANSWER });
}

async function storedCall(store: Store, take: () => Promise<string>): Promise<void> {
  const one = accepted(systemClock.now(), {}, BODY);
  await accept(store, one);
  const key = { tenant: one.row.tenant, id: await take() };
  const ending = { ...SUCCESS, response: ANSWER, resp_size: ANSWER.length };
  await finish(store, { key, token: TOKEN, request_id: "bench" }, ending, systemClock.now());
}

/** Takes calls for all strands, by one command at a time, as the gateway does for an agent. */
function createTaker(store: Store) {
  const { tenant, agent_id } = accepted(0, {}, BODY).row;
  const waiting: ((id: string) => void)[] = [];
  let isTaking = false;
  async function takeAll(): Promise<void> {
    if (isTaking) return;
    isTaking = true;
    while (waiting.length > 0) {
      const tokens = waiting.map(() => TOKEN);
      const block = { tenant, agent_id, owner: OWNER, tokens, now: systemClock.now(), after: "", leftOut: [] };
      const { taken } = await store.execute(takeCommand, block);
      for (const { id } of taken) waiting.shift()?.(id);
    }
    isTaking = false;
  }
  return () =>
    new Promise<string>((resolve) => {
      waiting.push(resolve);
      void takeAll();
    });
}

/** So many strands, each with the next call as soon as the last one has ended. */
async function repeat(one: OneCall, seconds: number, database: BenchDatabase): Promise<Figures> {
  let warm = 0;
  await strands(async () => {
    while (warm++ < WARM_CALLS) await one();
  });
  const before = [ownCoreSeconds(), database.serverSeconds(), await database.written(process.pid)] as const;
  const startedAt = performance.now();
  const endAt = startedAt + seconds * 1000;
  const waits: number[] = [];
  await strands(async () => {
    while (performance.now() < endAt) {
      const from = performance.now();
      await one();
      waits.push(performance.now() - from);
    }
  });
  const took = (performance.now() - startedAt) / 1000;
  const count = waits.length;
  const server_us = ((database.serverSeconds() - before[1]) * 1e6) / count;
  const client_us = ((ownCoreSeconds() - before[0]) * 1e6) / count;
  const written = ((await database.written(process.pid)) - before[2]) / count;
  return {
    rate: count / took,
    ...latency(waits),
    cpu_us: client_us + server_us,
    ...(server_us > 0 && { server_us }),
    written,
  };
}

async function strands(strand: () => Promise<void>): Promise<void> {
  await Promise.all(Array.from({ length: CONNECTIONS }, strand));
}
