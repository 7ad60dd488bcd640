// What a crash may cost: nothing that was accepted. The gateway is killed in the middle of its work, again and
// again, and every accepted call must end all the same, with the upstream having seen none of them twice.
import { expect, test } from "bun:test";
import { eachDatabase, type Gateway, startGateway } from "./support/gateway.ts";
import { startUpstream } from "./support/upstream.ts";

const CALLS = 2000;
/** A replica that died on Postgres is known to be dead after its lease of 15 s; decisions.md allows 20 s. */
const ENDED_MS_MAX = 60_000;

interface Client {
  post(path: string, body: string): Promise<Response>;
  get<T>(path: string): Promise<T>;
}

async function clientOf(gateway: Gateway): Promise<Client> {
  const headers = {
    authorization: `Bearer ${await gateway.token({ tenant: "acme", user: "alice" })}`,
    "content-type": "application/json",
  };
  return {
    post: (path, body) => fetch(`${gateway.url}${path}`, { method: "POST", headers, body }),
    get: async <T>(path: string) => (await (await fetch(`${gateway.url}${path}`, { headers })).json()) as T,
  };
}

interface Poll {
  readonly status: string;
  readonly error_class: string | null;
  readonly response_body_b64?: string;
}

/** Holds each poll until the call has ended, so that nothing is asked in a loop. */
async function untilEnded(client: Client, path: string): Promise<Poll> {
  const deadline = performance.now() + ENDED_MS_MAX;
  for (;;) {
    const poll = await client.get<Poll>(path);
    if (poll.status === "succeeded" || poll.status === "failed") return poll;
    if (performance.now() > deadline) throw new Error(`${path} is still ${poll.status}`);
    await Bun.sleep(250);
  }
}

eachDatabase((database) => {
  test("killed in the middle of 2,000 accepted calls, it ends every one and repeats none", async () => {
    const seen = new Map<string, number>();
    const halfway = Promise.withResolvers<void>();
    await using upstream = stopping(
      startUpstream(async (request) => {
        const id = request.headers.get("x-service-invocation-id") ?? "";
        seen.set(id, (seen.get(id) ?? 0) + 1);
        if (seen.size === CALLS / 4) halfway.resolve();
        // Long enough that calls are running whenever the kill comes.
        await Bun.sleep(20);
        return Response.json({ echo: await request.json() });
      }),
    );
    await using gateway = await startGateway({ database });
    const client = await clientOf(gateway);
    const created = await client.post(
      "/v1/agents",
      JSON.stringify({ name: "a", upstream_url: upstream.url }),
    );
    const { id: agent } = (await created.json()) as { id: string };

    const accepted = new Map<string, number>();
    const callers = Array.from({ length: 32 }, async (_, lane) => {
      for (let n = lane; n < CALLS; n += 32) {
        try {
          const response = await client.post(`/v1/proxy/${agent}`, JSON.stringify({ n }));
          if (response.status !== 202) continue;
          accepted.set(((await response.json()) as { invocation_id: string }).invocation_id, n);
        } catch {
          return;
        }
      }
    });
    await halfway.promise;
    await gateway.kill9();
    await Promise.all(callers);

    await gateway.restart();
    const again = await clientOf(gateway);
    const ends = await Promise.all(
      [...accepted].map(async ([id, n]) => ({
        id,
        n,
        poll: await untilEnded(again, `/v1/proxy/${agent}/invocations/${id}`),
      })),
    );
    for (const { id, n, poll } of ends) {
      expect(seen.get(id) ?? 0).toBeLessThanOrEqual(1);
      if (poll.status === "succeeded") {
        expect(JSON.parse(atob(poll.response_body_b64 ?? ""))).toEqual({ echo: { n } });
      } else {
        // Only what was running when the process died: it may have reached the upstream, so it is not sent again.
        expect(poll.error_class).toBe("internal");
      }
    }
    const failed = ends.filter(({ poll }) => poll.status === "failed").length;
    expect(failed).toBeLessThanOrEqual(64);
    expect(failed).toBeGreaterThan(0);
    expect(Math.max(...seen.values())).toBe(1);

    // The totals of the history came through the crash as exact as the rows.
    for (const status of ["pending", "running", "succeeded", "failed"]) {
      const page = await again.get<{ total: number }>(`/v1/invocations?status=${status}&limit=1`);
      const counted = await again.get<{ total: number }>(
        `/v1/invocations?status=${status}&limit=1&since=2020-01-01T00:00:00Z`,
      );
      expect(page.total).toBe(counted.total);
    }
  }, 120_000);
});

function stopping<U extends { stop(): Promise<void> }>(upstream: U): U & AsyncDisposable {
  return Object.assign(upstream, { [Symbol.asyncDispose]: () => upstream.stop() });
}
