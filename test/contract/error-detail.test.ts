// Why a failed call has no whole response, as its caller is told: each reason made to happen for real, on both paths, and shown
// in the poll, in the history and in the log, with no address and no text of the upstream.
import { afterAll, describe, expect, test } from "bun:test";
import net from "node:net";
import tls from "node:tls";
import { executeIn } from "../support/gateway/gateway.ts";
import { SERVER } from "../support/http/certificates.ts";
import { until } from "../support/until.ts";
import { contract, type Json, MCP, type Tenant } from "./contract.ts";
import { idOf, rawUpstreams, stream } from "./streamed-calls.ts";

const TIMEOUT_MS = 2_500;
const RESPONSE_BYTES_MAX = 65_536;
/** A text of the upstream, which no record may repeat. */
const SAID = "words-of-the-upstream";
/** Sent in a header, which callers see but the log never has. It ends in a control character, CSI, that terminals obey. */
const TYPE = "text/type-of-the-upstream\u009b";

const rawUpstream = rawUpstreams();
const servers: net.Server[] = [];
afterAll(() => {
  for (const server of servers) server.close();
});

async function portOf(server: net.Server): Promise<number> {
  servers.push(server);
  const { promise, resolve } = Promise.withResolvers<void>();
  server.listen(0, "127.0.0.1", resolve);
  await promise;
  return (server.address() as net.AddressInfo).port;
}

/** Takes connections and says nothing, so that no TLS handshake ends. */
const silent = async () =>
  `https://127.0.0.1:${await portOf(net.createServer((socket) => socket.on("error", () => {})))}/`;
/** Shows a certificate of a CA that the gateway does not trust. */
const untrusted = async () => `https://127.0.0.1:${await portOf(tls.createServer(SERVER))}/`;

const UNREACHED: [name: string, url: () => string | Promise<string>, error_class: string, error_detail: string][] = [
  ["refuses connections", () => "http://127.0.0.1:1/", "upstream_5xx", "connection_refused"],
  ["resets the connection", () => rawUpstream((peer) => peer.reset()), "upstream_5xx", "connection_reset"],
  ["closes the connection", () => rawUpstream((peer) => peer.end()), "upstream_5xx", "connection_reset"],
  ["has a name without an address", () => `http://${SAID}.onion/`, "upstream_5xx", "name_not_found"],
  ["shows a foreign certificate", untrusted, "upstream_5xx", "tls"],
  ["never ends the TLS handshake", silent, "timeout", "connect_timeout"],
  ["never answers", () => rawUpstream(() => {}), "timeout", "deadline"],
  [
    "breaks its response off",
    () => rawUpstream((peer) => [peer.write(`HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n${SAID}`), peer.reset()]),
    "upstream_5xx",
    "connection_reset",
  ],
];

contract(
  (at) => {
    /** The record of the tenant's only call of the agent, which has ended: poll, detail, list and log say one thing. */
    async function recordOf(tenant: Tenant, agentId: string, invocation: string): Promise<Json> {
      const view = await tenant.ended(agentId, invocation);
      const { error_class, error_detail } = view;
      const detail = await tenant.detail(invocation);
      const { data } = (await tenant.send("GET", `/v1/invocations?agent_id=${agentId}`)).body;
      expect([detail, ...data].map((row) => [row.error_class, row.error_detail])).toEqual([
        [error_class, error_detail],
        [error_class, error_detail],
      ]);
      const shown = JSON.stringify([{ ...view, response_body_b64: "" }, data]);
      expect(shown).not.toContain("127.0.0.1");
      expect(shown).not.toContain(SAID);
      const lines = () =>
        at.gateway
          .log()
          .split("\n")
          .filter((line) => line.includes(`"${invocation}"`));
      const ended = () => lines().find((line) => line.includes('"invocation_ended"'));
      await until(() => ended() !== undefined);
      expect(JSON.parse(ended() ?? "")).toMatchObject({ error_class, error_detail });
      expect(at.gateway.log()).not.toContain("type-of-the-upstream");
      return view;
    }

    /** Calls the agent on both paths, and expects one record of both. */
    async function fails(tenant: Tenant, id: string, expected: object): Promise<void> {
      expect(await recordOf(tenant, id, await tenant.call(id))).toMatchObject({ status: "failed", ...expected });
      const other = await tenant.agent(await urlOf(tenant, id));
      // A response that breaks off has its ID in the head, which this client may lose with the body.
      await stream(tenant, other.id).catch(() => {});
      const { data } = (await tenant.send("GET", `/v1/invocations?agent_id=${other.id}`)).body;
      expect(data).toHaveLength(1);
      expect(await recordOf(tenant, other.id, data[0].id)).toMatchObject({ status: "failed", ...expected });
    }

    async function urlOf(tenant: Tenant, id: string): Promise<object> {
      const { upstream_url, credential_ref } = (await tenant.send("GET", `/v1/agents/${id}`)).body;
      return { upstream_url, credential_ref };
    }

    describe("a call whose upstream", () => {
      test.each(UNREACHED)("%s", async (_name, url, error_class, error_detail) => {
        const tenant = at.tenant();
        const { id } = await tenant.agent({ upstream_url: await url() });
        await fails(tenant, id, { error_class, error_detail });
      });

      test.each([200, 301, 404, 500, 599])("answers %d has no detail", async (status) => {
        const tenant = at.tenant();
        const route = at.upstream(() => new Response(SAID, { status, headers: { "content-type": TYPE } }));
        const { id } = await tenant.agent({ upstream_url: route.url });
        expect((await recordOf(tenant, id, await tenant.call(id))).error_detail).toBeNull();
        const { id: other } = await tenant.agent({ upstream_url: route.url });
        const answer = await stream(tenant, other);
        expect((await recordOf(tenant, other, idOf(answer))).error_detail).toBeNull();
      });

      test("answers with more than is taken", async () => {
        const tenant = at.tenant();
        const route = at.upstream(() => new Response(SAID.repeat(RESPONSE_BYTES_MAX / 8)));
        const { id } = await tenant.agent({ upstream_url: route.url });
        const view = await recordOf(tenant, id, await tenant.call(id));
        expect(view).toMatchObject({ error_class: "internal", error_detail: "response_too_large" });
      });

      test("ends its event stream without the response", async () => {
        const tenant = at.tenant();
        const progress = `data: {"jsonrpc":"2.0","method":"notifications/${SAID}"}\n\n`;
        const headers = { "content-type": "text/event-stream" };
        const route = at.upstream(() => new Response(progress, { headers }));
        const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
        const json = { jsonrpc: "2.0", id: 1, method: "tools/list" };
        const view = await recordOf(tenant, id, await tenant.call(id, { json }));
        expect(view).toMatchObject({ error_class: "internal", error_detail: "no_answer_in_stream" });
      });
    });

    test("a call whose secret can't be had, or may not go to the host, and which reaches nobody", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const vault = { source: "vault", vault_ref: "nowhere", plaintext: undefined };
      const { id: missing } = await tenant.credential(vault);
      const { id: tied } = await tenant.credential();
      const error_class = "credential_error";
      const unresolved = await tenant.agent({ upstream_url: route.url, credential_ref: missing });
      await fails(tenant, unresolved.id, { error_class, error_detail: "credential_unresolved" });

      const elsewhere = await tenant.agent({ upstream_url: route.url, credential_ref: tied });
      const streamed = await tenant.agent({ upstream_url: route.url, credential_ref: tied });
      // What a change of an agent at the same moment could leave behind.
      const statement = `update credentials set allowed_hosts = '["elsewhere.test"]' where id = '${tied}'`;
      const env = at.databaseUrl === undefined ? {} : { DATABASE_URL: at.databaseUrl };
      await executeIn(at.gateway, env, statement);
      const expected = { error_class, error_detail: "credential_host" };
      // A call is refused before it is accepted where its credential may not go to the host, unless it was accepted before.
      const answers = [await tenant.send("POST", `/v1/proxy/${elsewhere.id}`, { json: {} })];
      answers.push(await stream(tenant, streamed.id));
      expect(answers.map(({ status }) => status)).toEqual([202, 502]);
      expect(await recordOf(tenant, elsewhere.id, answers[0]?.body.invocation_id)).toMatchObject(expected);
      expect(answers[1]?.body.error).toContain("allowed_hosts");
      expect(await recordOf(tenant, streamed.id, idOf(answers[1]!))).toMatchObject(expected);
      expect(route.seen).toEqual([]);
    });

    test("a call that is cancelled has no detail", async () => {
      const tenant = at.tenant();
      const route = at.upstream(() => new Promise<Response>(() => {}));
      const { id } = await tenant.agent({ upstream_url: route.url });
      const invocation = await tenant.call(id);
      await route.arrival();
      await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
      const view = await recordOf(tenant, id, invocation);
      expect(view).toMatchObject({ error_class: "cancelled", error_detail: null });
    });

    test("calls whose process is killed, and calls whose host is blocked from then on", async () => {
      const tenant = at.tenant();
      const route = at.upstream(() => new Promise<Response>(() => {}));
      const { id } = await tenant.agent({ upstream_url: route.url });
      const polled = await tenant.call(id);
      await route.arrival(1);
      const { id: streamedAgent } = await tenant.agent({ upstream_url: route.url });
      const streamed = stream(tenant, streamedAgent).catch(() => {});
      await route.arrival(2);
      await at.gateway.kill9();
      await streamed;
      await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: "" });
      const ended = { error_class: "internal", error_detail: "process_ended" };
      expect(await tenant.ended(id, polled)).toMatchObject(ended);
      const { data } = (await tenant.send("GET", `/v1/invocations?agent_id=${streamedAgent}`)).body;
      expect(await tenant.ended(streamedAgent, data[0].id)).toMatchObject(ended);

      const blocked = { error_class: "ssrf_blocked", error_detail: "host_blocked" };
      expect(await tenant.invoke(streamedAgent)).toMatchObject({ status: "failed", ...blocked });
      const refused = await stream(tenant, id);
      expect(refused.status).toBe(502);
      expect(await tenant.detail(idOf(refused))).toMatchObject(blocked);
      await at.gateway.stop();
      await at.gateway.restart({ TOLLGATE_ALLOW_HOSTS: "127.0.0.1" });
    });
  },
  {
    TOLLGATE_UPSTREAM_TIMEOUT_MS: String(TIMEOUT_MS),
    TOLLGATE_MAX_RESPONSE_BYTES: String(RESPONSE_BYTES_MAX),
  },
);
