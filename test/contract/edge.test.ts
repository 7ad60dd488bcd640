// What holds for every request: open paths, tokens, unknown routes and methods, request IDs, HEAD. The tokens of
// one of the gateways here are of its local issuer, as they are with nothing configured.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { eachDatabase, type Gateway, startGateway } from "../support/gateway/gateway.ts";
import {
  type Answer,
  contract,
  expectError,
  expectNoBody,
  expectRequestId,
  expectShape,
  is,
  read,
  UNKNOWN_AGENT,
  UNKNOWN_CREDENTIAL,
  UNKNOWN_INVOCATION,
} from "./contract.ts";

/** Every path under /v1 of this scope, with the methods that it has. */
const ROUTES: ReadonlyArray<readonly [path: string, methods: readonly string[]]> = [
  ["/v1/agents", ["GET", "POST"]],
  [`/v1/agents/${UNKNOWN_AGENT}`, ["DELETE", "GET", "PATCH"]],
  ["/v1/credentials", ["GET", "POST"]],
  [`/v1/credentials/${UNKNOWN_CREDENTIAL}`, ["DELETE", "GET", "PUT"]],
  [`/v1/proxy/${UNKNOWN_AGENT}`, ["POST"]],
  [`/v1/proxy/${UNKNOWN_AGENT}/invocations/${UNKNOWN_INVOCATION}`, ["GET"]],
  [`/v1/proxy/${UNKNOWN_AGENT}/invocations/${UNKNOWN_INVOCATION}/cancel`, ["POST"]],
  ["/v1/invocations", ["GET"]],
  [`/v1/invocations/${UNKNOWN_INVOCATION}`, ["GET"]],
];
const METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

const base64url = (value: unknown) => Buffer.from(JSON.stringify(value)).toString("base64url");

contract((at) => {
  const get = async (path: string, init: RequestInit = {}): Promise<Answer> =>
    read(await fetch(`${at.gateway.url}${path}`, { redirect: "manual", ...init }));

  describe("open paths", () => {
    test("/healthz, /readyz and /version need no token", async () => {
      for (const path of ["/healthz", "/readyz"]) {
        const answer = await get(path);
        expect([answer.status, answer.body]).toEqual([200, { status: "ok" }]);
        expectRequestId(answer);
      }
      const { status, body } = await get("/version");
      expect(status).toBe(200);
      expectShape(body, { version: is.text, commit: is.orNull(is.text) });
    });

    test("/.well-known/jwks.json holds public keys only", async () => {
      const { status, body } = await get("/.well-known/jwks.json");
      expect(status).toBe(200);
      expectShape(body, { keys: is.arrayOf(is.object) });
      for (const key of body.keys) {
        expect(key).not.toHaveProperty("d");
        expect(key).toMatchObject({ kty: "OKP", crv: "Ed25519", kid: expect.any(String) });
      }
    });

    test("/swagger without JavaScript leads to what can be read", async () => {
      const [, text = ""] = /<noscript>(.*?)<\/noscript>/s.exec((await get("/swagger")).text) ?? [];
      const links = [...text.matchAll(/href="([^"]+)"/g)].map(([, href = ""]) => `/${href}`);
      expect(links).toEqual(["/docs/api", "/swagger/json"]);
      for (const link of links) expect([link, (await get(link)).status]).toEqual([link, 200]);
    });

    test("/swagger is a page and /swagger/json the document that names every route", async () => {
      const page = await get("/swagger");
      expect([page.status, page.headers.get("content-type")]).toEqual([200, expect.stringMatching("text/html")]);
      const { status, body } = await get("/swagger/json");
      expect(status).toBe(200);
      const documented = Object.fromEntries(
        Object.entries(body.paths).map(([path, item]) => [path, Object.keys(item as object)]),
      );
      for (const [path, methods] of ROUTES) {
        const template = path
          .replace(UNKNOWN_INVOCATION, path.includes("/proxy/") ? "{inv_id}" : "{id}")
          .replace(/(agt|cred)_[^/]+/, "{id}");
        expect([template, documented[template]?.sort()]).toEqual([
          template,
          methods.map((method) => method.toLowerCase()),
        ]);
      }
    });
  });

  describe("without a valid token", () => {
    const refused: ReadonlyArray<readonly [string, string | undefined]> = [
      ["no header", undefined],
      ["an empty header", ""],
      ["another scheme", "Basic YTpi"],
      ["no token", "Bearer"],
      ["an opaque token", "Bearer abcdef"],
      ["something of the form of a token", "Bearer a.b.c"],
      ["an unsigned token", `Bearer ${base64url({ alg: "none" })}.${base64url({ tenant_id: "t", sub: "u" })}.`],
      ["a very long token", `Bearer ${"a".repeat(9000)}.b.c`],
    ];
    test.each(refused)("every path and method is 401 without a body: %s", async (_, authorization) => {
      const headers = authorization === undefined ? {} : { authorization };
      for (const [path, methods] of ROUTES) {
        for (const method of methods) {
          const answer = await get(path, { method, headers });
          expectNoBody(answer, 401);
          expect(answer.headers.get("www-authenticate")).toStartWith("Bearer");
        }
      }
    });

    test("unknown paths and methods under /v1 answer 401 too", async () => {
      for (const path of ["/v1", "/v1/", "/v1/unknown", "/v1/agents/", "/v1/proxy", `/v1/agents/${UNKNOWN_AGENT}/x`])
        expectNoBody(await get(path), 401);
      expectNoBody(await get("/v1/agents", { method: "DELETE" }), 401);
    });

    test("a token is refused whose tenant or user is no non-empty string", async () => {
      const issuer = at.tenant();
      const [head = "", , signature = ""] = (await issuer.token()).split(".");
      const forged = `${head}.${base64url({ tenant_id: "t", sub: "u", exp: 4e9 })}.${signature}`;
      expectNoBody(await get("/v1/agents", { headers: { authorization: `Bearer ${forged}` } }), 401);
      for (const claims of [
        { sub: "u" },
        { tenant_id: "t" },
        { tenant_id: "", sub: "u" },
        { tenant_id: "t", sub: "" },
        { tenant_id: 5, sub: "u" },
        { tenant_id: ["t"], sub: "u" },
        { tenant_id: "t", sub: null },
        { tenant_id: "t", sub: { a: 1 } },
      ]) {
        const token = await at.sign(claims);
        expectNoBody(await get("/v1/agents", { headers: { authorization: `Bearer ${token}` } }), 401);
      }
      const token = await at.sign({ tenant_id: "t", sub: "u" });
      expect((await get("/v1/agents", { headers: { authorization: `bearer ${token}` } })).status).toBe(200);
    });
  });

  describe("routes and methods", () => {
    test("an unknown path is 404 with an Error body", async () => {
      const tenant = at.tenant();
      for (const path of ["/home", "/nothing", "/V1/agents", "/healthz/", "/swagger/nothing"])
        expectError(await get(path), 404);
      for (const path of ["/v1", "/v1/", "/v1/unknown", "/v1/agents/", "/v1//agents", "/v1/Agents"])
        expectError(await tenant.send("GET", path), 404);
      expectError(await tenant.send("POST", `/v1/proxy/${UNKNOWN_AGENT}/`), 404);
    });

    test.each(ROUTES)("every other method of %s is 405 with Allow", async (path, methods) => {
      const tenant = at.tenant();
      const allowed = [...methods, ...(methods.includes("GET") ? ["HEAD"] : [])].sort();
      for (const method of METHODS) {
        if (methods.includes(method)) continue;
        const answer = await tenant.send(method, path);
        expectError(answer, 405);
        expect(answer.headers.get("allow")?.split(/, */).sort()).toEqual(allowed);
      }
    });

    test("open paths refuse other methods too", async () => {
      const answer = await get("/healthz", { method: "POST" });
      expectError(answer, 405);
      expect(answer.headers.get("allow")).toContain("GET");
    });

    test("HEAD answers as GET does, without the body", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent();
      for (const [path, status] of [
        [`/v1/agents/${id}`, 200],
        [`/v1/agents/${UNKNOWN_AGENT}`, 404],
        ["/v1/agents?limit=x", 400],
      ] as const) {
        const answer = await tenant.send("HEAD", path);
        expectNoBody(answer, status);
        expect(answer.headers.get("content-type")).toBe("application/json");
      }
      expect((await get("/healthz", { method: "HEAD" })).status).toBe(200);
    });

    test("HEAD is refused where GET would open a stream", async () => {
      const answer = await at.tenant().send("HEAD", `/v1/proxy/${UNKNOWN_AGENT}/stream`);
      expectNoBody(answer, 405);
      expect(answer.headers.get("allow")).toBe("POST, GET, DELETE");
    });
  });

  describe("X-Request-ID", () => {
    test.each(["a", "A-z_0.9", "x".repeat(128)])("is the caller's when it is %s", async (id) => {
      const answers = [
        await get("/healthz", { headers: { "x-request-id": id } }),
        await get("/v1/agents", { headers: { "x-request-id": id } }),
        await at.tenant().send("GET", "/v1/agents", { headers: { "x-request-id": id } }),
      ];
      expect(answers.map(({ headers }) => headers.get("x-request-id"))).toEqual([id, id, id]);
    });

    test.each(["", "x".repeat(129), "a b", "a/b", "ä", "a,b"])("is replaced by a new one when it is %p", async (id) => {
      const answer = await get("/healthz", { headers: { "x-request-id": id } });
      expectRequestId(answer);
      expect(answer.headers.get("x-request-id")).not.toBe(id);
    });

    test("is another one each time when none was sent", async () => {
      const ids = await Promise.all(
        Array.from({ length: 20 }, async () => (await get("/healthz")).headers.get("x-request-id")),
      );
      expect(new Set(ids).size).toBe(20);
    });
  });
});

eachDatabase((database) => {
  describe("the local issuer", () => {
    let gateway: Gateway;
    beforeAll(async () => {
      gateway = await startGateway({ database });
    });
    afterAll(() => gateway?.[Symbol.asyncDispose]());

    test("makes tokens that name tenant, user and scope; those of another gateway name nobody", async () => {
      const send = async (token: string, method: string, path: string, body?: object) =>
        read(
          await fetch(`${gateway.url}${path}`, {
            method,
            headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
            ...(body !== undefined && { body: JSON.stringify(body) }),
          }),
        );
      const token = await gateway.token({ tenant: "acme", user: "me" });
      const made = await send(token, "POST", "/v1/agents", { name: "mine" });
      expect([made.status, made.body.created_by]).toEqual([201, "me"]);
      const other = await gateway.token({ tenant: "other", user: "me" });
      expectError(await send(other, "GET", `/v1/agents/${made.body.id}`), 404);

      await using stranger = await startGateway();
      const strange = await stranger.token({ tenant: "acme", user: "me" });
      expectNoBody(await send(strange, "GET", "/v1/agents"), 401);

      const short = await gateway.run("token", "--tenant", "acme", "--user", "me", "--ttl", "1h");
      expect((await send(short.stdout.trim(), "GET", "/v1/agents")).body.total).toBe(1);
      for (const args of [
        ["--tenant", "acme"],
        ["--user", "me"],
        ["--tenant", "", "--user", "me"],
      ]) {
        expect((await gateway.run("token", ...args)).code).toBe(2);
      }
    });
  });
});
