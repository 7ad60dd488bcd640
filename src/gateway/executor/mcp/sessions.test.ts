import { describe, expect, test } from "bun:test";
import { Stop, type StopSignal } from "../../../kernel/wait.ts";
import { createSessions, type Opened, type Session, type SessionLimits, type SessionTarget } from "./sessions.ts";

const LIMITS: SessionLimits = { sessions_max: 4, idle_ms: 0, sessionless_ms: 60_000, open_ms: 60_000 };

function target(url = "http://a/"): SessionTarget {
  return { tenant: "acme", url, credential: null, offer: "2025-11-25", via: null };
}

/** A wire that opens numbered sessions, and records. */
function setUp(limits: Partial<SessionLimits> = {}, id: (count: number) => string | null = (count) => `s${count}`) {
  const closed: Array<string | null> = [];
  const signals: StopSignal[] = [];
  const gate = { wait: Promise.resolve() };
  const sessions = createSessions(
    {
      async open(_, signal): Promise<Opened | null> {
        const number = signals.push(signal);
        await gate.wait;
        return { id: id(number), version: "2025-11-25" };
      },
      async close(_, session) {
        closed.push(session.id);
      },
    },
    { ...LIMITS, ...limits },
  );
  /** The waits of a call that goes on, unless there is a signal. */
  const find = (key: string, signal: StopSignal = new Stop()) => sessions.find(key, target(), signal);
  const renew = (
    key: string,
    to: SessionTarget,
    refused: Session | null,
    isForgotten: boolean,
    signal: StopSignal = new Stop(),
  ) => sessions.renew(key, to, refused, isForgotten, signal);
  return { sessions: { ...sessions, find, renew }, closed, gate, signals, opened: () => signals.length };
}

/** The wait of a call that is cancelled. */
async function leaves(stop: Stop, wait: Promise<unknown>): Promise<void> {
  stop.abort("cancelled");
  expect(await wait.catch((reason) => reason)).toBe("cancelled");
}

describe("sessions of MCP servers", () => {
  test("are opened once for all who wait, also for those who only look", async () => {
    const { sessions, gate, opened } = setUp();
    const { promise, resolve } = Promise.withResolvers<void>();
    gate.wait = promise;
    const asked = [1, 2, 3].map(() => sessions.renew("k", target(), null, false));
    const looked = sessions.find("k");
    resolve();
    const [first, ...others] = await Promise.all([...asked, looked]);
    expect(others.every((session) => session === first)).toBe(true);
    expect(opened()).toBe(1);
  });

  test("are replaced once, whoever was refused first", async () => {
    const { sessions, closed, opened } = setUp();
    const old = await sessions.renew("k", target(), null, false);
    const first = await sessions.renew("k", target(), old, true);
    const second = await sessions.renew("k", target(), old, true);
    expect(second).toBe(first);
    expect([first?.id, opened(), closed]).toEqual(["s2", 2, []]);
  });

  test("never give out an id twice", async () => {
    const { sessions } = setUp();
    const session = await sessions.renew("k", target(), null, false);
    expect([session?.nextId(), session?.nextId(), session?.nextId()]).toEqual([2, 3, 4]);
  });

  test("are kept apart by key", async () => {
    const { sessions } = setUp();
    const a = await sessions.renew("a", target(), null, false);
    expect(await sessions.find("b")).toBeNull();
    expect(await sessions.find("a")).toBe(a);
  });

  test("are closed when too many, the longest unused first", async () => {
    const { sessions, closed } = setUp();
    for (const key of ["a", "b", "c"]) await sessions.renew(key, target(), null, false);
    await sessions.use(await sessions.find("a"), async () => {});
    await sessions.renew("d", target(), null, false);
    expect(closed).toEqual(["s2"]);
    expect(await sessions.find("b")).toBeNull();
  });

  test("do not close for those of another tenant, unless there are very many tenants", async () => {
    const { sessions, closed } = setUp({ sessions_max: 8 });
    const of = (tenant: string) => ({ ...target(), tenant });
    await sessions.renew("good", of("good"), null, false);
    for (let at = 0; at < 20; at++) await sessions.renew(`hostile-${at}`, of("hostile"), null, false);
    expect(await sessions.find("good")).not.toBeNull();
    expect(closed).not.toContain("s1");
    expect(closed.length).toBeGreaterThan(13);
    for (let at = 0; at < 20; at++) await sessions.renew(`other-${at}`, of(`other-${at}`), null, false);
    expect(closed.length).toBeGreaterThan(32);
  });

  test("are closed when idle, but not while a call uses them", async () => {
    const { sessions, closed } = setUp();
    const used = await sessions.renew("a", target(), null, false);
    await sessions.renew("b", target(), null, false);
    await sessions.use(used, async () => {
      sessions.sweep();
      expect(closed).toEqual(["s2"]);
      expect(await sessions.find("a")).toBe(used);
    });
    sessions.sweep();
    expect(closed).toEqual(["s2", "s1"]);
  });

  test("are closed after their last call when they were replaced, unless the server forgot them", async () => {
    const { sessions, closed } = setUp();
    const old = await sessions.renew("k", target(), null, false);
    await sessions.use(old, async () => {
      await sessions.renew("k", target(), old, false);
      expect(closed).toEqual([]);
    });
    expect(closed).toEqual(["s1"]);
  });

  test("are asked for again after a while where a server had none, and such a server is never sent a close", async () => {
    const { sessions, closed } = setUp({ sessionless_ms: -1 }, () => null);
    await sessions.renew("k", target(), null, false);
    expect(await sessions.find("k")).toBeNull();
    const lasting = setUp({}, () => null);
    await lasting.sessions.renew("k", target(), null, false);
    expect((await lasting.sessions.find("k"))?.id).toBeNull();
    await lasting.sessions.close(1000);
    expect([...closed, ...lasting.closed]).toEqual([]);
  });

  test("are all closed at the end, used or not", async () => {
    const { sessions, closed } = setUp();
    const used = await sessions.renew("a", target(), null, false);
    await sessions.renew("b", target(), null, false);
    await sessions.use(used, () => sessions.close(1000));
    expect(closed.toSorted()).toEqual(["s1", "s2"]);
  });

  test("are closed too when they are being opened at the end", async () => {
    const { sessions, closed, gate } = setUp();
    const { promise, resolve } = Promise.withResolvers<void>();
    gate.wait = promise;
    const opening = sessions.renew("a", target(), null, false);
    const ended = sessions.close(1000);
    resolve();
    await Promise.all([opening, ended]);
    expect(closed).toEqual(["s1"]);
  });

  test("are no longer opened when no call waits for them, and one that comes later opens its own", async () => {
    const { sessions, gate, signals } = setUp();
    gate.wait = new Promise(() => {});
    const [first, second] = [new Stop(), new Stop()];
    const refused = sessions.renew("k", target(), null, false, first);
    const looks = sessions.find("k", second);
    await leaves(second, looks);
    expect(signals.map(({ aborted }) => aborted)).toEqual([false]);
    await leaves(first, refused);
    expect(signals.map(({ aborted }) => aborted)).toEqual([true]);
    expect(await sessions.find("k")).toBeNull();
    gate.wait = Promise.resolve();
    expect((await sessions.renew("k", target(), null, false))?.id).toBe("s2");
  });

  test("are opened for those who joined, whether the first one leaves or not", async () => {
    const { sessions, gate, signals, opened } = setUp();
    const { promise, resolve } = Promise.withResolvers<void>();
    gate.wait = promise;
    const first = new Stop();
    const refused = sessions.renew("k", target(), null, false, first);
    const joined = [sessions.find("k"), sessions.renew("k", target(), null, false)];
    await leaves(first, refused);
    expect(signals[0]?.aborted).toBe(false);
    resolve();
    expect((await Promise.all(joined)).map((session) => session?.id)).toEqual(["s1", "s1"]);
    expect([opened(), (await sessions.find("k"))?.id]).toEqual([1, "s1"]);
  });

  test("are closed when they come after the last call has left, and count no more", async () => {
    const { sessions, closed, gate } = setUp();
    for (let at = 1; at <= 8; at++) {
      const { promise, resolve } = Promise.withResolvers<void>();
      gate.wait = promise;
      const stop = new Stop();
      await leaves(stop, sessions.renew("k", target(), null, false, stop));
      resolve();
      await promise;
    }
    gate.wait = Promise.resolve();
    const kept = await sessions.renew("k", target(), null, false);
    expect(closed).toEqual(["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"]);
    expect(await sessions.find("k")).toBe(kept);
  });

  test("are no longer opened when that takes too long, however many wait", async () => {
    const { sessions, gate, signals } = setUp({ open_ms: 1 });
    const { promise, resolve } = Promise.withResolvers<void>();
    gate.wait = promise;
    const asked = [sessions.renew("k", target(), null, false), sessions.find("k")];
    signals[0]?.addEventListener("abort", resolve);
    expect(await Promise.all(asked)).toEqual([null, null]);
    expect(signals).toHaveLength(1);
  });
});
