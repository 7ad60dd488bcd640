// TOLLGATE_MANAGE_SCOPE: whatever writes takes the scope, calling and reading do not. Which routes there are is read
// from the document, so that a new one that writes is held to it too.
import { describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { contract, expectError, expectNoBody, type Json, PRICING, type Tenant } from "./contract.ts";

const SCOPE = "tollgate:manage";

/** All that may be written to without the scope. */
const CALLS = [
  "post /v1/proxy/{id}",
  "post /v1/proxy/{id}/stream",
  "delete /v1/proxy/{id}/stream",
  "post /v1/proxy/{id}/invocations/{inv_id}/cancel",
  "post /v1/policy/evaluate",
];
const READING = ["get", "head", "options"];

contract(
  (at) => {
    /** Every operation under /v1 that is no reading, as "method path". */
    async function writes(): Promise<{ readonly name: string; readonly responses: Json }[]> {
      const document: Json = await (await fetch(`${at.gateway.url}/swagger/json`)).json();
      return Object.entries<Json>(document.paths)
        .filter(([path]) => path.startsWith("/v1/"))
        .flatMap(([path, methods]) =>
          Object.entries<Json>(methods).map(([method, { responses }]) => ({
            name: `${method} ${path}`,
            method,
            responses,
          })),
        )
        .filter(({ method }) => !READING.includes(method));
    }

    const ask = (tenant: Tenant, name: string, scope = "") => {
      const [method = "", path = ""] = name.split(" ");
      const url = path.replaceAll(/\{\w+\}/g, "x");
      return tenant.send(method.toUpperCase(), url, { body: "{", scope });
    };

    /** It gets as far as its body or its ID. */
    const notRefused = async (tenant: Tenant, name: string, scope?: string) => {
      const { status } = await ask(tenant, name, scope);
      expect([name, status === 400 || status === 404]).toEqual([name, true]);
    };

    test.each(["", ":1", "localhost"])(
      "no spelling of a path is a way around the scope for writing, to the host %p",
      async (host) => {
        const token = await at.tenant().token();
        const { port } = new URL(at.gateway.url);
        const body = '{"name":"x"}';
        for (const path of ["/v1/proxy/..\\agents", "/v1/proxy/x\\..\\..\\agents", "/v1/proxy/%2e%2e\\credentials"]) {
          const { promise, resolve, reject } = Promise.withResolvers<string>();
          const head = `POST ${path} HTTP/1.1\r\nHost: ${host}\r\nConnection: close\r\nAuthorization: Bearer ${token}\r\n`;
          const fields = `Content-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`;
          const socket = connect(Number(port), "127.0.0.1", () => socket.write(head + fields));
          socket.once("data", (data) => resolve(String(data))).on("error", reject);
          expect(await promise).toStartWith("HTTP/1.1 403");
          socket.destroy();
        }
      },
    );

    test("every operation that writes is refused without the scope, before anything else is looked at", async () => {
      const tenant = at.tenant();
      const found = await writes();
      const managing = found.filter(({ name }) => !CALLS.includes(name));
      expect(found.map(({ name }) => name)).toEqual(expect.arrayContaining(CALLS));
      expect(managing.length).toBeGreaterThanOrEqual(8);
      for (const { name, responses } of managing) {
        for (const scope of ["", "tollgate", "tollgate:manager", SCOPE.toUpperCase()]) {
          const answer = await ask(tenant, name, scope);
          expect([name, answer.status]).toEqual([name, 403]);
          expectError(answer, 403, SCOPE);
          expect(answer.headers.get("www-authenticate")).toBe(`Bearer error="insufficient_scope", scope="${SCOPE}"`);
        }
        await notRefused(tenant, name, `other ${SCOPE}`);
        expect([name, Object.keys(responses)]).toEqual([name, expect.arrayContaining(["403"])]);
      }
    });

    test("no operation that calls is refused for want of the scope for writing", async () => {
      const tenant = at.tenant();
      for (const name of CALLS) await notRefused(tenant, name);
    });

    test("without a token every write is a 401, and unknown paths and methods take the scope as well", async () => {
      const tenant = at.tenant();
      const wanted = await fetch(`${at.gateway.url}/v1/agents`, { method: "POST", body: "{" });
      expect([wanted.status, await wanted.text()]).toEqual([401, ""]);
      for (const path of [
        "/v1/nothing",
        "/v1/proxy/x/more",
        "/v1/policy",
        "/v1/proxy/x%2Finvocations/y/cancel",
        "/v1/%ff",
      ]) {
        expectError(await tenant.send("POST", path), 403, SCOPE);
        expect((await tenant.send("POST", path, { scope: SCOPE })).status).toBeOneOf([404, 405]);
      }
      expectError(await tenant.send("PUT", "/v1/policy/evaluate"), 403, SCOPE);
      expect((await tenant.send("GET", "/v1/nothing")).status).toBe(404);
      expectNoBody({ ...(await tenant.send("HEAD", "/v1/agents")), text: "" }, 200);
    });

    describe("with and without the scope for writing", () => {
      test("an agent is made by the one and called, read and cancelled by the other", async () => {
        const tenant = at.tenant();
        const { promise: never } = Promise.withResolvers<Response>();
        const route = at.upstream(({ url }) => (url.searchParams.has("stuck") ? never : Response.json({ ok: 1 })));
        const send = (method: string, path: string, json: unknown, scope = "") =>
          tenant.send(method, path, { json, scope });
        const make = { name: "a", upstream_url: route.url };
        expectError(await send("POST", "/v1/agents", make), 403, SCOPE);
        const { id } = (await send("POST", "/v1/agents", make, SCOPE)).body;
        expectError(await send("PATCH", `/v1/agents/${id}`, { pricing: PRICING }), 403, SCOPE);
        expectError(await tenant.send("DELETE", `/v1/agents/${id}`), 403, SCOPE);
        expect((await tenant.send("GET", `/v1/agents/${id}`)).body).toMatchObject({
          pricing: null,
          status: "active",
        });
        expect((await tenant.invoke(id)).status).toBe("succeeded");
        expect((await tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} })).status).toBe(200);
        for (const path of ["/v1/agents", "/v1/credentials", "/v1/policy", "/v1/invocations", "/v1/receipts"])
          expect((await tenant.send("GET", path)).status).toBe(200);
        expect((await send("POST", "/v1/policy/evaluate", { agent_id: id })).status).toBe(200);
        await send("PATCH", `/v1/agents/${id}`, { upstream_url: `${route.url}?stuck` }, SCOPE);
        const invocation = await tenant.call(id);
        const cancelled = await tenant.send("POST", `/v1/proxy/${id}/invocations/${invocation}/cancel`);
        expect([cancelled.status, cancelled.body.error_class]).toEqual([200, "cancelled"]);
      });
    });
  },
  { TOLLGATE_MANAGE_SCOPE: SCOPE },
);
