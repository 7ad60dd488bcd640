// Everything that a run of chaos needs: a Postgres pair, the chain, two facilitators and two gateways with clocks that can
// be set, and what is done to each of them.

import { startChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { type SteppedClock, steppedClock } from "../support/gateway/stepped-clock.ts";
import { startRelay } from "../support/http/relay.ts";
import { newMasterKey } from "../support/keys.ts";
import { startCountingUpstream } from "../support/load/upstream.ts";
import { startPostgresPair } from "../support/stores/postgres-pair.ts";
import type { Fault, ServiceName } from "./plan.ts";

const START_AGAIN_MS = 500;
const STARTED_MS_MAX = 60_000;

interface Actor {
  readonly service: Gateway | Facilitator;
  readonly clock: SteppedClock;
}

export type Stage = Awaited<ReturnType<typeof startStage>>;

export async function startStage() {
  await using stack = new AsyncDisposableStack();
  const pair = stack.use(await startPostgresPair());
  const chain = await startChain();
  stack.defer(() => chain.stop());
  const upstream = startCountingUpstream();
  stack.defer(() => upstream.stop());
  const clocks = Array.from({ length: 4 }, () => steppedClock()) as [
    SteppedClock,
    SteppedClock,
    SteppedClock,
    SteppedClock,
  ];
  const [{ program: first }, { program: second }, { program: third }, { program: fourth }] = clocks;

  const settling = { DATABASE_URL: await pair.freshDatabase() };
  const facilitator = stack.use(await startFacilitator(chain, { env: settling, program: third }));
  const facilitators = [
    facilitator,
    stack.use(await startFacilitator(chain, { beside: facilitator, program: fourth })),
  ];
  /** What tenants know as their facilitator, as an operator's load balancer before both. */
  const door = startRelay(Number(new URL(facilitator.url).port));
  stack.defer(() => door.stop());

  const DATABASE_URL = await pair.freshDatabase();
  const env = {
    DATABASE_URL,
    TOLLGATE_LISTEN_URL: DATABASE_URL,
    TOLLGATE_MASTER_KEY: newMasterKey(),
    TOLLGATE_SETTLE_WAIT_MS: "4000",
    TOLLGATE_DRAIN_MS: "3000",
  };
  const gateways = [
    stack.use(await startGateway({ env, program: first })),
    stack.use(await startGateway({ env, program: second })),
  ];
  const actors = Object.fromEntries(
    [...gateways, ...facilitators].map((service, i): [string, Actor] => [
      `${i < 2 ? "gateway" : "facilitator"} ${(i % 2) + 1}`,
      { service, clock: clocks[i]! },
    ]),
  ) as Record<ServiceName, Actor>;
  const owned = stack.move();
  return {
    pair,
    chain,
    upstream,
    door,
    gateways,
    facilitators,
    actors,
    logs: () => Object.entries(actors).map(([name, { service }]) => [name, service.log()] as const),
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}

/** As a process manager does it: while the database is away a service ends at its start, and is started again. */
async function startAgain(service: Gateway | Facilitator): Promise<void> {
  const until = performance.now() + STARTED_MS_MAX;
  for (;;) {
    try {
      return await service.restart();
    } catch (error) {
      if (performance.now() > until) throw error;
    }
    await Bun.sleep(START_AGAIN_MS);
  }
}

/** Resolves when the service is there again. */
export async function suffer(name: ServiceName, fault: Fault, { actors, door, facilitators }: Stage): Promise<void> {
  const { service, clock } = actors[name];
  const isAway = fault.kind !== "skew";
  const other = facilitators.find((each) => each !== service);
  if (isAway && name.startsWith("facilitator") && other !== undefined) {
    door.leadTo(Number(new URL(other.url).port));
    // A load balancer finds out a moment later.
    setTimeout(door.cut, START_AGAIN_MS);
  }
  switch (fault.kind) {
    case "kill":
      await service.kill9();
      await Bun.sleep(fault.ms);
      return startAgain(service);
    case "restart":
      // In the middle of a failover it may not end well; it ends all the same.
      await service.stop().catch(() => {});
      return startAgain(service);
    case "suspend":
      process.kill(service.pid, "SIGSTOP");
      await Bun.sleep(fault.ms);
      process.kill(service.pid, "SIGCONT");
      return;
    case "skew":
      clock.set(fault.ms);
  }
}
