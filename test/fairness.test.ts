// One tenant's stuck upstreams are nobody else's trouble: however many calls hang, the next agent is served.
import { expect, test } from "bun:test";
import { startGateway } from "./support/gateway/gateway.ts";
import { startUpstream } from "./support/http/upstream.ts";

const STUCK_AGENTS = 12;
/** More than an agent may have running at a time. */
const CALLS_EACH = 80;
/** What the runtime's own client would have running at a time. */
const BUN_FETCHES_MAX = 256;

test("hundreds of calls that hang hold up nobody else's", async () => {
  let hanging = 0;
  const release = Promise.withResolvers<void>();
  const stuck = startUpstream(async () => {
    hanging++;
    await release.promise;
    return new Response("late");
  });
  const quick = startUpstream(() => new Response("at once"));
  try {
    await using gateway = await startGateway();
    const headersOf = async (tenant: string) => ({
      authorization: `Bearer ${await gateway.token({ tenant, user: "alice" })}`,
      "content-type": "application/json",
    });
    const [stuckTenant, quickTenant] = [await headersOf("stuck"), await headersOf("quick")];
    const post = (headers: Record<string, string>, path: string, body: unknown) =>
      fetch(`${gateway.url}${path}`, { method: "POST", headers, body: JSON.stringify(body) });
    const register = async (headers: Record<string, string>, name: string, upstream_url: string) => {
      const response = await post(headers, "/v1/agents", { name, upstream_url });
      return ((await response.json()) as { id: string }).id;
    };

    for (let agent = 0; agent < STUCK_AGENTS; agent++) {
      const id = await register(stuckTenant, `stuck ${agent}`, stuck.url);
      const calls = Array.from({ length: CALLS_EACH }, () => post(stuckTenant, `/v1/proxy/${id}`, {}));
      for (const response of await Promise.all(calls)) expect(response.status).toBe(202);
    }
    const id = await register(quickTenant, "quick", quick.url);
    const answer = await post({ ...quickTenant, prefer: "wait=10" }, `/v1/proxy/${id}`, {});
    const poll = await fetch(`${gateway.url}${answer.headers.get("location")}`, { headers: quickTenant });
    expect(await poll.json()).toMatchObject({ status: "succeeded", upstream_status: 200 });

    const running = await fetch(`${gateway.url}/v1/invocations?status=running`, { headers: stuckTenant });
    expect(await running.json()).toMatchObject({ total: STUCK_AGENTS * 64 });
    expect(hanging).toBeGreaterThan(BUN_FETCHES_MAX);
  } finally {
    release.resolve();
    await Promise.all([stuck.stop(), quick.stop()]);
  }
});
