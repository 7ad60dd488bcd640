// The places of agents as the paths of calls meet them: many agents at once that need more than the base.
import { expect, test } from "bun:test";
import { postgresPlace } from "../../../test/support/stores/stores.ts";
import { watchLoop } from "../../concurrency/loop-watch.ts";
import { silentLog } from "../../core/log.ts";
import { createStreamLimits } from "../streaming/stream-limits.ts";
import { AgentPlaces } from "./service.ts";

/** So few that there is no base, and each agent has to ask. */
const LIMIT = 8;
/** As many as one tenant may have wait. */
const AGENTS = 3_400;
/** Of the thread, in one piece, on a machine that has other tests to run: it is 25, and was 600. */
const COMPUTED_MS_MAX = 150;

test("thousands of agents of one tenant that wait for their first place hold up neither the event loop nor a neighbour", async () => {
  const store = await (await postgresPlace()).open();
  const places = new AgentPlaces({ store, log: silentLog, replica: "rep_1", limit: LIMIT });
  const { signal } = new AbortController();
  const limits = createStreamLimits({ agentConcurrency: places.limitOf("streaming"), stopping: signal });
  await places.start();
  const pauses: number[] = [];
  const stop = watchLoop("main", 10, (_, fields) => {
    const { ms, cpu_ms } = fields as { ms: number; cpu_ms: number };
    pauses.push(Math.min(ms, cpu_ms));
  });
  let placed = 0;
  const take = async (tenant: string, agentId: string) => {
    await limits.take(tenant, agentId, true, signal);
    placed++;
  };
  const all = [];
  for (let at = 0; at < AGENTS; at++) {
    all.push(take("hostile", `agt_${at}`));
    // As many as arrive together.
    if (at % 64 === 0) await new Promise(setImmediate);
  }
  await take("neighbour", "agt_neighbour");
  // Those of two questions, of which the first was under way.
  expect(placed).toBeLessThanOrEqual(AGENTS / 2);
  await Promise.all(all);
  stop();
  await places.stop();
  await store.close();
  expect(pauses.filter((ms) => ms > COMPUTED_MS_MAX)).toEqual([]);
}, 30_000);
