// Headers of a streamed answer pass as they arrive, but for those that an upstream would speak with for the gateway: to
// a browser about the whole origin, to a client about whom to get tokens from, to a proxy about what to send or keep.
import { describe, expect, test } from "bun:test";
import { contract, MCP } from "./contract.ts";

const STAY = {
  "alt-svc": 'h3="evil.example:443"; ma=86400',
  "clear-site-data": '"*"',
  "strict-transport-security": "max-age=0",
  nel: '{"report_to":"x","max_age":1}',
  "report-to": '{"group":"x","max_age":1,"endpoints":[{"url":"https://evil.example"}]}',
  "reporting-endpoints": 'default="https://evil.example"',
  "service-worker-allowed": "/",
  "access-control-allow-origin": "*",
  "access-control-allow-credentials": "true",
  "access-control-expose-headers": "*",
  "access-control-max-age": "600",
  "access-control-anything-new": "1",
  "payment-required": "eyJ4NDAyVmVyc2lvbiI6Mn0=",
  "payment-response": "e30=",
  "x-payment-response": "e30=",
  "www-authenticate": 'Bearer resource_metadata="https://evil.example/.well-known/oauth-protected-resource"',
  "authentication-info": "nextnonce=1",
  "set-cookie": "a=b",
  "accept-ch": "Sec-CH-UA-Model",
  "set-login": "logged-out",
  "use-as-dictionary": 'match="/*"',
  "x-accel-redirect": "/internal/secret",
  "x-accel-expires": "3600",
  "x-sendfile": "/etc/passwd",
  "x-litespeed-location": "/internal",
  "x-reproxy-url": "http://169.254.169.254/",
  "surrogate-control": "max-age=3600",
  "cdn-cache-control": "public, max-age=3600",
  "cloudflare-cdn-cache-control": "public, max-age=3600",
  "x-service-policy-warning": "theirs",
};
const PASS = {
  "content-type": "text/x-own",
  "x-accel-buffering": "no",
  "retry-after": "7",
  etag: '"1"',
  link: '<https://api.example/next>; rel="next"',
  refresh: "5",
  vary: "Accept",
  "x-own": "1",
  "access-key-id": "1",
  via: "1.1 theirs",
};
const SHARED = "public, max-age=60, s-maxage=600";

contract((at) => {
  const answering = async (status: number) => {
    const route = at.upstream(
      () => new Response("x", { status, headers: { ...STAY, ...PASS, "cache-control": SHARED } }),
    );
    const tenant = at.tenant();
    const { id } = await tenant.agent({ ...MCP, upstream_url: route.url });
    return { tenant, path: `/v1/proxy/${id}/stream` };
  };

  describe.each([
    ["POST", SHARED],
    ["GET", "max-age=60, private"],
    ["DELETE", SHARED],
  ])("the answer to a %s", (method, cacheControl) => {
    test.each([200, 401, 402])("passes with status %d, without what would speak for the gateway", async (status) => {
      const { tenant, path } = await answering(status);
      const ping = { json: { jsonrpc: "2.0", id: 1, method: "ping" } };
      const answer = await tenant.send(method, path, method === "POST" ? ping : {});
      expect([answer.status, answer.text]).toEqual([status, "x"]);
      const kept = Object.keys(STAY).filter((name) => answer.headers.has(name));
      expect(kept).toEqual([]);
      const passed = Object.fromEntries(Object.keys(PASS).map((name) => [name, answer.headers.get(name)]));
      expect(passed).toEqual(PASS);
      // No 402 is kept, whoever asks to be paid.
      expect(answer.headers.get("cache-control")).toBe(status === 402 ? "no-store" : cacheControl);
    });
  });

  test.each([
    ["mcp", MCP],
    ["http", {}],
  ])("the events that answer a POST to an %s agent ask proxies to hold none of them back", async (_, fields) => {
    const own: Record<string, string>[] = [{}, { "x-accel-buffering": "yes" }];
    for (const upstreams of own) {
      const headers = { "content-type": "text/event-stream; charset=utf-8", ...upstreams };
      const route = at.upstream(() => new Response("data: 1\n\n", { headers }));
      const tenant = at.tenant();
      const { id } = await tenant.agent({ ...fields, upstream_url: route.url });
      const json = { jsonrpc: "2.0", id: 1, method: "ping" };
      const answer = await tenant.send("POST", `/v1/proxy/${id}/stream`, { json });
      expect([answer.text, answer.headers.get("x-accel-buffering")]).toEqual(["data: 1\n\n", "no"]);
    }
  });
});
