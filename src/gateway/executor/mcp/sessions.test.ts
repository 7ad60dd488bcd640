import { describe, expect, test } from "bun:test";
import { createSessions, type Opened, type SessionLimits, type SessionTarget } from "./sessions.ts";

const LIMITS: SessionLimits = { sessions_max: 4, idle_ms: 0, sessionless_ms: 60_000 };

function target(url = "http://a/"): SessionTarget {
  return { tenant: "acme", url, credential: null, offer: "2025-11-25", via: null };
}

/** A wire that opens numbered sessions, and records. */
function setUp(limits: Partial<SessionLimits> = {}, id: (count: number) => string | null = (count) => `s${count}`) {
  const closed: Array<string | null> = [];
  let count = 0;
  const gate = { wait: Promise.resolve() };
  const sessions = createSessions(
    {
      async open(): Promise<Opened | null> {
        const number = ++count;
        await gate.wait;
        return { id: id(number), version: "2025-11-25" };
      },
      async close(_, session) {
        closed.push(session.id);
      },
    },
    { ...LIMITS, ...limits },
  );
  return { sessions, closed, gate, opened: () => count };
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
});
