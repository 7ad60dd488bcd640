// The hosts of a credential: written, shown, held against agents and the settlement configuration, and at the call on
// each of the three paths that a secret leaves by, whatever the database says of agents by then.

import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { SQL } from "bun";
import { collected, type FacilitatorStandIn, startFacilitatorStandIn } from "../support/chain/facilitator-stand-in.ts";
import {
  type Contract,
  CREDENTIAL,
  contract,
  expectError,
  expectShape,
  is,
  type Json,
  type Tenant,
} from "./contract.ts";
import { eventually, PRICING, pay, settleBy, writeCaFile } from "./priced.ts";

const SECRET = "tied-down-secret-77";
const ALLOWED = ["127.0.0.1", "*.example.com"];
const caFile = writeCaFile();

/** Sets the list past every check: what a change of an agent in the same moment could leave behind. */
async function tie({ databaseUrl, gateway }: Contract, id: string, hosts: string[] | null): Promise<void> {
  const list = hosts === null ? null : JSON.stringify(hosts);
  if (databaseUrl !== undefined) {
    await using sql = new SQL(databaseUrl, { max: 1 });
    await sql`update credentials set allowed_hosts = ${list} where id = ${id}`;
    return;
  }
  using database = new Database(join(gateway.dataDir, "tollgate.db"));
  database.run("pragma busy_timeout = 5000");
  database.run("update credentials set allowed_hosts = ? where id = ?", [list, id]);
}

contract(
  (at) => {
    const put = (tenant: Tenant, id: string, json: object) =>
      tenant.send("PUT", `/v1/credentials/${id}`, { json: { plaintext: SECRET, ...json } });
    const credential = (tenant: Tenant, fields: object = {}) =>
      tenant.credential({ plaintext: SECRET, allowed_hosts: ALLOWED, ...fields });
    /** The same server under a name of another host. */
    const mapped = (url: string) => url.replace("127.0.0.1", "[::ffff:127.0.0.1]");
    const port = (url: string) => new URL(url).port;

    test("allowed hosts are shown in every view, stay with a rotation, and null takes them away", async () => {
      const tenant = at.tenant();
      const made = await credential(tenant, {
        allowed_hosts: ["API.Example.com.", "*.Bücher.test", "[::1]"],
      });
      expectShape(made, { ...CREDENTIAL, masked_hint: is.text });
      const hosts = ["api.example.com", "*.xn--bcher-kva.test", "[::1]"];
      expect(made.allowed_hosts).toEqual(hosts);
      expect((await tenant.send("GET", `/v1/credentials/${made.id}`)).body.allowed_hosts).toEqual(hosts);
      expect((await tenant.send("GET", "/v1/credentials")).body.credentials[0].allowed_hosts).toEqual(hosts);
      expect((await put(tenant, made.id, {})).body).toMatchObject({ allowed_hosts: hosts, version: 2 });
      const other = await put(tenant, made.id, { allowed_hosts: ["b.test"] });
      expect(other.body).toMatchObject({ allowed_hosts: ["b.test"], version: 3 });
      expect((await put(tenant, made.id, { allowed_hosts: null })).body.allowed_hosts).toBeNull();
      expect((await tenant.credential({ allowed_hosts: null })).allowed_hosts).toBeNull();
    });

    test("allowed hosts are 1 to 32 host names, and to change them takes the secret", async () => {
      const tenant = at.tenant();
      const { id } = await credential(tenant);
      const many = Array.from({ length: 33 }, (_, index) => `h${index}.example.com`);
      const wrong: unknown[] = [
        [],
        many,
        "a.test",
        {},
        [1],
        [null],
        [""],
        ["a.test:443"],
        ["http://a.test"],
        ["a.*.test"],
      ];
      for (const allowed_hosts of [...wrong, ["*"], ["*.127.0.0.1"], ["a.test", "b/"]]) {
        expectError(await put(tenant, id, { allowed_hosts }), 400, "allowed_hosts");
        const json = { name: "x", auth_type: "none", source: "managed", plaintext: "x", allowed_hosts };
        expectError(await tenant.send("POST", "/v1/credentials", { json }), 400, "allowed_hosts");
      }
      const alone = await tenant.send("PUT", `/v1/credentials/${id}`, { json: { allowed_hosts: null } });
      expectError(alone, 400, "plaintext");
      expect((await put(tenant, id, { allowed_hosts: many.slice(1) })).status).toBe(200);
    });

    describe("an agent at another host", () => {
      test("is refused, by the field that is to blame", async () => {
        const tenant = at.tenant();
        const { id: credential_ref } = await credential(tenant);
        const create = (fields: object) => tenant.send("POST", "/v1/agents", { json: { name: "a", ...fields } });
        expectError(await create({ upstream_url: "https://example.com/", credential_ref }), 400, "upstream_url");
        const { id } = await tenant.agent({ upstream_url: "https://b.test/" });
        const patch = (json: object) => tenant.send("PATCH", `/v1/agents/${id}`, { json });
        expectError(await patch({ credential_ref }), 400, "credential_ref");
        expectError(await patch({ credential_ref, upstream_url: "https://c.test/" }), 400, "upstream_url");
        expect((await patch({ credential_ref, upstream_url: "https://A.B.Example.com.:8443/x" })).status).toBe(200);
        expectError(await patch({ upstream_url: "https://b.test/" }), 400, "upstream_url");
        for (const url of ["https://127.0.0.1.evil.test/", "https://example.com.evil.test/", "http://8.8.8.8/"])
          expectError(await patch({ upstream_url: url }), 400, "upstream_url");
        expect((await patch({ upstream_url: "https://b.test/", credential_ref: null })).status).toBe(200);
        // Without a URL there is no host yet.
        const waiting = await create({ credential_ref });
        expect(waiting.body.status).toBe("pending");
        const late = { json: { upstream_url: "https://b.test/" } };
        expectError(await tenant.send("PATCH", `/v1/agents/${waiting.body.id}`, late), 400, "upstream_url");
      });

      test("keeps a list from being narrowed, and is named; a deleted one and one without a URL do not", async () => {
        const tenant = at.tenant();
        const { id: credential_ref } = await credential(tenant, { allowed_hosts: null });
        const { id: gone } = await tenant.agent({ upstream_url: "https://c.test/", credential_ref });
        await tenant.send("DELETE", `/v1/agents/${gone}`);
        await tenant.agent({ upstream_url: null, credential_ref });
        await tenant.agent({ upstream_url: "https://a.example.com/", credential_ref });
        const other = await tenant.agent({
          name: "the other one",
          upstream_url: "https://b.test/",
          credential_ref,
        });
        const refused = await put(tenant, credential_ref, { allowed_hosts: ALLOWED });
        expectError(refused, 409, other.id);
        expect(refused.body.error).toContain("the other one");
        const now = (await tenant.send("GET", `/v1/credentials/${credential_ref}`)).body;
        expect(now).toMatchObject({ allowed_hosts: null, version: 1 });
        await tenant.patch(other.id, { upstream_url: "https://b.example.com/" });
        expect((await put(tenant, credential_ref, { allowed_hosts: ALLOWED })).status).toBe(200);
        // Another tenant's agent that names the same ID is nobody's here.
        expect((await put(at.tenant(), credential_ref, { allowed_hosts: ["x.test"] })).status).toBe(404);
      });
    });

    test("the settlement configuration is held to the allowed hosts like an agent", async () => {
      const tenant = at.tenant();
      const patch = (json: object) => tenant.send("PATCH", "/v1/settlement/config", { json });
      const [tied, free] = [await credential(tenant), await tenant.credential()];
      const [inside, outside] = ["https://pay.example.com", "https://pay.b.test"];
      const ref = (facilitator_credential_ref: string) => ({ facilitator_credential_ref });
      expectError(await patch({ facilitator_url: outside, ...ref(tied.id) }), 400, "facilitator_url");
      expect((await patch({ facilitator_url: outside, ...ref(free.id) })).status).toBe(200);
      expectError(await patch(ref(tied.id)), 400, "facilitator_credential_ref");
      expect((await patch({ facilitator_url: inside, ...ref(tied.id) })).status).toBe(200);
      expectError(await patch({ facilitator_url: outside }), 400, "facilitator_url");
      expectError(await put(tenant, tied.id, { allowed_hosts: ["b.test"] }), 409, "settlement configuration");
      expect((await put(tenant, tied.id, { allowed_hosts: ["pay.example.com"] })).status).toBe(200);
    });

    describe("a call of an agent with allowed hosts", () => {
      test("does not send the secret to another host, even when the call was accepted before", async () => {
        const tenant = at.tenant();
        const { id: credential_ref } = await credential(tenant);
        const first = Promise.withResolvers<Response>();
        const route = at.upstream(() => first.promise);
        const moved = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref });
        const calls = [await tenant.call(id)];
        await route.arrival();
        // There is one place, so this one waits, with the agent as it is now.
        calls.push(await tenant.call(id));
        await tenant.patch(id, { upstream_url: `http://a.example.com:${port(moved.url)}/` });
        expect((await put(tenant, credential_ref, { allowed_hosts: ["*.example.com"] })).status).toBe(200);
        first.resolve(Response.json({}));
        expect((await tenant.ended(id, calls[0]!)).status).toBe("succeeded");
        const second = await tenant.ended(id, calls[1]!);
        expect(second).toMatchObject({
          status: "failed",
          error_class: "credential_error",
          upstream_status: null,
        });
        expect(route.seen.map(({ headers }) => headers.get("authorization"))).toEqual([`Bearer ${SECRET}`]);
      });

      test("goes by the host that is dialled, polled and streamed", async () => {
        const tenant = at.tenant();
        const { id: credential_ref } = await credential(tenant);
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref });
        const stream = () => tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} });
        expect([(await tenant.invoke(id)).status, (await stream()).status]).toEqual(["succeeded", 200]);
        for (const hosts of [["a.example.com"], ["*.a.test", "b.test"], ["[::ffff:7f00:1]"]]) {
          await tie(at, credential_ref, hosts);
          expect(await tenant.invoke(id)).toMatchObject({ error_class: "credential_error" });
          expectError(await stream(), 502);
        }
        expect(route.seen.length).toBe(2);
        await tie(at, credential_ref, ["127.0.0.1"]);
        expect([(await tenant.invoke(id)).status, (await stream()).status]).toEqual(["succeeded", 200]);
        expect(route.seen.every(({ headers }) => headers.get("authorization") === `Bearer ${SECRET}`)).toBe(true);
        expect(at.gateway.log()).not.toContain(SECRET);
      });

      test("sends the secret to a host on the list only, when agent and list change side by side", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id: credential_ref } = await credential(tenant, { allowed_hosts: null });
        const { id } = await tenant.agent({ upstream_url: route.url, credential_ref });
        const [here, there] = [route.url, mapped(route.url)];
        for (let round = 0; round < 20; round++) {
          await put(tenant, credential_ref, { allowed_hosts: null });
          await tenant.patch(id, { upstream_url: here });
          const seen = route.seen.length;
          const [moved, tied] = await Promise.all([
            tenant.send("PATCH", `/v1/agents/${id}`, { json: { upstream_url: there } }),
            put(tenant, credential_ref, { allowed_hosts: ["127.0.0.1"] }),
          ]);
          expect([[200, 400].includes(moved.status), [200, 409].includes(tied.status)]).toEqual([true, true]);
          const isAllowed = moved.status === 400 || tied.status === 409;
          const { error_class } = await tenant.invoke(id);
          expect([error_class, route.seen.length - seen]).toEqual(isAllowed ? [null, 1] : ["credential_error", 0]);
        }
      });
    });

    describe("with a facilitator", () => {
      let facilitator: FacilitatorStandIn;
      beforeAll(() => {
        facilitator = startFacilitatorStandIn();
      });
      afterAll(() => facilitator?.stop());

      test("the secret and the payment go to no facilitator that is not on the list of hosts", async () => {
        const tenant = at.tenant();
        const ref = await settleBy(tenant, facilitator.url, { plaintext: SECRET, allowed_hosts: ALLOWED });
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
        await tie(at, ref, ["a.example.com"]);
        const payment = await pay();
        const { status, body } = await tenant.send("POST", `/v1/proxy/${id}`, {
          json: {},
          headers: payment.headers,
        });
        expect(status).toBe(202);
        const look = (): Promise<Json> => tenant.poll(id, body.invocation_id);
        const waiting = await eventually(look, ({ settlement }) => settlement.attempts > 0);
        expect(waiting).toMatchObject({ status: "pending", settlement: { status: "pending" } });
        expect([facilitator.calls.length, route.seen.length]).toEqual([0, 0]);
        // What is being settled needs its facilitator.
        const { id: other } = await tenant.credential();
        const json = { facilitator_url: "https://pay.b.test", facilitator_credential_ref: other };
        expect((await tenant.send("PATCH", "/v1/settlement/config", { json })).status).toBe(200);
        expectError(await put(tenant, ref, { allowed_hosts: ["b.example.com"] }), 409, "payment");
        expect((await put(tenant, ref, { allowed_hosts: ["127.0.0.1"] })).status).toBe(200);
        expect((await tenant.ended(id, body.invocation_id)).settlement.status).toBe("settled");
        expect(facilitator.calls.map(({ headers }) => headers.get("authorization"))).toEqual([`Bearer ${SECRET}`]);
      });

      test.each(["", "/stream"])(
        "a list of hosts that shuts out a paid call which waits is refused: %p",
        async (path) => {
          const tenant = at.tenant();
          await settleBy(tenant, facilitator.url);
          const route = at.upstream(() => new Response("made"));
          const { id: credential_ref } = await tenant.credential({ plaintext: SECRET });
          const { id } = await tenant.agent({ upstream_url: route.url, credential_ref, pricing: PRICING });
          const { headers, authorization } = await pay();
          const { promise: collectedNow, resolve: collect } = Promise.withResolvers<void>();
          facilitator.answer(authorization.nonce, async (call) => {
            await collectedNow;
            return collected(call);
          });
          const answer = tenant.send("POST", `/v1/proxy/${id}${path}`, { json: {}, headers });
          await facilitator.arrival(authorization.nonce);
          await tenant.patch(id, { upstream_url: "https://moved.example.com/" });
          expectError(await put(tenant, credential_ref, { allowed_hosts: ["moved.example.com"] }), 409, "paid call");
          expect(
            (await put(tenant, credential_ref, { allowed_hosts: ["moved.example.com", "127.0.0.1"] })).status,
          ).toBe(200);
          collect();
          expect((await answer).status).toBe(path === "" ? 202 : 200);
          await eventually(
            async () => (await tenant.send("GET", "/v1/invocations")).body.data[0],
            ({ status }) => status === "succeeded",
          );
          expect(route.seen.length).toBe(1);
          expect((await put(tenant, credential_ref, { allowed_hosts: ["moved.example.com"] })).status).toBe(200);
        },
      );

      test("a paid call is refused before its payment when it could not have its secret", async () => {
        const tenant = at.tenant();
        await settleBy(tenant, facilitator.url);
        const { id: credential_ref } = await credential(tenant);
        const { id } = await tenant.agent({
          upstream_url: at.upstream().url,
          credential_ref,
          pricing: PRICING,
        });
        await tie(at, credential_ref, ["a.example.com"]);
        const { headers, authorization } = await pay();
        expectError(await tenant.send("POST", `/v1/proxy/${id}`, { json: {}, headers }), 422, "credential");
        expect(facilitator.of(authorization.nonce)).toEqual([]);
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
      });
    });
  },
  {
    TOLLGATE_ALLOW_HOSTS: "127.0.0.1",
    TOLLGATE_AGENT_CONCURRENCY: "1",
    TOLLGATE_CA_FILE: caFile,
  },
);
