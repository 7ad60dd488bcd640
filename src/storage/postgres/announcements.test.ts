import { expect, test } from "bun:test";
import { startRelay } from "../../../test/support/http/relay.ts";
import { startPostgres } from "../../../test/support/stores/postgres.ts";
import { silentLog } from "../../core/log.ts";
import { createAnnouncements } from "./announcements.ts";
import { postgresClient } from "./pool.ts";

const until = async (isDone: () => boolean, act = () => {}) => {
  while (!isDone()) {
    act();
    await Bun.sleep(20);
  }
};

function listener(url: string, replica: string, times: { checkEveryMs?: number; answerMsMax?: number } = {}) {
  const heard: string[] = [];
  const announcements = createAnnouncements({
    url,
    replica,
    log: silentLog,
    ...times,
    ended: (id) => void heard.push(id),
    left: () => void heard.push("left"),
  });
  return { heard, ...announcements };
}

test("replicas hear of each other's ended calls and leaving, not of their own, also after a lost connection", async () => {
  const url = await (await startPostgres()).freshDatabase();
  const [one, other] = [listener(url, "rep_1"), listener(url, "rep_2")];
  // Whoever listens is not known to who tells, so it is told until it is heard.
  await until(
    () => other.heard.includes("inv_1"),
    () => one.ended("inv_1"),
  );
  await other.left();
  await until(() => one.heard.includes("left"));
  expect([new Set(one.heard), new Set(other.heard)]).toEqual([new Set(["left"]), new Set(["inv_1"])]);

  await using client = postgresClient(url);
  await client.unsafe(
    "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid() and datname = current_database()",
  );
  await until(
    () => other.heard.includes("inv_2"),
    () => one.ended("inv_2"),
  );
  // What others say on the channel, in whatever form, is passed over.
  // Each was to hold the event loop for a second, so all of them for longer than this test may take.
  const long = Array.from({ length: 40 }, (_, i) => `rep_3 ${"inv_3".repeat(1_500)};${i}`);
  for (const payload of ["", "rep_3", "rep_3 ", "rep_3 inv_3;drop", ...long, "left", "rep_3 inv_3,inv_4"]) {
    await client.notify("tollgate", payload);
  }
  await until(() => other.heard.includes("inv_4"));
  expect(new Set(other.heard)).toEqual(new Set(["inv_1", "inv_2", "inv_3", "inv_4"]));
  await Promise.all([one.close(), other.close()]);
});

test("calls that end together are told of together", async () => {
  const url = await (await startPostgres()).freshDatabase();
  await using client = postgresClient(url);
  const payloads: string[] = [];
  await client.listen("tollgate", (payload) => void (payload !== "rep_1 here" && payloads.push(payload)));
  const one = listener(url, "rep_1");
  const ids = Array.from({ length: 500 }, (_, i) => `inv_${i}`);
  for (const id of ids) one.ended(id);
  await until(() => payloads.length >= 2);
  await one.close();
  // The first goes at once, as many as fit go with the next, and the rest is found by looking.
  expect(payloads.slice(0, 2)).toEqual([`rep_1 ${ids[0]}`, `rep_1 ${ids.slice(1, 181).join()}`]);
});

test("replicas hear of each other again when what they were connected to hangs, or has become read-only", async () => {
  const server = await startPostgres();
  const url = new URL(await server.freshDatabase());
  const relay = startRelay(server.port);
  const database = url.pathname.slice(1);
  url.port = `${relay.port}`;
  const times = { checkEveryMs: 50, answerMsMax: 500 };
  const [one, other] = [listener(url.href, "rep_1", times), listener(url.href, "rep_2", times)];
  const hears = (id: string) =>
    until(
      () => other.heard.includes(id),
      () => one.ended(id),
    );
  await hears("inv_1");
  relay.forsake();
  await hears("inv_2");
  const connections = relay.connections();
  await using client = postgresClient(server.url(database));
  await client.unsafe(`alter database ${database} set default_transaction_read_only = on`);
  // What is connected from now on finds a server that is read-only, and looks for another one.
  relay.cut();
  await relay.connected(connections + 4);
  await client.unsafe(`begin read write; alter database ${database} reset default_transaction_read_only; commit`);
  await hears("inv_3");
  await Promise.all([one.close(), other.close()]);
  relay.stop();
});
