// Gateways that tell each other at once what has ended. It is a help and no more: how soon they learn of it is not tried
// here, but that what is told is right, and that nothing depends on it.
import { expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import { openReplicas } from "../support/gateway/replicas.ts";
import { startUpstream } from "../support/http/upstream.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { until } from "../support/until.ts";

setDefaultTimeout(120_000);

test("who waits at one gateway learns of an end at another, and a cancel there stops a call here", async () => {
  const databaseUrl = await (await startPostgres()).freshDatabase();
  await using replicas = await openReplicas(databaseUrl);
  const env = { TOLLGATE_LISTEN_URL: databaseUrl };
  // The last one has nobody to listen to, and takes part all the same.
  const deaf = { TOLLGATE_LISTEN_URL: "postgres://nobody@127.0.0.1:1/none" };
  const [one, other, third] = await Promise.all([
    replicas.start({ env }),
    replicas.start({ env }),
    replicas.start({ env: deaf }),
  ]);
  const heard: string[] = [];
  await using client = new SQL(databaseUrl, { max: 1 });
  await client.listen("tollgate", (payload) => void heard.push(payload));

  const held = Promise.withResolvers<void>();
  const aborted = Promise.withResolvers<void>();
  const upstream = startUpstream(async (request) => {
    request.signal.addEventListener("abort", () => aborted.resolve());
    if (request.url.endsWith("/held")) await held.promise;
    if (request.url.endsWith("/stuck")) await new Promise(() => {});
    return Response.json({ hello: "world" });
  });
  try {
    const tenant = await replicas.tenant(one);
    const at = async (url: string, path: string, init: RequestInit = {}) => {
      const headers = { ...tenant.headers, ...(init.headers as Record<string, string>) };
      const response = await fetch(`${url}${path}`, { ...init, headers });
      return { status: response.status, body: (await response.json()) as { readonly status?: string } };
    };
    const id = await tenant.agent({ upstream_url: `${upstream.url}held` });
    const call = invocationOf(await tenant.send("POST", `/v1/proxy/${id}`, {}));
    const wait = { headers: { prefer: "wait=60" } };
    const waiting = [other, third].map(({ url }) => at(url, `/v1/proxy/${id}/invocations/${call}`, wait));
    held.resolve();
    for (const { body } of await Promise.all(waiting)) expect(body).toMatchObject({ status: "succeeded" });

    const stuck = await tenant.agent({ upstream_url: `${upstream.url}stuck` });
    const running = invocationOf(await tenant.send("POST", `/v1/proxy/${stuck}`, {}));
    const path = `/v1/proxy/${stuck}/invocations/${running}`;
    await until(async () => (await at(one.url, path)).body.status === "running");
    expect((await at(other.url, `${path}/cancel`, { method: "POST" })).status).toBe(200);
    await aborted.promise;
    await one.stop();
    await until(() => heard.some((payload) => payload.endsWith(" left")));
    // IDs, and nothing else of any tenant.
    for (const payload of heard) expect(payload).toMatch(/^rep_[\w-]+ (left|here|inv_[\w-]+(,inv_[\w-]+)*)$/);
    const told = heard.join().match(/inv_[\w-]+/g);
    expect(told).toContain(call);
    expect(told).toContain(running);
    expect(third.log()).toContain("announcements_not_heard");
    expect(third.log()).not.toContain("nobody@");
  } finally {
    await upstream.stop();
  }
});
