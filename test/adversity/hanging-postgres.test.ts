// A Postgres that hangs for seconds, answers for a moment, and hangs again: no single question takes too long, and together
// they would. Every caller is told within ten seconds what happened, or 503; a call that was refused is not made, and what
// was paid is served.
import { expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import { PRICING, pay } from "../contract/priced.ts";
import { collected } from "../support/chain/facilitator-stand-in.ts";
import type { Answer, PayingTenant } from "../support/chain/paying.ts";
import { openReplicas, type Replicas } from "../support/gateway/replicas.ts";
import { type Relay, startRelay } from "../support/http/relay.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { holdTable } from "../support/stores/database-faults.ts";
import { agentsIn } from "../support/stores/many-agents.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { until } from "../support/until.ts";

/** Much is asked at once, and what was refused is asked for again. */
setDefaultTimeout(180_000);

/** Ten seconds are promised; a busy machine has one more. */
const ANSWERED_MS_MAX = 11_000;
/** What replicas wait for a settlement. */
const SETTLE_WAIT_MS = 2_000;
const HANG_MS = 4_000;
/** Enough for a few questions, for one, for many. */
const ANSWER_MS = [30, 200, 10, 60];

/** Gives what lets it answer for good. */
function comeAndGo(relay: Relay): () => Promise<void> {
  let isOver = false;
  const going = (async () => {
    for (let n = 0; !isOver; n++) {
      const goOn = relay.hold();
      await Bun.sleep(HANG_MS);
      goOn();
      await Bun.sleep(ANSWER_MS[n % ANSWER_MS.length] as number);
    }
  })();
  return () => {
    isOver = true;
    return going;
  };
}

interface Told {
  readonly kind: string;
  readonly answer: Answer;
  readonly ms: number;
}

async function timed(kind: string, ask: () => Promise<Answer>): Promise<Told> {
  const began = performance.now();
  const answer = await ask();
  return { kind, answer, ms: performance.now() - began };
}

const GOOD = [200, 201, 202, 204];

/** Those that were told neither what happened nor to come back, or were told too late. */
const badlyTold = (all: readonly Told[]) =>
  all
    .filter(({ kind, answer: { status, headers }, ms }) => {
      const isForLater = status === 503 && Number(headers.get("retry-after")) > 0;
      if (!GOOD.includes(status) && !isForLater) return true;
      // What was paid is served however long the database takes, and a wait for a settlement comes on top.
      if (kind.startsWith("paid")) return status !== 200 && ms > ANSWERED_MS_MAX + SETTLE_WAIT_MS;
      return ms > ANSWERED_MS_MAX;
    })
    .map(({ kind, answer, ms }) => `${kind}: ${answer.status} after ${Math.round(ms)} ms, ${answer.text.slice(0, 80)}`);

interface Opened {
  readonly suffix?: "" | "/stream";
  readonly headers?: Readonly<Record<string, string>>;
  readonly pricing?: object;
  readonly credential_ref?: string;
}

interface Call {
  readonly name: string;
  readonly id: string;
  send(): Promise<Answer>;
}

/** Sends a call again until it is not refused; gives what became of it. */
async function outcomeOf(tenant: PayingTenant, { id, send }: Call, first: Answer): Promise<string> {
  for (let answer = first; ; answer = await send()) {
    if (answer.status === 202) return (await tenant.poll(id, invocationOf(answer))).status;
    if (answer.status !== 503) return answer.status === 200 ? "succeeded" : `${answer.status} ${answer.text}`;
    await Bun.sleep(1_000);
  }
}

const SECRET = { auth_type: "bearer", source: "managed", plaintext: "upstream-secret-0001" };

/** Everything that a tenant may ask beside calls, by its kind. */
function othersOf({ send }: PayingTenant, { ended, pending }: { ended: string; pending: string }, of: string) {
  const asks: [kind: string, method: string, path: string, json?: object][] = [
    ["poll", "GET", ended],
    ["cancel", "POST", `${pending}/cancel`],
    ["history", "GET", "/v1/invocations?status=succeeded&mode=transactional"],
    ["list agents", "GET", "/v1/agents?limit=4"],
    ["get an agent", "GET", `/v1/agents/${ended.split("/")[3]}`],
    ["create an agent", "POST", "/v1/agents", { name: `made ${of}` }],
    ["change an agent", "PATCH", `/v1/agents/${ended.split("/")[3]}`, { description: of }],
    ["put a policy", "PUT", "/v1/policy", { default: "allow", on_error: "allow", rules: [] }],
    ["get the policy", "GET", "/v1/policy"],
    ["create a credential", "POST", "/v1/credentials", { name: `made ${of}`, ...SECRET }],
    ["list credentials", "GET", "/v1/credentials"],
    ["get the settlement config", "GET", "/v1/settlement/config"],
    ["change the settlement config", "PATCH", "/v1/settlement/config", {}],
    ["list receipts", "GET", "/v1/receipts"],
    ...Array.from({ length: 6 }, (): [string, string, string] => ["search", "GET", "/v1/agents?q=needle&limit=4"]),
  ];
  return asks.map(([kind, method, path, json]) => timed(`${kind}, ${of}`, () => send(method, path, json)));
}

/** What stands beside the busy tenant. The list is short enough to be sent whole; a long one is made as it is read. */
const ofNeighbour = ({ send }: PayingTenant, of: string) =>
  ["/v1/agents?limit=4", "/v1/agents?q=needle", "/v1/credentials", "/v1/invocations?status=failed&mode=streaming"].map(
    (path) => timed(`a neighbour's ${path}, ${of}`, () => send("GET", path)),
  );

interface Stage {
  readonly replicas: Replicas;
  readonly tenant: PayingTenant;
  readonly upstream: Upstream;
}

/** Calls, each of an agent of its own; its upstream knows it by its name. */
function callsAt({ replicas, tenant, upstream }: Stage) {
  async function open(name: string, { suffix = "", headers = {}, ...fields }: Opened = {}): Promise<Call> {
    const id = await tenant.agent({ upstream_url: `${upstream.url}${name}`, ...fields });
    return { name, id, send: () => tenant.send("POST", `/v1/proxy/${id}${suffix}`, { n: 1 }, headers) };
  }

  /** Its payment is collected, and its caller has not come back yet. */
  async function openSettled(name: string, more: Opened = {}): Promise<Call> {
    const { headers, authorization } = await pay();
    const call = await open(name, { ...more, suffix: "/stream", pricing: PRICING, headers });
    replicas.facilitator.answer(authorization.nonce, () => new Response("away", { status: 500 }));
    const path = `/v1/invocations/${invocationOf(await call.send())}`;
    replicas.facilitator.answer(authorization.nonce, collected);
    await until(async () => (await tenant.send("GET", path)).body.settlement.status === "settled");
    return call;
  }

  return {
    open,
    openSettled,
    callsOf: async (of: string) => {
      const [polled, streamed] = [await pay(), await pay()];
      return {
        once: [await open(`accept-${of}`), await open(`stream-${of}`, { suffix: "/stream" })],
        again: [
          await openSettled(`settled-stream-${of}`),
          await open(`keyed-${of}`, { headers: { "idempotency-key": of } }),
          await open(`paid-${of}`, { pricing: PRICING, headers: polled.headers }),
          await open(`paid-stream-${of}`, { suffix: "/stream", pricing: PRICING, headers: streamed.headers }),
        ],
      };
    },
  };
}

test("behind a Postgres that comes and goes all are answered in time, no call is made that was refused, and paid ones are served", async () => {
  await using replicas = await openReplicas();
  const url = new URL(replicas.databaseUrl);
  const relay = startRelay(Number(url.port));
  url.port = `${relay.port}`;
  const made: string[] = [];
  const held = Promise.withResolvers<void>();
  const upstream = startUpstream(async (request) => {
    const name = new URL(request.url).pathname.slice(1);
    if (name === "held") await held.promise;
    else made.push(name);
    return Response.json({ hello: "world" });
  });
  try {
    const gateway = await replicas.start({ env: { DATABASE_URL: url.href, TOLLGATE_AGENT_CONCURRENCY: "4" } });
    const [tenant, neighbour] = [await replicas.tenant(gateway), await replicas.tenant(gateway)];
    await using client = new SQL(replicas.databaseUrl, { max: 1 });
    for (const statement of agentsIn(neighbour.name, 2_000)) await client.unsafe(statement);
    const { open, callsOf } = callsAt({ replicas, tenant, upstream });
    const rounds = ["first", "second", "third"];
    const calls = await Promise.all(rounds.map(callsOf));
    const [quiet, slow] = [await open("quiet"), await open("held")];
    const pathOf = async (call: Call) => `/v1/proxy/${call.id}/invocations/${invocationOf(await call.send())}`;
    const ended = await pathOf(quiet);
    await tenant.poll(quiet.id, ended.split("/").at(-1) as string);
    const pendings = await Promise.all(rounds.map(() => pathOf(slow)));

    const stop = comeAndGo(relay);
    const told: Promise<Told>[] = [];
    for (const [at, of] of rounds.entries()) {
      const { once, again } = calls[at] as (typeof calls)[number];
      told.push(
        ...othersOf(tenant, { ended, pending: pendings[at] as string }, of),
        ...ofNeighbour(neighbour, of),
        ...[...once, ...again].map(({ name, send }) => timed(name, send)),
      );
      await Bun.sleep(HANG_MS * 0.7);
    }
    const all = await Promise.all(told);
    await stop();
    expect(badlyTold(all)).toEqual([]);

    const answerOf = new Map(all.map(({ kind, answer }) => [kind, answer]));
    const again = calls.flatMap((each) => each.again);
    const outcomes = again.map((call) => outcomeOf(tenant, call, answerOf.get(call.name) as Answer));
    expect(await Promise.all(outcomes)).toEqual(again.map(() => "succeeded"));
    const once = calls.flatMap((each) => each.once).filter(({ name }) => answerOf.get(name)?.status !== 503);
    // Nothing else is left that could be made.
    held.resolve();
    const left = async () => (await tenant.send("GET", "/v1/invocations?status=running")).body.total;
    await until(async () => (await left()) === 0);
    expect(made.sort()).toEqual(["quiet", ...[...again, ...once].map(({ name }) => name)].sort());
  } finally {
    held.resolve();
    await upstream.stop();
    relay.stop();
  }
});

test("a streamed call whose credential can't be read is refused in time, and one that is paid for waits for it", async () => {
  await using replicas = await openReplicas();
  const gateway = await replicas.start();
  const made: string[] = [];
  const upstream = startUpstream((request) => {
    made.push(new URL(request.url).pathname.slice(1));
    return Response.json({ hello: "world" });
  });
  try {
    const tenant = await replicas.tenant(gateway);
    const { open, openSettled } = callsAt({ replicas, tenant, upstream });
    const { body } = await tenant.send("POST", "/v1/credentials", { name: "upstream", ...SECRET });
    const free = await open("free", { suffix: "/stream", credential_ref: body.id });
    const paid = await openSettled("paid", { credential_ref: body.id });
    const release = await holdTable(replicas.databaseUrl, "credentials");
    const serving = paid.send();
    const refused = await timed("free", free.send);
    await release();
    expect(badlyTold([refused])).toEqual([]);
    expect([refused.answer.status, (await serving).status]).toEqual([503, 200]);
    const record = await tenant.send("GET", `/v1/invocations/${invocationOf(refused.answer)}`);
    expect(record.body).toMatchObject({ status: "failed", error_class: "credential_error" });
    expect(made).toEqual(["paid"]);
  } finally {
    await upstream.stop();
  }
});
