import { expect, test } from "bun:test";
import { accepted } from "../../../test/support/invocations.ts";
import { clock, places } from "../../../test/support/stores.ts";
import { abandon, accept, claim } from "../invocations/service.ts";
import { stopOnce } from "./elsewhere.ts";

for (const [name, place] of Object.entries(places)) {
  test(`${name}: what runs here and was ended elsewhere is stopped, and nothing else`, async () => {
    const where = await place();
    const store = await where.open();
    const begin = (owner: string) => {
      const call = accepted(clock.now(), { mode: "streaming" });
      const key = { tenant: "acme", id: call.row.id };
      return store.write(async (tx) => {
        await accept(tx, call, clock.now());
        await claim(tx, { key, owner, now: clock.now(), inHand: null, again: false });
        return key;
      });
    };
    try {
      const [kept, cancelled, other] = [await begin("rep_1"), await begin("rep_1"), await begin("rep_2")];
      for (const key of [cancelled, other]) {
        await store.write((tx) => abandon(tx, key, "cancelled", clock.now()));
      }
      const stopped: string[] = [];
      const streams = {
        running: () => [kept.id, cancelled.id],
        stop: (id: string) => void stopped.push(id),
      };
      await stopOnce({ store, replica: "rep_1", streams });
      expect(stopped).toEqual([cancelled.id]);
    } finally {
      await store.close();
      where.remove();
    }
  }, 30_000);
}
