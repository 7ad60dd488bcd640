// A gateway behind PgBouncer: the pooler dies under load and comes back, and the time limits hold through it.
import { describe, expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import { silentLog } from "../../src/core/log.ts";
import { openPostgres } from "../../src/storage/postgres/store.ts";
import { openReplicas } from "../support/gateway/replicas.ts";
import { startUpstream } from "../support/http/upstream.ts";
import { holdTable } from "../support/stores/database-faults.ts";
import { invocationOf } from "../support/stores/owed-calls.ts";
import { missingPgBouncer, startPgBouncer } from "../support/stores/pgbouncer.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { agentIds, clock, outcome } from "../support/stores/stores.ts";
import { until } from "../support/until.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const missing = missingPgBouncer();
const [SENDERS, DEATHS] = [8, 3];
/** The server gives a statement up after 10 s; so much more for a busy machine. */
const GONE_MS_MAX = 20_000;

describe.skipIf(missing !== null)(`behind PgBouncer${missing === null ? "" : ` (not tried: ${missing})`}`, () => {
  test.concurrent("a pooler that dies under load costs no call that was accepted, and none is made twice", async () => {
    const server = await startPostgres();
    await using bouncer = await startPgBouncer(server.port);
    await using replicas = await openReplicas(bouncer.through(await server.freshDatabase()));
    const gateway = await replicas.start();
    const tenant = await replicas.tenant(gateway);
    const made = new Map<string, number>();
    const upstream = startUpstream(async (request) => {
      const call = await request.text();
      made.set(call, (made.get(call) ?? 0) + 1);
      return Response.json({ hello: "world" });
    });
    await using _stop = { [Symbol.asyncDispose]: () => upstream.stop() };
    const id = await tenant.agent({ upstream_url: upstream.url });
    const accepted = new Map<string, string>();
    const refusals = new Set<number>();
    let isOver = false;
    let n = 0;
    const sendOn = async () => {
      while (!isOver) {
        const json = { n: n++ };
        const answer = await tenant.send("POST", `/v1/proxy/${id}`, json);
        if (answer.status === 202) accepted.set(JSON.stringify(json), invocationOf(answer));
        else refusals.add(answer.status);
      }
    };
    const senders = Array.from({ length: SENDERS }, sendOn);
    for (let death = 0; death < DEATHS; death++) {
      const before = accepted.size;
      await until(() => accepted.size >= before + 50);
      await bouncer.kill();
      await until(() => refusals.has(503));
      refusals.delete(503);
      await bouncer.restart();
    }
    const before = accepted.size;
    await until(() => accepted.size >= before + 50);
    isOver = true;
    await Promise.all(senders);
    refusals.delete(503);
    expect([...refusals]).toEqual([]);
    for (const [call, invocation] of accepted) {
      // A call that was at its upstream when its end could not be stored waits until that is.
      const { status } = await tenant.poll(id, invocation, 60);
      expect([call, status, made.get(call)]).toEqual([call, "succeeded", 1]);
    }
    // What was refused was not made behind its caller's back.
    expect([...made.keys()].filter((call) => !accepted.has(call))).toEqual([]);
  });

  test.concurrent("a statement that hangs is given up by the store in its time, and by the server soon after", async () => {
    const server = await startPostgres();
    const databaseUrl = await server.freshDatabase();
    await using bouncer = await startPgBouncer(server.port);
    const store = await openPostgres({
      databaseUrl: bouncer.through(databaseUrl),
      clock,
      log: silentLog,
      callMsMax: 500,
    });
    const letGo = await holdTable(databaseUrl, "agents");
    const asked = Array.from({ length: 20 }, () => outcome(agentIds(store)));
    asked.push(outcome(store.write(({ db, tables }) => db.update(tables.agents).set({ suspended: true }))));
    expect(new Set(await Promise.all(asked))).toEqual(new Set(["unavailable"]));
    await using watcher = new SQL(databaseUrl, { max: 1, database: new URL(databaseUrl).pathname.slice(1) });
    const hanging = async () => {
      const [row] = await watcher`select count(*)::int as n from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'`;
      return Number(row.n);
    };
    expect(await hanging()).toBeGreaterThan(0);
    const startedAt = performance.now();
    while ((await hanging()) > 0) {
      expect(performance.now() - startedAt).toBeLessThan(GONE_MS_MAX);
      await Bun.sleep(100);
    }
    await letGo();
    expect(await agentIds(store)).toEqual([]);
    await store.close();
  });
});
