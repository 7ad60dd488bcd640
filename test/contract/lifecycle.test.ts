// What happens to calls around changes and restarts: one place per agent makes calls wait, so that an agent can
// change under them, a gateway can drain with them, and a dial can meet other rules than the write did.

import { describe, expect, test } from "bun:test";
import { lookup } from "node:dns/promises";
import { connect } from "node:net";
import { hostname } from "node:os";
import { until } from "../support/until.ts";
import { contract, expectError, expectShape, type Json, POLL, POLL_WITH_BODY, responseText } from "./contract.ts";

/** A name of this machine that leads to itself; null where there is none. */
async function localName(): Promise<string | null> {
  for (const name of [hostname(), "localhost.localdomain", "ip6-localhost"]) {
    // A name without letters is an address to the URL parser.
    const found = /[a-z]/i.test(name) ? await lookup(name, { all: true }).catch(() => []) : [];
    if (found.length > 0 && found.every(({ address }) => address.startsWith("127.") || address === "::1")) return name;
  }
  return null;
}

const MIB = 1024 * 1024;

const local = await localName();
const reason = local === null ? " (skipped: no name of this machine resolves to loopback alone)" : "";

contract(
  (at) => {
    /** An upstream that holds every call until the gate opens. */
    function gated(answer = "late") {
      const gate = Promise.withResolvers<void>();
      const route = at.upstream(async () => {
        await gate.promise;
        return new Response(answer);
      });
      return { ...route, open: gate.resolve };
    }

    /** An agent with one call running and one pending behind it. */
    async function occupied(fields: object = {}) {
      const tenant = at.tenant();
      const slow = gated();
      const agent = await tenant.agent({ upstream_url: slow.url, ...fields });
      const running = await tenant.call(agent.id, { body: "running" });
      await slow.arrival();
      const pending = await tenant.call(agent.id, { body: "pending" });
      return { tenant, slow, agent, running, pending };
    }

    describe("a call that waits for a place", () => {
      test("is pending, with explicit nulls, and runs when there is one", async () => {
        const { tenant, slow, agent, running, pending } = await occupied();
        const view = await tenant.poll(agent.id, pending);
        expectShape(view, POLL);
        expect(view).toMatchObject({
          status: "pending",
          completed_at: null,
          upstream_status: null,
          latency_ms: null,
        });
        expect((await tenant.poll(agent.id, running)).status).toBe("running");
        expect((await tenant.send("GET", "/v1/invocations?status=pending")).body).toMatchObject({ total: 1 });
        expect((await tenant.send("GET", "/v1/invocations?status=running")).body).toMatchObject({ total: 1 });
        // Nobody else's calls wait for it.
        const other = await tenant.agent({ upstream_url: at.upstream().url });
        expect(await tenant.invoke(other.id)).toMatchObject({ status: "succeeded" });
        expect(slow.seen.length).toBe(1);
        slow.open();
        for (const id of [running, pending]) {
          expect(await tenant.ended(agent.id, id)).toMatchObject({ status: "succeeded" });
        }
      });

      test("shows its request body to who may read it", async () => {
        const { tenant, slow, agent, pending } = await occupied();
        const long = await tenant.call(agent.id, { body: "q".repeat(MIB + 1) });
        for (const [id, body] of [[pending, "pending"] as const, [long, "q".repeat(MIB)] as const]) {
          const detail = await tenant.detail(id);
          expect(Buffer.from(detail.req_body, "base64").toString()).toBe(body);
          expect(detail).not.toHaveProperty("resp_body");
        }
        slow.open();
        await tenant.ended(agent.id, long);
        // The whole of it goes out all the same.
        expect(slow.seen[2]?.body.length).toBe(MIB + 1);
      });

      test("can be cancelled, and then never reaches the upstream", async () => {
        const { tenant, slow, agent, running, pending } = await occupied();
        const path = `/v1/proxy/${agent.id}/invocations/${pending}`;
        const { status, body } = await tenant.send("POST", `${path}/cancel`);
        expect(status).toBe(200);
        expectShape(body, POLL);
        expect(body).toMatchObject({
          status: "failed",
          error_class: "cancelled",
          upstream_status: null,
          latency_ms: null,
        });
        slow.open();
        await tenant.ended(agent.id, running);
        expect(await tenant.invoke(agent.id)).toMatchObject({ status: "succeeded" });
        expect(slow.seen.map((seen) => new TextDecoder().decode(seen.body))).toEqual(["running", "{}"]);
        expectError(await tenant.send("POST", `${path}/cancel`), 409);
      });

      const changes: ReadonlyArray<readonly [string, (other: { url: string; credential: string }) => Json | null]> = [
        ["another upstream", ({ url }) => ({ upstream_url: url })],
        ["no upstream", () => ({ upstream_url: null })],
        ["a suspension", () => ({ suspended: true })],
        ["no capture", () => ({ capture_body: false })],
        ["another protocol", () => ({ protocol: "mcp", mcp_transport: "streamable_http" })],
        ["another credential", ({ credential }) => ({ credential_ref: credential })],
        ["a deletion", () => null],
      ];
      test.each(changes)("runs with its agent as it was: %s changes nothing", async (_, change) => {
        const owner = at.tenant();
        const slow = gated();
        const other = at.upstream();
        const [mine, foreign] = [
          await owner.credential({ plaintext: "mine" }),
          await owner.credential({ plaintext: "other" }),
        ];
        const { id } = await owner.agent({ upstream_url: slow.url, credential_ref: mine.id });
        const running = await owner.call(id);
        await slow.arrival();
        const pending = await owner.call(id, { body: "pending" });
        const fields = change({ url: other.url, credential: foreign.id });
        if (fields === null) await owner.send("DELETE", `/v1/agents/${id}`);
        else await owner.patch(id, fields);
        slow.open();
        await owner.ended(id, running);
        const view = await owner.ended(id, pending);
        expectShape(view, POLL_WITH_BODY);
        expect([view.status, responseText(view)]).toEqual(["succeeded", "late"]);
        expect(slow.seen[1]?.headers.get("authorization")).toBe("Bearer mine");
        expect(new TextDecoder().decode(slow.seen[1]?.body)).toBe("pending");
        expect(other.seen).toEqual([]);
      });
    });

    /** Resolves as soon as the gateway has logged that it drains, once more than before. */
    async function draining(before: number): Promise<void> {
      const deadline = performance.now() + 10_000;
      while (drains() === before && performance.now() < deadline) await Bun.sleep(5);
      expect(drains()).toBe(before + 1);
    }
    const drains = () => at.gateway.log().split('"event":"draining"').length - 1;

    /** The status that a new request gets; null when there is no connection. */
    const newRequest = async () =>
      (await fetch(`${at.gateway.url}/healthz`, { keepalive: false }).catch(() => null))?.status ?? null;

    describe("after SIGTERM", () => {
      test("what runs ends and is told, what is pending runs after the restart, and the status is 0", async () => {
        const { tenant, slow, agent, running, pending } = await occupied();
        const path = `/v1/proxy/${agent.id}/invocations/${running}`;
        const held = tenant.send("GET", path, { headers: { prefer: "wait=30" } });
        const answered = tenant.send("GET", path);
        await answered;
        const before = drains();
        const stopped = at.gateway.stop();
        await draining(before);
        expect(await newRequest()).toBeOneOf([503, null]);
        slow.open();
        expect((await held).body).toMatchObject({ status: "succeeded", error_class: null });
        await stopped;
        expect(slow.seen.length).toBe(1);

        await at.gateway.restart();
        expect(await tenant.ended(agent.id, pending)).toMatchObject({ status: "succeeded" });
        expect(await tenant.poll(agent.id, running)).toMatchObject({ status: "succeeded" });
        expect(slow.seen.map(({ body }) => new TextDecoder().decode(body))).toEqual(["running", "pending"]);
      });

      test("a call that is still coming in is accepted, and its caller is told so", async () => {
        const tenant = at.tenant();
        const agent = await tenant.agent({ upstream_url: at.upstream(() => new Response("ok")).url });
        const token = await tenant.token();
        const { port } = new URL(at.gateway.url);
        const { promise: answer, resolve, reject } = Promise.withResolvers<string>();
        const head = `POST /v1/proxy/${agent.id} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${token}\r\n`;
        const socket = connect(Number(port), "127.0.0.1");
        socket.once("data", (data) => resolve(String(data)));
        socket.once("error", reject).once("close", () => reject(new Error("closed without an answer")));
        const sent = `${head}Content-Length: 200000\r\n\r\n${"x".repeat(100_000)}`;
        await new Promise((resolve) => socket.write(sent, resolve));
        await tenant.send("GET", `/v1/agents/${agent.id}`);
        const before = drains();
        const stopped = at.gateway.stop();
        await draining(before);
        // Longer than what is left of a stop when nothing is under way.
        await Bun.sleep(3_000);
        socket.write("x".repeat(100_000));
        const text = await answer;
        expect(text).toStartWith("HTTP/1.1 202");
        await stopped;
        await at.gateway.restart();
        const id = /x-service-invocation-id: (\S+)/i.exec(text)?.[1] ?? "";
        expect(await tenant.ended(agent.id, id)).toMatchObject({ status: "succeeded" });
      });

      test("a caller that waits for a call which stays pending gets its ID and its state", async () => {
        const { tenant, slow, agent, pending } = await occupied();
        const headers = { prefer: "wait=60" };
        const polled = tenant.send("GET", `/v1/proxy/${agent.id}/invocations/${pending}`, { headers });
        const called = tenant.send("POST", `/v1/proxy/${agent.id}`, { body: "held", headers });
        // The list shows the held call as soon as it is accepted.
        await until(async () => (await tenant.send("GET", "/v1/invocations")).body.total >= 3);
        const before = drains();
        const stopped = at.gateway.stop();
        await draining(before);
        slow.open();
        expect((await polled).body).toMatchObject({ invocation_id: pending, status: "pending" });
        const { status, body } = await called;
        expect(status).toBe(202);
        await stopped;
        await at.gateway.restart();
        for (const id of [pending, body.invocation_id]) {
          expect(await tenant.ended(agent.id, id)).toMatchObject({ status: "succeeded" });
        }
        expect(slow.seen.length).toBe(3);
      });

      test("a call that still runs when the time is up ends internal and is not sent again", async () => {
        await at.gateway.stop();
        await at.gateway.restart({ TOLLGATE_DRAIN_MS: "300" });
        const { tenant, slow, agent, running, pending } = await occupied();
        const startedAt = performance.now();
        await at.gateway.stop();
        expect(performance.now() - startedAt).toBeLessThan(8000);
        slow.open();
        await at.gateway.restart();
        expect(await tenant.ended(agent.id, running)).toMatchObject({
          status: "failed",
          error_class: "internal",
        });
        expect(await tenant.ended(agent.id, pending)).toMatchObject({ status: "succeeded" });
        expect(slow.seen.map(({ body }) => new TextDecoder().decode(body))).toEqual(["running", "pending"]);
      });

      test("agents, credentials, history and idempotency keys are there after a restart", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const credential = await tenant.credential({ plaintext: "the secret" });
        const agent = await tenant.agent({ upstream_url: route.url, credential_ref: credential.id });
        const headers = { "idempotency-key": "k" };
        const invocation = await tenant.call(agent.id, { body: "a", headers });
        const ended = await tenant.ended(agent.id, invocation);
        await at.gateway.stop();
        await at.gateway.restart();
        expect((await tenant.send("GET", `/v1/agents/${agent.id}`)).body).toEqual(agent);
        expect((await tenant.send("GET", `/v1/credentials/${credential.id}`)).body).toEqual(credential);
        expect(await tenant.poll(agent.id, invocation)).toEqual(ended);
        expect(await tenant.call(agent.id, { body: "a", headers })).toBe(invocation);
        await tenant.invoke(agent.id);
        expect(route.seen.map(({ headers: seen }) => seen.get("authorization"))).toEqual([
          "Bearer the secret",
          "Bearer the secret",
        ]);
      });
    });

    describe("host rules at dial time", () => {
      test("an agent that was allowed when it was written is refused when it no longer is", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const { id } = await tenant.agent({ upstream_url: route.url });
        const local = await tenant.agent({ upstream_url: route.url.replace("127.0.0.1", "localhost") });
        await at.gateway.stop();
        await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: "" });
        expect(await tenant.invoke(local.id)).toMatchObject({ status: "failed", error_class: "ssrf_blocked" });
        const { port } = new URL(route.url);
        for (const host of ["127.0.0.1", "localhost", "LOCALHOST.", "api.localhost"]) {
          const json = { name: "written now", upstream_url: `http://${host}:${port}/` };
          expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "upstream_url");
          const facilitator = { facilitator_url: `https://${host}:${port}`, facilitator_credential_ref: "cred_1" };
          const configured = await tenant.send("PATCH", "/v1/settlement/config", { json: facilitator });
          expectError(configured, 400, "facilitator_url");
        }
        const view = await tenant.invoke(id);
        expectShape(view, POLL);
        expect(view).toMatchObject({
          status: "failed",
          error_class: "ssrf_blocked",
          upstream_status: null,
          response_content_type: null,
        });
        expect(route.seen).toEqual([]);
      });

      test("localhost is called at the address that is exempt, on both paths, and at no other", async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        for (const allowed of ["127.0.0.1", "127.0.0.0/8"]) {
          await at.gateway.stop();
          await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: allowed });
          for (const host of ["localhost", "api.localhost"]) {
            const { id } = await tenant.agent({ upstream_url: route.url.replace("127.0.0.1", host) });
            expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded", error_detail: null });
            expect((await tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} })).status).toBe(200);
          }
        }
        const { port } = new URL(route.url);
        const seen = route.seen.length;
        expect(route.seen.map(({ headers }) => headers.get("host")).toSorted()).toEqual([
          ...Array(4).fill(`api.localhost:${port}`),
          ...Array(4).fill(`localhost:${port}`),
        ]);
        await at.gateway.stop();
        // Nobody listens there, and the other address of the name is not tried in its place.
        await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: "::1" });
        const { id } = await tenant.agent({ upstream_url: route.url.replace("127.0.0.1", "localhost") });
        expect((await tenant.invoke(id)).status).toBe("failed");
        expect(route.seen.length).toBe(seen);
      });

      (local === null ? test.skip : test)(`a name that leads to this machine is refused${reason}`, async () => {
        const tenant = at.tenant();
        const route = at.upstream();
        const upstream_url = route.url.replace("127.0.0.1", local ?? "");
        const { id } = await tenant.agent({ upstream_url });
        const refused = await tenant.invoke(id);
        expect(refused).toMatchObject({
          status: "failed",
          error_class: "ssrf_blocked",
          upstream_status: null,
        });
        expect((await tenant.send("GET", "/v1/invocations?error_class=ssrf_blocked")).body.total).toBe(1);
        expect(route.seen).toEqual([]);
        // Exempt by its name, or by its addresses whatever name led to them.
        for (const allowed of [local ?? "", "127.0.0.0/8,::1"]) {
          await at.gateway.stop();
          await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: allowed });
          const view = await tenant.invoke(id);
          // The name may lead to ::1 too, where nobody listens.
          expect(view.error_class).not.toBe("ssrf_blocked");
        }
        expect(route.seen.length).toBeGreaterThan(0);
      });
    });
  },
  { TOLLGATE_AGENT_CONCURRENCY: "1", TOLLGATE_DRAIN_MS: "15000" },
);
