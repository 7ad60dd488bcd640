// What is sent for calls that have ended: `notifications/cancelled`, and the DELETE of sessions.
import { afterEach, expect, test } from "bun:test";
import { client, keep, LIST, stopKept } from "../../../../test/support/mcp/mcp-calls.ts";
import { startSlowServer } from "../../../../test/support/mcp/slow-opening.ts";
import { until } from "../../../../test/support/until.ts";
import { Stop } from "../../../kernel/wait.ts";

afterEach(stopKept);

const CALLS = 150;
/** More than may be sent at once, since the server hears of the end of a connection after others have begun. */
const FEW = 100;
const CANCELLED = "notifications/cancelled";

test("a server that takes no word of cancelled calls has few connections of them, and others are told", async () => {
  const server = keep(await startSlowServer((method) => ["tools/call", CANCELLED].includes(method)));
  const other = keep(await startSlowServer((method) => method === "tools/call"));
  const { send } = client();
  const stop = new Stop();
  const long = { ...LIST, method: "tools/call" };
  for (const to of [server, other]) await send(to.url, LIST, { tenant: to.url, session_key: to.url });
  const begin = (to: typeof server) => send(to.url, long, { tenant: to.url, session_key: to.url }, stop);
  const calls = Array.from({ length: CALLS }, () => begin(server));
  await until(() => server.waiting("tools/call").now === CALLS);
  calls.push(begin(other));
  await until(() => other.waiting("tools/call").now === 1);
  stop.abort("cancelled");
  for (const { error_class } of await Promise.all(calls)) expect(error_class).toBe("cancelled");
  // It would come too late, if it waited for those that hang.
  await until(() => other.seen(CANCELLED) === 1 && server.waiting(CANCELLED).most > 0);
  await until(() => server.waiting(CANCELLED).now === 0);
  expect(server.waiting(CANCELLED).most).toBeLessThan(FEW);
});

test("callers that open sessions of their own leave few connections to a server that does not close them", async () => {
  const server = keep(await startSlowServer((method) => method === "DELETE"));
  const { send } = client();
  const opening = { ...LIST, method: "initialize" };
  for (const outcome of await Promise.all(Array.from({ length: CALLS }, () => send(server.url, opening)))) {
    expect(outcome.status).toBe("succeeded");
  }
  await until(() => server.waiting("DELETE").now > 0);
  await until(() => server.waiting("DELETE").now === 0);
  expect(server.waiting("DELETE").most).toBeLessThan(FEW);
});

test("a session whose first notification is not answered is closed when its call is cancelled", async () => {
  const server = keep(await startSlowServer((method) => method === "notifications/initialized"));
  const stop = new Stop();
  const call = client().send(server.url, LIST, {}, stop);
  await until(() => server.seen("notifications/initialized") === 1);
  stop.abort("cancelled");
  expect((await call).error_class).toBe("cancelled");
  await until(() => server.seen("DELETE") === 1);
  await until(() => server.waiting("notifications/initialized").now === 0);
});
