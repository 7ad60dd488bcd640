// The size of the queue, on every kind of store.
import { expect, test } from "bun:test";
import { accepted } from "../../../test/support/stores/invocations.ts";
import { eachStore, useStore } from "../../../test/support/stores/one-store.ts";
import type { Store } from "../../storage/store.ts";
import { queueSize } from "./commands/queue.ts";
import { accept, claim, endOpen, type InvocationRow } from "./service.ts";

eachStore((makePlace) => {
  let store: Store;
  useStore(makePlace, (opened) => {
    ({ store } = opened);
  });

  test("only calls that a replica may make are counted, whoever accepted them, and the oldest is found among all agents", async () => {
    expect(await queueSize(store)).toEqual({ calls: 0, oldestMs: 0 });
    const now = store.clock.now();
    const put = async (age: number, fields: Partial<InvocationRow> = {}) => {
      const call = accepted(now - age, fields);
      await accept(store, call);
      return call.row;
    };
    const agents = [3, 1, 2].map((at) => `agt_0000000${at}`);
    for (const [at, agent_id] of agents.entries()) {
      for (let call = 0; call < 5; call++)
        await put(60_000 * (call + 1) + at, { agent_id, accepted_by: `rep_${call}` });
    }
    await put(900_000, { mode: "streaming" });
    await put(900_000, { settlement_status: "pending" });
    const ended = await put(900_000);
    await endOpen(store, ended, "cancelled", now);
    const running = await put(900_000);
    await claim(store, { key: running, owner: "rep_1", token: "one", now });
    // Steps of every length, so that each ends once at the end of an agent, and once within.
    for (const atOnce of [1, 2, 3, 5, 7, 15, 16, 100]) {
      const { calls, oldestMs } = await queueSize(store, atOnce);
      expect([atOnce, calls]).toEqual([atOnce, 15]);
      expect(oldestMs).toBeGreaterThanOrEqual(300_002);
      expect(oldestMs).toBeLessThan(330_000);
    }
  });
});
