// However many settlements others have at work, an account that comes finds a place for its first one.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { account, ending, request, settling } from "../support/chain/settling.ts";
import { type Place, places } from "../support/stores/stores.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const AT_WORK = 2_000;
const OTHERS = 20;

let place: Place;
beforeAll(async () => {
  place = await places.sqlite();
});
afterAll(() => place.remove());

test("of one account that floods and twenty that want some settlements too, each of the twenty gets a place", async () => {
  const store = await place.open();
  const facilitator = settling(store, { inFlightMax: AT_WORK });
  const release = Promise.withResolvers<void>();
  // Nodes that are slow.
  facilitator.turns.readiness = async () => {
    await release.promise;
    return { ready: false, reason: "rpc unreachable" };
  };
  const pattern = await request();
  const numbered = (n: number) => ({
    ...pattern,
    payment: {
      ...pattern.payment,
      authorization: {
        ...pattern.payment.authorization,
        nonce: `0x${n.toString(16).padStart(64, "0")}` as const,
      },
    },
  });
  let n = 0;
  const answers: Promise<string>[] = [];
  const taken = new Map<string, number>();
  async function flood(name: string, most: number) {
    let refused = 0;
    const wanted = Array.from({ length: most }, async () => {
      const answer = ending(facilitator.settle(account(name), numbered(++n)));
      answers.push(answer);
      if ((await Promise.race([answer, Bun.sleep(700).then(() => "at work")])) !== "at work") refused++;
    });
    await Promise.all(wanted);
    taken.set(name, most - refused);
  }
  await flood("flooder", AT_WORK);
  for (let other = 0; other < OTHERS; other++) await flood(`other ${other}`, 150);
  release.resolve();
  await Promise.all(answers);
  expect([...taken].filter(([, count]) => count === 0).map(([name]) => name)).toEqual([]);
  await store.close();
}, 120_000);
