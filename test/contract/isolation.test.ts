// Tenants do not see each other: for every path with an ID another tenant gets, to the byte, what an unknown ID
// gets, and nothing of one tenant shows in what another reads.
import { describe, expect, test } from "bun:test";
import {
  contract,
  type Json,
  PUBLIC_URL,
  READ_BODY,
  type Sending,
  type Tenant,
  UNKNOWN_AGENT,
  UNKNOWN_CREDENTIAL,
  UNKNOWN_INVOCATION,
  visible,
} from "./contract.ts";

interface Owned {
  readonly owner: Tenant;
  readonly agent: string;
  readonly credential: string;
  readonly invocation: string;
}

type Ids = Pick<Owned, "agent" | "credential" | "invocation">;

const UNKNOWN: Ids = {
  agent: UNKNOWN_AGENT,
  credential: UNKNOWN_CREDENTIAL,
  invocation: UNKNOWN_INVOCATION,
};

/** Every request that names something by its ID. */
const REQUESTS: ReadonlyArray<readonly [string, (ids: Ids) => readonly [string, string, Sending]]> = [
  ["read an agent", ({ agent }) => ["GET", `/v1/agents/${agent}`, {}]],
  ["HEAD of an agent", ({ agent }) => ["HEAD", `/v1/agents/${agent}`, {}]],
  ["update an agent", ({ agent }) => ["PATCH", `/v1/agents/${agent}`, { json: { suspended: true } }]],
  ["update an agent wrongly", ({ agent }) => ["PATCH", `/v1/agents/${agent}`, { json: { protocol: "x" } }]],
  ["update to a bad combination", ({ agent }) => ["PATCH", `/v1/agents/${agent}`, { json: { protocol: "mcp" } }]],
  ["update to a taken name", ({ agent }) => ["PATCH", `/v1/agents/${agent}`, { json: { name: "foreign" } }]],
  ["delete an agent", ({ agent }) => ["DELETE", `/v1/agents/${agent}`, {}]],
  ["read a credential", ({ credential }) => ["GET", `/v1/credentials/${credential}`, {}]],
  ["rotate a credential", ({ credential }) => ["PUT", `/v1/credentials/${credential}`, { json: { plaintext: "x" } }]],
  ["rotate a reference", ({ credential }) => ["PUT", `/v1/credentials/${credential}`, { json: { vault_ref: "x" } }]],
  ["rotate wrongly", ({ credential }) => ["PUT", `/v1/credentials/${credential}`, { json: {} }]],
  ["delete a credential", ({ credential }) => ["DELETE", `/v1/credentials/${credential}`, {}]],
  [
    "name a credential in a new agent",
    ({ credential }) => ["POST", "/v1/agents", { json: { name: "n", credential_ref: credential } }],
  ],
  ["call an agent", ({ agent }) => ["POST", `/v1/proxy/${agent}`, { json: {} }]],
  [
    "call an agent with a bad model",
    ({ agent }) => ["POST", `/v1/proxy/${agent}`, { headers: { "x-service-model": "m".repeat(300) } }],
  ],
  [
    "call under the owner's idempotency key",
    ({ agent }) => ["POST", `/v1/proxy/${agent}`, { body: "a", headers: { "idempotency-key": "shared" } }],
  ],
  ["poll", ({ agent, invocation }) => ["GET", `/v1/proxy/${agent}/invocations/${invocation}`, {}]],
  [
    "poll, waiting",
    ({ agent, invocation }) => [
      "GET",
      `/v1/proxy/${agent}/invocations/${invocation}`,
      { headers: { prefer: "wait=2" } },
    ],
  ],
  ["cancel", ({ agent, invocation }) => ["POST", `/v1/proxy/${agent}/invocations/${invocation}/cancel`, {}]],
  ["read an invocation", ({ invocation }) => ["GET", `/v1/invocations/${invocation}`, { scope: READ_BODY }]],
  ["read a receipt", ({ invocation }) => ["GET", `/v1/invocations/${invocation}/receipt`, {}]],
  ["filter by agent", ({ agent }) => ["GET", `/v1/invocations?agent_id=${agent}`, {}]],
];

contract((at) => {
  async function owned(): Promise<Owned> {
    const owner = at.tenant();
    const credential = await owner.credential({ name: "foreign" });
    const { url: upstream_url } = at.upstream();
    const agent = await owner.agent({
      name: "foreign",
      upstream_url,
      credential_ref: credential.id,
      emit_receipts: true,
    });
    const headers = { "idempotency-key": "shared" };
    const invocation = await owner.call(agent.id, { body: "a", headers });
    await owner.ended(agent.id, invocation);
    return { owner, agent: agent.id, credential: credential.id, invocation };
  }

  test.each(REQUESTS)("another tenant's things are as unknown ones to whoever asks to %s", async (_, request) => {
    const things = await owned();
    const before = await snapshot(things);
    const stranger = at.tenant();
    // A stranger who has things of their own must not fare otherwise.
    await stranger.agent();
    const ask = async (ids: Ids) => visible(await stranger.send(...request(ids)));
    const [foreign, unknown] = [await ask(things), await ask(UNKNOWN)];
    expect(foreign).toEqual(unknown);
    expect(await snapshot(things)).toEqual(before);
  });

  test("another's agent with the stranger's invocation is unknown, and the other way round", async () => {
    const things = await owned();
    const stranger = await owned();
    const poll = async (agent: string, invocation: string) =>
      visible(await stranger.owner.send("GET", `/v1/proxy/${agent}/invocations/${invocation}`));
    const unknown = await poll(UNKNOWN_AGENT, UNKNOWN_INVOCATION);
    expect(await poll(things.agent, stranger.invocation)).toEqual(unknown);
    expect(await poll(stranger.agent, things.invocation)).toEqual(unknown);
  });

  test("a patch cannot name another's credential", async () => {
    const things = await owned();
    const stranger = at.tenant();
    const { id } = await stranger.agent();
    const patch = async (credential_ref: string) =>
      visible(await stranger.send("PATCH", `/v1/agents/${id}`, { json: { credential_ref } }));
    expect(await patch(things.credential)).toEqual(await patch(UNKNOWN_CREDENTIAL));
    expect(await patch(things.credential)).toMatchObject({ status: 400 });
  });

  test("every list of a new tenant is empty, whatever it is asked", async () => {
    const things = await owned();
    const stranger = at.tenant();
    for (const query of ["", "?q=foreign", "?status=active", "?limit=100"])
      expect((await stranger.send("GET", `/v1/agents${query}`)).body).toMatchObject({ data: [], total: 0 });
    expect((await stranger.send("GET", "/v1/credentials")).body).toEqual({ credentials: [] });
    expect((await stranger.send("GET", "/v1/receipts")).text).toBe("");
    for (const query of ["", `?agent_id=${things.agent}`, "?status=succeeded", "?mode=transactional", "?limit=100"])
      expect((await stranger.send("GET", `/v1/invocations${query}`)).body).toMatchObject({
        data: [],
        total: 0,
      });
  });

  test("names are free in every tenant, and the same one does not lead to another's", async () => {
    const [one, two] = [await owned(), await owned()];
    expect(one.agent).not.toBe(two.agent);
    expect((await two.owner.send("GET", "/v1/agents?q=foreign")).body.data.map((a: Json) => a.id)).toEqual([two.agent]);
  });

  test("one tenant's idempotency key is not another's", async () => {
    const [one, two] = [await owned(), await owned()];
    expect(one.invocation).not.toBe(two.invocation);
    const headers = { "idempotency-key": "shared" };
    expect(await two.owner.call(two.agent, { body: "a", headers })).toBe(two.invocation);
  });

  describe("within a tenant", () => {
    test("users share everything but idempotency keys", async () => {
      const { owner, agent, invocation } = await owned();
      expect((await owner.send("GET", `/v1/agents/${agent}`, { user: "bob" })).body.created_by).toBe("alice");
      const poll = `/v1/proxy/${agent}/invocations/${invocation}`;
      expect((await owner.send("GET", poll, { user: "bob" })).status).toBe(200);
    });

    test("a body is for the user who made the call, and only with the scope", async () => {
      const { owner, agent, invocation } = await owned();
      const poll = `/v1/proxy/${agent}/invocations/${invocation}`;
      const read = async (path: string, sending: Sending) => (await owner.send("GET", path, sending)).body;
      for (const headers of [{}, { prefer: "wait=5" }]) {
        const own = await read(poll, { headers });
        const { response_body_b64, ...rest } = own;
        expect(Buffer.from(response_body_b64, "base64").toString()).toBe('{"hello":"world"}');
        expect(await read(poll, { headers, user: "bob" })).toEqual(rest);
        expect(await read(poll, { headers, user: "Alice" })).toEqual(rest);
        expect(await read(poll, { headers, user: "bob", scope: "invocations" })).toEqual(rest);
        expect(await read(poll, { headers, user: "bob", scope: READ_BODY })).toEqual(own);
      }
      // The detail takes the scope, of the caller too.
      const detail = `/v1/invocations/${invocation}`;
      expect(Object.keys(await read(detail, {}))).not.toContain("resp_body");
      expect(await read(detail, { user: "bob", scope: READ_BODY })).toMatchObject({ req_body: btoa("a") });
    });

    test("any user may cancel a call, and sees no body of it by that", async () => {
      const owner = at.tenant();
      const started = Promise.withResolvers<void>();
      const { url: upstream_url } = at.upstream(async ({ signal }) => {
        started.resolve();
        await new Promise((resolve) => signal.addEventListener("abort", resolve));
        return new Response();
      });
      const { id } = await owner.agent({ upstream_url });
      const invocation = await owner.call(id);
      await started.promise;
      const path = `/v1/proxy/${id}/invocations/${invocation}/cancel`;
      const { status, body } = await owner.send("POST", path, { user: "bob" });
      expect([status, body.error_class, "response_body_b64" in body]).toEqual([200, "cancelled", false]);
    });
  });

  test.each(["Tenant", "tenant ", "tenant\u0000", "täñant", "../tenant", "t'; drop table agents; --"])(
    "%p is a tenant of its own",
    async (name) => {
      const send = async (tenant_id: string, method: string, json?: object) => {
        const token = await at.sign({ tenant_id, sub: "u" });
        const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
        const body = json === undefined ? null : JSON.stringify(json);
        return fetch(`${at.gateway.url}/v1/agents`, { method, headers, body });
      };
      const made = await send(name, "POST", { name: "mine", upstream_url: PUBLIC_URL });
      // A name that a database could not keep apart from another is nobody's.
      expect(made.status).toBeOneOf([201, 401]);
      const list = await send("tenant", "GET");
      expect(((await list.json()) as Json).total).toBe(0);
    },
  );

  async function snapshot({ owner, agent, credential, invocation }: Owned): Promise<Json[]> {
    const paths = [
      `/v1/agents/${agent}`,
      `/v1/credentials/${credential}`,
      `/v1/invocations/${invocation}`,
      `/v1/invocations/${invocation}/receipt`,
      `/v1/proxy/${agent}/invocations/${invocation}`,
      "/v1/invocations",
      "/v1/agents",
      "/v1/credentials",
    ];
    return Promise.all(paths.map(async (path) => (await owner.send("GET", path)).body));
  }
});
