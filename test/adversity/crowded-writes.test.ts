// A tenant that asks for the same write a thousand times at once, on Postgres, where what is no command has one of few
// connections: what a neighbour writes waits for few of these, and so does what the replica itself has to write.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { Agent, request } from "node:http";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { newMasterKey } from "../support/keys.ts";
import { startPostgres } from "../support/stores/postgres.ts";

const AT_ONCE = 1_000;
/** So many have been answered when the neighbour comes. */
const BEGUN = 20;
/** The neighbour's write is one of the next. */
const BEFORE_MAX = AT_ONCE / 4;
const POLICY = JSON.stringify({ default: "deny", on_error: "deny", rules: [] });

async function tenantOf(gateway: Gateway, tenant: string) {
  const authorization = `Bearer ${await gateway.token({ tenant, user: "u" })}`;
  const headers = { authorization, "content-type": "application/json" };
  const agent = new Agent({ maxSockets: Number.POSITIVE_INFINITY });
  return (method: string, path: string, body = "") => {
    const { promise, resolve, reject } = Promise.withResolvers<{ status: number; text: string }>();
    const sent = request(`${gateway.url}${path}`, { method, agent, headers }, async (answer) => {
      const text = (await Array.fromAsync(answer)).join("");
      resolve({ status: answer.statusCode ?? 0, text });
    });
    sent.on("error", reject).end(body);
    return promise;
  };
}

type Send = Awaited<ReturnType<typeof tenantOf>>;

async function newAgent(send: Send): Promise<string> {
  const upstream_url = "https://example.com/";
  const { text } = await send("POST", "/v1/agents", JSON.stringify({ name: crypto.randomUUID(), upstream_url }));
  return JSON.parse(text).id;
}

/** What is answered to the neighbour, which comes when the others have begun to be answered, and to how many before. */
async function amidst(act: () => ReturnType<Send>, own: () => ReturnType<Send>) {
  let answered = 0;
  const statuses = new Set<number>();
  const begun = Promise.withResolvers<void>();
  const acts = Array.from({ length: AT_ONCE }, async () => {
    statuses.add((await act()).status);
    answered++;
    if (answered === BEGUN) begun.resolve();
  });
  await begun.promise;
  const { status } = await own();
  const waited = answered - BEGUN;
  await Promise.all(acts);
  return { status, waited, others: [...statuses] };
}

/** What the hostile tenant does each time, and what that is answered. */
interface Attack {
  readonly name: string;
  readonly status: number;
  prepare(send: Send): Promise<() => ReturnType<Send>>;
}

const ATTACKS: readonly Attack[] = [
  {
    name: "puts its policy",
    status: 200,
    prepare: async (send) => () => send("PUT", "/v1/policy", POLICY),
  },
  {
    name: "makes calls that its policy denies",
    status: 403,
    async prepare(send) {
      const id = await newAgent(send);
      await send("PUT", "/v1/policy", POLICY);
      return () => send("POST", `/v1/proxy/${id}`, "{}");
    },
  },
  {
    name: "sets where it settles",
    status: 400,
    prepare: async (send) => () =>
      send("PATCH", "/v1/settlement/config", JSON.stringify({ facilitator_url: "https://example.com" })),
  },
];

let gateway: Gateway;
beforeAll(async () => {
  const databaseUrl = await (await startPostgres()).freshDatabase();
  gateway = await startGateway({ env: { DATABASE_URL: databaseUrl, TOLLGATE_MASTER_KEY: newMasterKey() } });
});
afterAll(() => gateway?.[Symbol.asyncDispose]());

test.each(ATTACKS)(
  "while a tenant $name a thousand times, its neighbour's write is one of the next",
  async (attack) => {
    const [hostile, neighbour] = [await tenantOf(gateway, attack.name), await tenantOf(gateway, "neighbour")];
    const act = await attack.prepare(hostile);
    const put = () => neighbour("PUT", "/v1/policy", POLICY);
    await put();
    const { status, waited, others } = await amidst(act, put);
    expect([status, others]).toEqual([200, [attack.status]]);
    expect(waited).toBeLessThan(BEFORE_MAX);
  },
);
