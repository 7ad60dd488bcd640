// A short run of chaos. `bun test/chaos/main.ts` makes longer ones, and repeats this one by its seed.
import { expect, setDefaultTimeout, test } from "bun:test";
import { runChaos } from "./run.ts";

/** Of load; starting everything and waiting until all is quiet come on top. */
const SECONDS = 10;
const SEED = 8;

setDefaultTimeout(240_000);

test(`callers, upstreams, the chain and the history agree after ${SECONDS} s of kills, pauses, skewed clocks and a failover (seed ${SEED})`, async () => {
  const told: string[] = [];
  const { problems } = await runChaos({
    seconds: SECONDS,
    seed: SEED,
    checksRates: true,
    say: (line) => void told.push(line),
  });
  expect({ problems, ...(problems.length > 0 && { told }) }).toEqual({ problems: [] });
});
