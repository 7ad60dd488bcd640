// One load on one process, and everything that is counted of it.

import { residentOver, usageOf } from "./cores.ts";
import type { BenchDatabase } from "./databases.ts";
import { type Load, runLoad } from "./load.ts";
import type { Figures } from "./table.ts";

/** A process that listens on loopback. */
export interface Target {
  readonly pid: number;
  readonly port: number;
  readonly database: Pick<BenchDatabase, "serverSeconds" | "written">;
  readonly requests: readonly string[];
  /** Other processes that do a part of its work, whose time of a core is counted with its own. */
  readonly helpers?: readonly number[];
}

export interface Measured {
  readonly figures: Figures;
  /** What other statuses than 202 there were. */
  readonly note: string;
}

export const CONNECTIONS = 128;
/** What a load is as long as what is compiled while it runs still shows. */
const WARM_MS = 1_000;
const BODY = JSON.stringify({ question: "what is the answer?", context: "x".repeat(200) });
const ENDED_MS_MAX = 60_000;
const LOOK_MS = 50;

/** The request that everything here is asked, the same whoever is asked. */
export function postRequest(port: number, path: string, headers: readonly string[] = []): string {
  const all = [
    `Host: 127.0.0.1:${port}`,
    "Content-Type: application/json",
    `Content-Length: ${BODY.length}`,
    ...headers,
  ];
  return `POST ${path} HTTP/1.1\r\n${all.join("\r\n")}\r\n\r\n${BODY}`;
}

type LoadOptions = Partial<Pick<Load, "connections" | "answersMax">> & { readonly seconds: number };

/** Lets the process get as fast as it will be. Gives how many calls it has accepted. */
export async function warmUp({ port, requests }: Target): Promise<number> {
  const { by_status } = await runLoad({ port, requests, connections: CONNECTIONS, milliseconds: WARM_MS });
  return by_status["202"] ?? 0;
}

/** Counts what is accepted, and what each takes. */
export async function accepts(target: Target, { seconds, ...options }: LoadOptions): Promise<Measured> {
  const { port, requests } = target;
  const used = await startCounting(target);
  const load = { port, requests, connections: CONNECTIONS, milliseconds: seconds * 1000, ...options };
  const { p50_ms, p99_ms, by_status, ...all } = await runLoad(load);
  const count = by_status["202"] ?? 0;
  const figures = { rate: count / all.seconds, p50_ms, p99_ms, ...(await used(count)) };
  return { figures, note: otherStatuses(by_status) };
}

/**
 * Accepts for so long, and then until none of them is left to be done: counts what was done from start to end.
 *
 * @param left of so many calls, asked again and again
 */
export async function wholeCalls(
  target: Target,
  seconds: number,
  left: (accepted: number) => Promise<number>,
): Promise<Measured & { readonly accepted: number }> {
  const { port, requests } = target;
  const before = await warmUp(target);
  await untilDone(() => left(before));
  const used = await startCounting(target);
  const startedAt = performance.now();
  const load = { port, requests, connections: CONNECTIONS, milliseconds: seconds * 1000 };
  const { p50_ms, p99_ms, by_status } = await runLoad(load);
  const accepted = by_status["202"] ?? 0;
  await untilDone(() => left(before + accepted));
  const took = (performance.now() - startedAt) / 1000;
  const figures = { rate: accepted / took, p50_ms, p99_ms, ...(await used(accepted)) };
  return { figures, note: otherStatuses(by_status), accepted };
}

async function untilDone(left: () => Promise<number>): Promise<void> {
  const until = performance.now() + ENDED_MS_MAX;
  while ((await left()) > 0) {
    if (performance.now() > until) throw new Error(`calls are still under way after ${ENDED_MS_MAX} ms`);
    await Bun.sleep(LOOK_MS);
  }
}

/** From now on. */
async function startCounting({ pid, database, helpers = [] }: Target): Promise<(count: number) => Promise<Figures>> {
  const cores = () => [pid, ...helpers].reduce((sum, each) => sum + usageOf(each).whole, 0);
  const [whole, { main }] = [cores(), usageOf(pid)];
  const [server, written] = [database.serverSeconds(), await database.written(pid)];
  const resident = residentOver(pid);
  return async (count) => {
    const [wholeNow, serverNow] = [cores(), database.serverSeconds()];
    const each = (total: number) => (count === 0 ? 0 : total / count);
    const server_us = each((serverNow - server) * 1e6);
    return {
      cpu_us: each((wholeNow - whole) * 1e6),
      main_us: each((usageOf(pid).main - main) * 1e6),
      ...(server_us > 0 && { server_us }),
      rss_mb: resident().mean,
      written: each((await database.written(pid)) - written),
    };
  };
}

function otherStatuses(byStatus: Readonly<Record<string, number>>): string {
  const others = Object.entries(byStatus).filter(([status]) => status !== "202");
  return others.map(([status, count]) => `${count} answered ${status}`).join(", ");
}
