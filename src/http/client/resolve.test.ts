import { describe, expect, test } from "bun:test";
import dgram from "node:dgram";
import dns from "node:dns";
import { networkInterfaces } from "node:os";
import { hostRules, parseAddress, type WrittenRules } from "../../core/host.ts";
import { OutboundError } from "./exchange.ts";
import { createResolver, type Lookup, ownAddresses } from "./outbound.ts";

const NOBODY = hostRules({ allow: [] });
const PUBLIC = "93.184.215.14";
const PUBLIC_6 = "2606:2800:21f:cb07::1";

/** Answers each look-up with the next of `answers`, the last one for ever. */
function scripted(...answers: string[][]) {
  const asked: string[] = [];
  const lookup: Lookup = async (name) => {
    const answer = answers[Math.min(asked.length, answers.length - 1)] ?? [];
    asked.push(name);
    return answer.map((address) => ({ address }));
  };
  return { lookup, asked };
}

/** Tells what is found, or why nothing is. */
function telling(resolve: ReturnType<typeof createResolver>) {
  return async (hostname: string, tenant?: string) => {
    try {
      return { ok: true, addresses: await resolve(hostname, tenant) };
    } catch (error) {
      if (!(error instanceof OutboundError)) throw error;
      return { ok: false, kind: error.kind, detail: error.message.replace(`${hostname}: `, "") };
    }
  };
}

type Options = WrittenRules & { readonly trusted?: boolean; readonly cacheMs?: number };

function resolverOf(lookup: Lookup, { trusted = false, cacheMs = 0, ...written }: Options = {}) {
  const rules = trusted ? null : hostRules(written);
  return telling(createResolver({ rules, lookup, cacheMs, lookupTimeoutMs: 20 }));
}

describe("the rule for a name's addresses", () => {
  test("demands global unicast of every one", async () => {
    const mixes = [
      [PUBLIC, "10.0.0.1"],
      ["10.0.0.1", PUBLIC],
      [PUBLIC, "::1"],
      [PUBLIC_6, "64:ff9b::1.1.1.1"],
    ];
    for (const answers of [...mixes, ["127.0.0.1"], ["::ffff:8.8.8.8"], ["fe80::1%eth0"], ["what"]]) {
      const resolution = await resolverOf(scripted(answers).lookup)("mixed.test");
      expect([answers, resolution]).toMatchObject([answers, { ok: false, kind: "blocked" }]);
    }
    const good = await resolverOf(scripted([PUBLIC_6, PUBLIC, PUBLIC]).lookup)("good.test");
    expect(good).toEqual({ ok: true, addresses: [PUBLIC_6, PUBLIC] });
  });

  test("judges an address as the host without a look-up", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const resolve = resolverOf(lookup, { allow: ["10.0.0.0/8"] });
    expect(await resolve(PUBLIC)).toEqual({ ok: true, addresses: [PUBLIC] });
    expect(await resolve("10.1.1.1")).toMatchObject({ ok: true });
    expect(await resolve("[::1]")).toMatchObject({ ok: false, kind: "blocked" });
    expect(await resolve("100.100.100.200")).toMatchObject({ ok: false, kind: "blocked" });
    expect(asked).toEqual([]);
  });

  test("refuses an address that this machine has got meanwhile", async () => {
    let own: string[] = [];
    const rules = () => own.flatMap((text) => parseAddress(text) ?? []);
    const resolve = resolverOf(scripted([]).lookup, { own: rules });
    expect(await resolve(PUBLIC)).toMatchObject({ ok: true });
    own = [PUBLIC];
    expect(await resolve(PUBLIC)).toMatchObject({ kind: "blocked" });
  });

  test("exempts an exempt name whatever it resolves to, and no other", async () => {
    const resolve = resolverOf(scripted(["10.0.0.1", "::1"]).lookup, { allow: ["db.internal"] });
    expect(await resolve("db.internal")).toMatchObject({ ok: true });
    expect(await resolve("x.db.internal")).toMatchObject({ kind: "blocked" });
  });

  test("exempts an address in an exempt network whatever name led to it, and no other beside it", async () => {
    const allow = ["10.0.0.0/8"];
    expect(await resolverOf(scripted(["10.0.0.1", PUBLIC]).lookup, { allow })("a.test")).toMatchObject({
      ok: true,
    });
    expect(await resolverOf(scripted(["10.0.0.1", "::1"]).lookup, { allow })("a.test")).toMatchObject({
      kind: "blocked",
    });
  });

  test("dials what is exempt of the addresses that localhost stands for, whatever a name server says", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const dialled = async (name: string, written: WrittenRules) => {
      const resolution = await resolverOf(lookup, written)(name);
      return resolution.ok ? resolution.addresses : resolution.kind;
    };
    for (const name of ["localhost", "LOCALHOST.", "a.localhost"]) {
      expect(await dialled(name, {})).toBe("blocked");
      expect(await dialled(name, { allow: ["10.0.0.0/8", PUBLIC] })).toBe("blocked");
      expect(await dialled(name, { allow: ["127.0.0.1"] })).toEqual(["127.0.0.1"]);
      expect(await dialled(name, { allow: ["127.0.0.1", "::1"], deny: ["127.0.0.0/8"] })).toEqual(["::1"]);
    }
    expect(asked).toEqual([]);
    expect(await dialled("localhost", { allow: ["localhost"] })).toEqual([PUBLIC]);
  });

  test("lets a trusted server be anywhere", async () => {
    const resolve = resolverOf(scripted(["10.0.0.1"]).lookup, { trusted: true });
    expect(await resolve("vault.internal")).toEqual({ ok: true, addresses: ["10.0.0.1"] });
    expect(await resolve("127.0.0.1")).toMatchObject({ ok: true });
  });
});

describe("a host that is refused as well", () => {
  const own = () => [parseAddress(PUBLIC)!, parseAddress(PUBLIC_6)!];

  test("is not even looked up when its name is denied, whatever it is exempt as", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const resolve = resolverOf(lookup, { allow: ["db.test", "0.0.0.0/0"], deny: ["db.test"] });
    for (const name of ["db.test", "db.test."])
      expect(await resolve(name)).toMatchObject({ ok: false, kind: "blocked" });
    expect(asked).toEqual([]);
    expect(await resolve("other.test")).toMatchObject({ ok: true });
  });

  test("is every name that leads to a denied address, an exempt one too", async () => {
    for (const answers of [[PUBLIC], ["9.9.9.9", PUBLIC], [`::ffff:${PUBLIC}`]]) {
      const resolve = resolverOf(scripted(answers).lookup, {
        allow: ["a.test", "::/0"],
        deny: ["93.184.215.0/24"],
      });
      expect(await resolve("a.test")).toMatchObject({ ok: false, kind: "blocked" });
    }
  });

  test("is an address of this machine, unless it or the name is exempt", async () => {
    for (const answer of [PUBLIC, PUBLIC_6]) {
      const { lookup } = scripted([answer]);
      expect(await resolverOf(lookup, { own })("a.test")).toMatchObject({ ok: false, kind: "blocked" });
      expect(await resolverOf(lookup, { own, allow: [answer] })("a.test")).toMatchObject({ ok: true });
      expect(await resolverOf(lookup, { own, allow: ["a.test"] })("a.test")).toMatchObject({ ok: true });
      expect(await resolverOf(lookup, { own, allow: ["b.test"] })("a.test")).toMatchObject({ ok: false });
    }
  });
});

/** A name server on loopback: names that start with good have an address of each family, all others no answer. */
async function nameServer(): Promise<{ address: string } & AsyncDisposable> {
  const socket = dgram.createSocket("udp4");
  socket.on("message", (query, from) => {
    const end = query.indexOf(0, 12) + 5;
    const type = query.readUInt16BE(end - 4);
    if (!query.subarray(12, end).includes("\x04good")) return;
    // The question again, then one record: a pointer to its name, type, class, TTL 60 and the address.
    const header = Buffer.from([query[0] ?? 0, query[1] ?? 0, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    const data = type === 28 ? "26062800022000010248189325c81946" : "5db8d822";
    const record = `c00c${type === 28 ? "001c" : "0001"}00010000003c00${type === 28 ? "10" : "04"}${data}`;
    socket.send(Buffer.concat([header, query.subarray(12, end), Buffer.from(record, "hex")]), from.port, from.address);
  });
  const { promise, resolve } = Promise.withResolvers<void>();
  socket.bind(0, "127.0.0.1", resolve);
  await promise;
  return {
    address: `127.0.0.1:${socket.address().port}`,
    async [Symbol.asyncDispose]() {
      socket.close();
    },
  };
}

describe("a look-up of a name", () => {
  test("gives no permission without an answer", async () => {
    expect(await resolverOf(scripted([]).lookup)("empty.test")).toMatchObject({
      ok: false,
      kind: "unreached",
    });
    expect(await resolverOf(scripted([]).lookup, { trusted: true })("empty.test")).toMatchObject({
      ok: false,
    });
  });

  test("means that the upstream was not reached when the resolver fails or never answers", async () => {
    const failing: Lookup = () => Promise.reject(Object.assign(new Error("secret"), { code: "ENOTFOUND" }));
    expect(await resolverOf(failing)("gone.test")).toEqual({
      ok: false,
      kind: "unreached",
      detail: "DNS: ENOTFOUND",
    });
    const hanging: Lookup = () => Promise.withResolvers<never>().promise;
    expect(await resolverOf(hanging)("slow.test")).toMatchObject({
      kind: "unreached",
      detail: "DNS: timed out",
    });
  });

  test("asks the system's resolver by default", async () => {
    const resolve = telling(createResolver({ rules: NOBODY }));
    expect(await resolve("localhost")).toMatchObject({ ok: false, kind: "blocked" });
    expect(await resolve("nowhere.invalid")).toMatchObject({ ok: false, kind: "unreached" });
  });

  test("holds up no other name when it never gets an answer", async () => {
    const before = dns.getServers();
    await using server = await nameServer();
    dns.setServers([server.address]);
    try {
      const resolve = telling(createResolver({ rules: NOBODY, lookupTimeoutMs: 1000 }));
      const stuck = Array.from({ length: 20 }, (_, index) =>
        resolve(`${index}.slow.${index % 2 === 0 ? "test" : "local"}`),
      );
      for (const name of ["good.test", "good.cluster.local"]) {
        const addresses = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"];
        expect([name, await resolve(name)]).toEqual([name, { ok: true, addresses }]);
      }
      for (const resolution of await Promise.all(stuck)) {
        expect(resolution).toMatchObject({ ok: false, kind: "unreached" });
      }
    } finally {
      dns.setServers(before);
    }
  });
});

describe("the addresses of a name", () => {
  test("are judged again at each look-up", async () => {
    const resolve = resolverOf(scripted([PUBLIC], ["127.0.0.1"], [PUBLIC_6]).lookup);
    expect(await resolve("rebind.test")).toEqual({ ok: true, addresses: [PUBLIC] });
    expect(await resolve("rebind.test")).toMatchObject({ kind: "blocked" });
    expect(await resolve("rebind.test")).toEqual({ ok: true, addresses: [PUBLIC_6] });
  });

  test("are used again for a while when they were good, and never when they were refused", async () => {
    const { lookup, asked } = scripted(["127.0.0.1"], [PUBLIC], ["127.0.0.1"]);
    const resolve = resolverOf(lookup, { cacheMs: 60_000 });
    expect(await resolve("rebind.test")).toMatchObject({ kind: "blocked" });
    for (let i = 0; i < 3; i++) expect(await resolve("rebind.test")).toEqual({ ok: true, addresses: [PUBLIC] });
    expect(asked.length).toBe(2);
  });

  test("are looked up once for all who want them together", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const resolve = resolverOf(lookup);
    await Promise.all([resolve("a.test"), resolve("a.test"), resolve("b.test")]);
    expect(asked).toEqual(["a.test", "b.test"]);
  });

  test("are kept for a bounded number of names", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const resolve = resolverOf(lookup, { cacheMs: 60_000 });
    for (let i = 0; i <= 1024; i++) await resolve(`${i}.test`);
    await resolve("1024.test");
    expect(asked.length).toBe(1025);
    await resolve("0.test");
    expect(asked.length).toBe(1026);
  });

  test("are not lost to a tenant because another has thousands of names", async () => {
    const { lookup, asked } = scripted([PUBLIC]);
    const resolve = resolverOf(lookup, { cacheMs: 60_000 });
    for (let i = 0; i < 100; i++) await resolve(`${i}.neighbour.test`, "neighbour");
    for (let i = 0; i < 3000; i++) await resolve(`${i}.hostile.test`, "hostile");
    expect(asked.length).toBe(3100);
    for (let i = 0; i < 100; i++) await resolve(`${i}.neighbour.test`, "neighbour");
    expect(asked.length).toBe(3100);
  });

  test("are looked up for a tenant though another has names that get no answer", async () => {
    const asked: string[] = [];
    const lookup: Lookup = (name) => {
      asked.push(name);
      return name.startsWith("slow") ? Promise.withResolvers<never>().promise : scripted([PUBLIC]).lookup(name);
    };
    const resolve = resolverOf(lookup);
    const slow = Array.from({ length: 2000 }, (_, i) => resolve(`slow-${i}.test`, "hostile"));
    slow.push(Promise.resolve(resolve("good.test", "hostile")));
    expect(asked.length).toBe(448);
    expect(await resolve("good.test", "neighbour")).toEqual({ ok: true, addresses: [PUBLIC] });
    expect(asked).toHaveLength(449);
    // They have their turn when the first have been given up.
    expect(await slow.at(-1)).toMatchObject({ ok: true });
    expect(asked).toHaveLength(2002);
  });
});

test("every address of the machine's interfaces is known as its own", () => {
  const own = ownAddresses()();
  const listed = Object.values(networkInterfaces()).flatMap((addresses = []) => addresses);
  const missing = listed.filter(({ address }) => {
    const parsed = parseAddress(address);
    return parsed === null || !own.some((each) => Buffer.compare(each, parsed) === 0);
  });
  expect(missing).toEqual([]);
  expect(own.length).toBe(listed.length);
});

test("the machine's interfaces are read again after a while, and not for each question", () => {
  let time = 0;
  const own = ownAddresses(() => time);
  const first = own();
  time = 4_999;
  expect(own()).toBe(first);
  time = 5_000;
  expect(own()).not.toBe(first);
  expect(own()).toEqual(first);
});
