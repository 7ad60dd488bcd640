import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eq } from "drizzle-orm";
import { BASE } from "../../../test/support/network.ts";
import { AGENT } from "../../../test/support/stores/invocable-agent.ts";
import { Fault } from "../../core/fault.ts";
import { silentLog } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import { routes } from "../../http/elysia.ts";
import { createEdge } from "../../http/server.ts";
import { createInFlight } from "../../kernel/wait.ts";
import { openStore } from "../../storage/open.ts";
import { CommitUnknown, type Store } from "../../storage/store.ts";
import type { InvocableAgent } from "../agents/store.ts";
import { type CompletionWaiters, createCompletionWaiters, readHistory } from "../invocations/history.ts";
import { createLostCommits } from "../invocations/lost-commits.ts";
import { claim } from "../invocations/service.ts";
import type { Payments } from "../payment/service.ts";
import { createPolicyService } from "../policy/service.ts";
import { type ProxyRoutesOptions, proxyRoutes } from "./routes.ts";

const clock = { now: () => 1_790_000_000_000 };

let dir: string;
let real: Store;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), "tollgate-admit-"));
  real = await openStore({ databaseUrl: null, dataDir: dir, log: silentLog, clock });
});
afterEach(async () => {
  await real.close();
  rmSync(dir, { recursive: true, force: true });
});

/** Of agents that cost nothing. */
const payments: Payments = {
  check: async () => ({ kind: "free" }),
  presentedIn: async () => null,
  usedFor: async () => null,
  paymentRow() {
    throw new Error("there is no payment");
  },
  settle: async () => ({}),
  recall: async () => ({}),
  cancelled: async () => {},
};

const noPolicy: ProxyRoutesOptions["policy"] = {
  readAhead() {},
  decideNow: () => undefined,
  decide: async () => [],
  recordNow: () => true,
  record: async () => {},
};

async function call(
  store: Store,
  completionWaiters: CompletionWaiters,
  headers: Record<string, string> = {},
  {
    findAgent = async () => AGENT,
    ...changed
  }: Partial<Pick<ProxyRoutesOptions, "policy">> & { readonly findAgent?: () => Promise<InvocableAgent> } = {},
) {
  const offered: string[] = [];
  const app = routes().use(
    proxyRoutes({
      network: BASE,
      store,
      clock,
      time: { earliest: clock.now, latest: clock.now },
      log: silentLog,
      meters: silentMeters,
      replica: "rep_1",
      refusals: createLostCommits({ store, clock, log: silentLog }),
      completionWaiters,
      admitting: createInFlight(),
      payments,
      policy: noPolicy,
      agents: { cached: () => undefined, find: findAgent },
      rates: { takeNow: () => null, take: async () => null },
      pseudonym: "tollgate-1",
      queue: { reserve: () => null, offer: (_tenant, _agentId, id = "") => void offered.push(id) },
      stop() {},
      ...changed,
    }),
  );
  const caller = { tenant: "acme", user: "alice", scopes: new Set<string>() };
  const edge = createEdge({ app, log: silentLog, authenticate: () => caller });
  const request = new Request(`http://localhost/v1/proxy/${AGENT.id}`, {
    method: "POST",
    body: JSON.stringify({ jsonrpc: "2.0", id: 1, method: "ping" }),
    headers,
  });
  return { response: await edge.fetch(request), offered };
}

const lost = () => new Fault("unavailable", "the store cannot take a write now", { retryAfterSeconds: 5 });

/** Stores the first call, and says that nobody knows. */
function answeringOnce(store: Store): Store {
  let commands = 0;
  return {
    ...store,
    async execute(command, input) {
      const output = await store.execute(command, input);
      if (command.kind !== "look_up" && ++commands === 1) throw new CommitUnknown(new Error("connection lost"));
      return output;
    },
  };
}

/** The first call is stored only when the test says so, long after nobody knew. */
function committingLate(store: Store): { readonly store: Store; commit(): Promise<unknown> } {
  let late = () => Promise.resolve<unknown>(null);
  let commands = 0;
  return {
    commit: () => late(),
    store: {
      ...store,
      execute(command, input) {
        if (command.kind === "look_up" || ++commands > 1) return store.execute(command, input);
        late = () => store.execute(command, input);
        return Promise.reject(new CommitUnknown(new Error("late")));
      },
    },
  };
}

const allCalls = async () => {
  const { db, tables } = real.read;
  return db.select({ id: tables.invocations.id, status: tables.invocations.status }).from(tables.invocations);
};

test("a call whose record appears after it was refused is never made, and leaves nothing", async () => {
  const { store, commit } = committingLate(real);
  const key = { "idempotency-key": "k" };
  const { response, offered } = await call(
    store,
    createCompletionWaiters(async () => []),
    key,
  );
  expect([response.status, offered]).toEqual([503, []]);
  await commit();
  const [late] = await allCalls();
  expect(late?.status).toBe("pending");
  const taking = { owner: "r", token: "t", now: clock.now() };
  const lateKey = { tenant: "acme", id: late?.id ?? "" };
  expect(await claim(real, { ...taking, key: lateKey })).toBeNull();
  // Its caller tries again before anything else has found it.
  const again = await call(
    real,
    createCompletionWaiters(async () => []),
    key,
  );
  expect([again.response.status, again.offered.length]).toEqual([202, 1]);
  const { invocation_id } = (await again.response.json()) as { invocation_id: string };
  expect(await allCalls()).toEqual([{ id: invocation_id, status: "pending" }]);
  const total = await readHistory(real.read, "acme", new URLSearchParams());
  expect(total.total).toBe(1);
});

test("a record that appears after its call was refused is removed when it is looked for, unless it was claimed before", async () => {
  const refusals = createLostCommits({ store: real, clock, log: silentLog });
  const late = committingLate(real);
  await call(
    late.store,
    createCompletionWaiters(async () => []),
  );
  await late.commit();
  const made = committingLate(real);
  await call(
    made.store,
    createCompletionWaiters(async () => []),
  );
  await made.commit();
  const [, { id } = { id: "" }] = await allCalls();
  // As if it had been claimed before the note was there.
  await real.write(({ db, tables: { openInvocations: t } }) =>
    db.update(t).set({ status: "running", owner: "r", claim: "t" }).where(eq(t.id, id)),
  );
  expect(await refusals.removeAppeared()).toBe(2);
  expect(await allCalls()).toEqual([{ id, status: "running" }]);
  expect(await refusals.removeAppeared()).toBe(0);
});

test("a call that was stored without an answer of the store is a 202, and is made", async () => {
  const { response, offered } = await call(
    answeringOnce(real),
    createCompletionWaiters(async () => []),
  );
  expect(response.status).toBe(202);
  const { invocation_id } = (await response.json()) as { invocation_id: string };
  expect(offered).toEqual([invocation_id]);
});

test("a call that was not stored is a 503, and nothing is sent", async () => {
  const store: Store = {
    ...real,
    execute: (command, input) => (command.kind === "look_up" ? real.execute(command, input) : Promise.reject(lost())),
  };
  const { response, offered } = await call(
    store,
    createCompletionWaiters(async () => []),
  );
  expect([response.status, response.headers.get("retry-after")]).toEqual([503, "5"]);
  expect(offered).toEqual([]);
});

test("a wait that fails takes back nothing of an accepted call", async () => {
  const completionWaiters = {
    ...createCompletionWaiters(async () => []),
    wait: () => Promise.reject(lost()),
  };
  const { response } = await call(real, completionWaiters, { prefer: "wait=5" });
  expect(response.status).toBe(202);
  expect(response.headers.get("x-service-invocation-id")).toStartWith("inv_");
});

test("a caller who was away waits for its agent and its policy together", async () => {
  const order: string[] = [];
  const execute: Store["execute"] = (command, input) => {
    order.push(`${command.name} asked for`);
    return real.execute(command, input);
  };
  const policy = createPolicyService({ store: { ...real, execute }, clock, log: silentLog });
  const findAgent = async () => {
    await new Promise(setImmediate);
    order.push("agent found");
    return AGENT;
  };
  const waiters = createCompletionWaiters(async () => []);
  const { response } = await call(real, waiters, {}, { findAgent, policy });
  expect([response.status, ...order.slice(0, 2)]).toEqual([202, "policy asked for", "agent found"]);
  // Once for all that ask.
  expect(order.filter((each) => each === "policy asked for")).toHaveLength(1);
});

describe("an agent that changes while its call is judged", () => {
  /** @param goesOn whether it changes at each look from then on */
  const judgedWith = async (next: () => typeof AGENT, goesOn = false) => {
    let agent = goesOn ? next() : AGENT;
    let judged = 0;
    const policy = {
      ...noPolicy,
      async decide() {
        judged++;
        agent = next();
        return [];
      },
    };
    const findAgent = async () => {
      if (goesOn && judged > 0) agent = next();
      return agent;
    };
    const { response, offered } = await call(
      real,
      createCompletionWaiters(async () => []),
      {},
      { findAgent, policy },
    );
    return { status: response.status, offered: offered.length, judged };
  };

  test("is called as it is now, or not at all", async () => {
    const suspended = { ...AGENT, suspended: true };
    expect(await judgedWith(() => suspended)).toMatchObject({ status: 422, offered: 0 });
    const moved = { ...AGENT, upstream_url: "https://moved.example.com/" };
    // The policy judges what is called, so the call is counted once.
    expect(await judgedWith(() => moved)).toEqual({ status: 202, offered: 1, judged: 1 });
    expect(await judgedWith(() => ({ ...AGENT }))).toEqual({ status: 202, offered: 1, judged: 1 });
  });

  test("puts its callers off when it goes on changing", async () => {
    let changes = 0;
    // Its body is read again whenever the agent has changed.
    const another = (): typeof AGENT => ({
      ...AGENT,
      protocol: "mcp",
      upstream_url: `https://example.com/${++changes}`,
    });
    expect(await judgedWith(another, true)).toMatchObject({ status: 503, offered: 0 });
  });
});
