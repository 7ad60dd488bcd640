// One run: load, faults by the plan, one failover, and then quiet, in which everything is compared with what callers and
// upstreams have seen and what moved on the chain.
import { createCallers } from "../support/load/callers.ts";
import { openLoadedTenant, startLoad } from "../support/load/tenant.ts";
import { disagreements, quietRecords, rateExceeded } from "../support/load/verify.ts";
import { planOf, SERVICES, type Step } from "./plan.ts";
import { type Stage, startStage, suffer } from "./stage.ts";

const LIMIT = { rate: 5, burst: 5 };
const LIMITED_PAUSE_MS = 40;

export interface ChaosOptions {
  readonly seconds: number;
  readonly seed: number;
  /** Whether rate limits have to hold across replicas. */
  readonly checksRates: boolean;
  say(line: string): void;
}

export interface Outcome {
  /** Empty when everything agrees. */
  readonly problems: readonly string[];
  readonly figures: Readonly<Record<string, number>>;
  /** What each service has logged. */
  readonly logs: readonly (readonly [string, string])[];
}

export async function runChaos({ seconds, seed, checksRates, say }: ChaosOptions): Promise<Outcome> {
  const plan = planOf(seed, seconds);
  await using stage = await startStage();
  const { gateways, facilitators, door, upstream, chain, pair } = stage;
  const [facilitator] = facilitators;
  const client = { url: `https://127.0.0.1:${door.port}`, client: facilitator!.client };
  const tenant = await openLoadedTenant({ gateway: gateways[0]!, facilitator: client, upstream, chain });
  const limited = await tenant.agent({ upstream_url: upstream.url });
  await tenant.send("PATCH", `/v1/agents/${limited}`, {
    invocation_rate_limit: LIMIT.rate,
    invocation_burst: LIMIT.burst,
  });
  const callers = createCallers({ gateways, headers: tenant.headers });
  startLoad(callers, tenant);
  callers.keepSending(() => ({ kind: "limited", agent: limited }), LIMITED_PAUSE_MS);

  const startedAt = performance.now();
  const since = () => performance.now() - startedAt;
  const tell = (what: string) => say(`${(since() / 1000).toFixed(1)} s: ${what}`);
  const failOver = async () => {
    await Bun.sleep(plan.failOverAt);
    tell("the primary is killed");
    await pair.failOver();
    tell("the standby is the primary");
  };
  await Promise.all([failOver(), ...["gateway", "facilitator"].map((kind) => play(kind))]);

  async function play(kind: string): Promise<void> {
    for (const { at, who, fault } of plan.steps.filter((step: Step) => step.who.startsWith(kind))) {
      await Bun.sleep(Math.max(at - since(), 0));
      // On a busy machine what came before has taken longer.
      if (since() > seconds * 1_000) return;
      tell(`${who}: ${fault.kind}${"ms" in fault ? ` ${fault.ms} ms` : ""}`);
      await suffer(who, fault, stage);
    }
  }

  await Bun.sleep(Math.max(seconds * 1_000 - since(), 0));
  for (const name of SERVICES) stage.actors[name].clock.set(0);
  tell("no more faults");
  await callers.stop();
  const records = await quietRecords(tenant);
  tell("all is quiet");
  const { calls } = callers;
  const evidence = { calls, records, upstream, transfers: await chain.transfers() };
  return {
    problems: [
      ...disagreements(evidence, { gatewaysDied: true }),
      ...(checksRates
        ? rateExceeded(
            calls.filter(({ kind }) => kind === "limited"),
            LIMIT,
          )
        : []),
    ],
    figures: figuresOf(evidence, stage),
    logs: stage.logs(),
  };
}

function figuresOf({ calls, records, transfers }: Parameters<typeof disagreements>[0], { upstream }: Stage) {
  const all = [...records.values()];
  const count = (fits: (record: { status: string; error_class: string | null }) => boolean) => all.filter(fits).length;
  return {
    calls: calls.length,
    accepted: calls.filter(({ invocation }) => invocation !== null).length,
    records: all.length,
    succeeded: count(({ status }) => status === "succeeded"),
    ended_as_internal: count(({ error_class }) => error_class === "internal"),
    upstream_calls: upstream.visits.size,
    payments: calls.filter(({ nonce }) => nonce !== null).length,
    transfers: transfers.filter(({ nonce }) => nonce !== null).length,
    paid_and_ended_as_internal: all.filter((record) => record.settlement?.status === "settled_upstream_failed").length,
    refused_and_made: calls.filter(
      ({ n, invocation, statuses }) =>
        invocation === null && statuses.every((s) => s === 503) && upstream.of(n).length > 0,
    ).length,
  };
}
