// The mutual-TLS port on real sockets: who gets in, who is refused in the handshake, and what strange clients
// can't do.

import { Database } from "bun:sqlite";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { X509Certificate } from "node:crypto";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { join } from "node:path";
import type { TLSSocket } from "node:tls";
import { addAccount, fingerprintOf, removeAccount, setEnabled } from "../src/facilitator/accounts.ts";
import {
  type Client,
  head,
  SETTLED,
  settleBody,
  settleRequest,
  startPort,
} from "./support/http/mutual-tls.ts";
import { makePki, type TestIdentity } from "./support/http/pki.ts";

type Port = Awaited<ReturnType<typeof startPort>>;

/** The ports on which this process listens; the tests of a run share one. */
function listening(): Set<number> {
  // Linux: the sockets of this process that listen.
  const inodes = new Set<string>();
  for (const fd of readdirSync("/proc/self/fd")) {
    try {
      inodes.add(/socket:\[(\d+)\]/.exec(readlinkSync(`/proc/self/fd/${fd}`))?.[1] ?? "");
    } catch {}
  }
  const rows = readFileSync("/proc/net/tcp", "utf8").split("\n");
  const cells = rows.map((row) => row.trim().split(/\s+/));
  const own = cells.filter((row) => row[3] === "0A" && inodes.has(row[9] ?? ""));
  return new Set(own.map((row) => Number.parseInt(row[1]?.split(":")[1] ?? "", 16)));
}

let before: ReadonlySet<number>;
let port: Port;
beforeAll(async () => {
  before = listening();
  port = await startPort({ handshakeMs: 600, idleMs: 1_500, headMs: 600, bodyMs: 600, flushMs: 600 });
});
afterAll(() => port.stop());

const JSON_HEADERS = { "content-type": "application/json" };
const settle = (
  identity: TestIdentity,
  body = settleBody(),
  headers: Record<string, string> = JSON_HEADERS,
) => port.fetch("/settle", identity, { method: "POST", body, headers });

const until = async (holds: () => boolean) => {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve));
};

/** For servers with a P-256 key: no client at hand speaks the old versions. */
function clientHello(version: number): Buffer {
  const bytes = (hex: string) => Buffer.from(hex.replaceAll(" ", ""), "hex");
  const sized = (width: number, content: Buffer) => {
    const length = Buffer.alloc(width);
    length.writeUIntBE(content.length, 0, width);
    return Buffer.concat([length, content]);
  };
  const versionBytes = bytes(version.toString(16).padStart(4, "0"));
  const ciphers = bytes("c009 c00a c013 c014 002f");
  const extensions = bytes("000a 0004 0002 0017 000b 0002 01 00");
  const body = [versionBytes, Buffer.alloc(32, 7), sized(1, bytes("")), sized(2, ciphers), bytes("01 00")];
  const hello = Buffer.concat([bytes("01"), sized(3, Buffer.concat([...body, sized(2, extensions)]))]);
  return Buffer.concat([bytes("16"), versionBytes, sized(2, hello)]);
}

const elapsed = async (promise: Promise<unknown>) => {
  const from = performance.now();
  await promise;
  return performance.now() - from;
};

describe("the handshake", () => {
  test("a certificate of the client CA that belongs to an account gets in", async () => {
    const response = await settle(port.pki.client, settleBody(), { ...JSON_HEADERS, "x-request-id": "r.1" });
    expect([response.status, await response.json()]).toEqual([200, SETTLED]);
    expect(response.headers.get("x-request-id")).toBe("r.1");
    expect(port.asked.at(-1)).toBe("acme");
    expect(port.lines).toContainEqual(
      expect.objectContaining({ event: "request", path: "/settle", account: "acme", status: 200 }),
    );
  });

  const refusals = () =>
    port.lines.filter((line) => line["event"] === "handshake_refused").map((line) => line["reason"]);

  const strangers: [string, (pki: Port["pki"]) => TestIdentity | null, string][] = [
    ["no certificate", () => null, "ERR_SSL_PEER_DID_NOT_RETURN_A_CERTIFICATE"],
    ["a certificate of an unknown CA", (pki) => pki.otherCa, "UNABLE_TO_VERIFY_LEAF_SIGNATURE"],
    ["a self-signed certificate", (pki) => pki.selfSigned, "UNABLE_TO_VERIFY_LEAF_SIGNATURE"],
    ["an expired certificate", (pki) => pki.expired, "CERT_HAS_EXPIRED"],
    ["a certificate of tomorrow", (pki) => pki.notYetValid, "CERT_NOT_YET_VALID"],
    ["a server's certificate", (pki) => pki.wrongUsage, "INVALID_PURPOSE"],
  ];

  describe.each(strangers)("%s", (_name, choose, reason) => {
    test.each(["TLSv1.2", "TLSv1.3"] as const)(
      "is refused by %s, and nothing is processed",
      async (version) => {
        const before = port.asked.length;
        port.lines.length = 0;
        const client = port.dial(choose(port.pki), { minVersion: version, maxVersion: version });
        client.socket.write(settleRequest());
        await client.closed;
        expect(client.received()).toBe("");
        expect(port.asked.length).toBe(before);
        await until(() => refusals().length > 0);
        expect(refusals()).toEqual([reason]);
      },
    );
  });

  test("in version 1.2 the client sees the handshake itself fail", async () => {
    for (const [, choose] of strangers) {
      const client = port.dial(choose(port.pki), { maxVersion: "TLSv1.2" });
      let secured = false;
      client.socket.on("secureConnect", () => {
        secured = true;
      });
      await client.closed;
      expect(secured).toBe(false);
    }
  });

  test.each(["TLSv1.2", "TLSv1.3"] as const)(
    "a client's certificate issues no further ones (%s)",
    async (version) => {
      const { client } = port.pki;
      const below = await port.pki.issueBelow("below", client);
      const [issued, issuer] = [below.cert, client.cert].map((cert) => new X509Certificate(cert));
      expect(issued!.verify(issuer!.publicKey)).toBe(true);
      port.lines.length = 0;
      const chain = { ...below, cert: below.cert + client.cert };
      const dialled = port.dial(chain, { minVersion: version, maxVersion: version });
      dialled.socket.write(settleRequest());
      await dialled.closed;
      expect(dialled.received()).toBe("");
      await until(() => refusals().length > 0);
      expect(refusals()).toEqual(["UNABLE_TO_VERIFY_LEAF_SIGNATURE"]);
    },
  );

  test("versions before 1.2 are refused", async () => {
    const client = port.dialPlain();
    client.socket.write(clientHello(0x0302));
    await client.closed;
    // An alert (21) that is fatal (2): protocol_version (70).
    const alert = Buffer.from(client.received(), "latin1");
    expect([alert[0], alert[5], alert[6]]).toEqual([21, 2, 70]);
  });

  test.each(["TLSv1.2", "TLSv1.3"] as const)("sessions of %s are not resumed", async (version) => {
    const options = { minVersion: version, maxVersion: version };
    const first = port.dial(port.pki.client, options);
    const sessions: Buffer[] = [];
    first.socket.on("session", (session) => sessions.push(session));
    first.socket.write(head("GET", "/supported"));
    expect(await first.answers(1)).toStartWith("HTTP/1.1 200");
    const session = sessions.at(-1) ?? first.socket.getSession();
    first.destroy();
    const second = port.dial(port.pki.client, { ...options, ...(session === undefined ? {} : { session }) });
    second.socket.write(head("GET", "/supported"));
    expect(await second.answers(1)).toStartWith("HTTP/1.1 200");
    expect(second.socket.isSessionReused()).toBe(false);
    second.destroy();
  });

  test("HTTP/2 is not spoken", async () => {
    const client = port.dial(port.pki.client, { ALPNProtocols: ["h2"] });
    client.socket.write("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    await client.closed;
    expect(client.received()).not.toContain("200");
  });

  test("a plain HTTP probe gets nothing", async () => {
    const client = port.dialPlain();
    client.socket.write(settleRequest());
    await client.closed;
    expect(client.received()).not.toContain("HTTP");
  });

  test("one that never comes to an end is ended", async () => {
    const client = port.dialPlain();
    // The start of a record that promises more.
    client.socket.write(Buffer.from([22, 3, 1, 2, 0, 1]));
    expect(await elapsed(client.closed)).toBeLessThan(2_000);
  });
});

describe("the account", () => {
  test("a certificate of the CA without an account is 403, whatever the body", async () => {
    const before = port.asked.length;
    for (const body of [settleBody(), "{", "x".repeat(70_000)]) {
      const response = await settle(port.pki.otherClient, body);
      expect([response.status, await response.json()]).toEqual([
        403,
        { error: "no active account has this certificate" },
      ]);
    }
    expect(port.asked.length).toBe(before);
  });

  test("disabling it is in force on an open connection, and so are enabling and removing", async () => {
    const other = await port.place.open();
    const client = port.dial(port.pki.client);
    const statuses = async () => (await client.answers(++count)).match(/HTTP\/1\.1 \d+/g)?.at(-1);
    let count = 0;
    client.socket.write(settleRequest());
    expect(await statuses()).toBe("HTTP/1.1 200");
    await setEnabled(other, port.clock, "acme", false);
    client.socket.write(settleRequest());
    expect(await statuses()).toBe("HTTP/1.1 403");
    await setEnabled(other, port.clock, "acme", true);
    client.socket.write(settleRequest());
    expect(await statuses()).toBe("HTTP/1.1 200");
    client.destroy();
    await other.close();
  });

  test("a certificate that expires while its connection is open serves no longer", async () => {
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest());
    await client.answers(1);
    const before = port.asked.length;
    port.clock.shift = 2 * 3_600_000;
    client.socket.write(settleRequest());
    await client.closed;
    port.clock.shift = 0;
    expect(port.asked.length).toBe(before);
  });

  test("the open endpoints need none", async () => {
    const supported = await port.fetch("/supported", port.pki.otherClient);
    expect(await supported.json()).toEqual({
      kinds: [
        {
          x402Version: 1,
          scheme: "exact",
          network: "base",
          asset: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
        },
      ],
    });
    const healthy = await port.fetch("/healthz", port.pki.otherClient);
    expect([healthy.status, await healthy.json()]).toEqual([200, { status: "ok" }]);
    port.answers.ready = false;
    const unhealthy = await port.fetch("/healthz", port.pki.otherClient);
    port.answers.ready = true;
    expect([unhealthy.status, await unhealthy.json()]).toEqual([
      503,
      { status: "unavailable", reason: "gas wallet low" },
    ]);
  });
});

describe("a request", () => {
  test("of another form is 400 and names the field", async () => {
    const cases: [string, Record<string, string>, RegExp][] = [
      [settleBody(), { "content-type": "text/plain" }, /^content-type:/],
      ["{", JSON_HEADERS, /^body:/],
      ["", JSON_HEADERS, /^body:/],
      [settleBody({ x402Version: 2 }), JSON_HEADERS, /^x402Version/],
      [settleBody({ paymentPayload: null }), JSON_HEADERS, /^paymentPayload/],
    ];
    const before = port.asked.length;
    for (const [body, headers, message] of cases) {
      const response = await settle(port.pki.client, body, headers);
      const { error } = (await response.json()) as { error: string };
      expect([response.status, error]).toEqual([400, expect.stringMatching(message)]);
    }
    expect(port.asked.length).toBe(before);
  });

  test("of exactly 64 KiB is read, and one byte more is 400 and the end of the connection", async () => {
    const padded = (bytes: number) =>
      settleBody({ padding: "x".repeat(bytes - settleBody({ padding: "" }).length) });
    const largest = await settle(port.pki.client, padded(65_536));
    expect(largest.status).toBe(200);
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest(padded(65_537)));
    await client.closed;
    expect(client.received()).toMatch(
      /^HTTP\/1\.1 400 [\s\S]*connection: close[\s\S]*"body: larger than 65536 bytes"/i,
    );
  });

  test.each([
    ["with its length", { "content-length": String(2 ** 20) }, (body: string) => body],
    [
      "in chunks",
      { "transfer-encoding": "chunked" },
      (body: string) => `${body.length.toString(16)}\r\n${body}\r\n0\r\n\r\n`,
    ],
  ])("of 1 MiB %s is told 400", async (_name, headers, encode) => {
    const client = port.dial(port.pki.client);
    client.socket.write(
      head("POST", "/settle", { ...JSON_HEADERS, ...headers }) + encode("x".repeat(2 ** 20)),
    );
    await client.closed;
    expect(client.received()).toMatch(/^HTTP\/1\.1 400 /);
  });

  test("without an end is cut off", async () => {
    const client = port.dial(port.pki.client);
    client.socket.write(head("POST", "/settle", { ...JSON_HEADERS, "content-length": 2 ** 31 }));
    const piece = Buffer.alloc(2 ** 20, "x");
    let sent = 0;
    const send = () => {
      while (sent < 64 && !client.socket.destroyed) {
        sent++;
        if (!client.socket.write(piece)) return;
      }
    };
    client.socket.on("drain", send);
    send();
    await client.closed;
    expect(sent).toBeLessThan(64);
  });

  test("of another path is 404, of another method 405", async () => {
    const none = await port.fetch("/metrics", port.pki.client);
    expect([none.status, await none.json()]).toEqual([404, { error: "no such route" }]);
    for (const path of ["/settle/", "/Settle", "/settle%2f", "/v1/agents", "/"]) {
      expect([path, (await port.fetch(path, port.pki.client, { method: "POST" })).status]).toEqual([
        path,
        404,
      ]);
    }
    const wrong = await port.fetch("/settle", port.pki.client);
    expect([wrong.status, wrong.headers.get("allow")]).toEqual([405, "POST"]);
  });

  test.each([
    ["//settle", "404"],
    ["/settle?x=1", "200"],
    ["http://elsewhere.test/settle", "200"],
    ["*", "404"],
  ])("for %s is %s", async (target, status) => {
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest().replace("/settle", target));
    expect(await client.answers(1)).toStartWith(`HTTP/1.1 ${status}`);
    client.destroy();
  });

  test.each(["TRACE", "CONNECT", "OPTIONS"])("by %s does no harm", async (method) => {
    const client = port.dial(port.pki.client);
    client.socket.write(head(method, "/settle", { connection: "close" }));
    await client.closed;
    expect(client.received()).not.toContain(" 200 ");
  });

  test.each([
    ["two lengths", head("POST", "/settle", { ...JSON_HEADERS, "content-length": "3\r\ncontent-length: 4" })],
    [
      "a length and chunks",
      head("POST", "/settle", { ...JSON_HEADERS, "content-length": 5, "transfer-encoding": "chunked" }),
    ],
    ["a head without bound", `GET /supported HTTP/1.1\r\n${"a: b\r\n".repeat(20_000)}`],
    ["garbage", "\0\u0001 not http\r\n\r\n"],
  ])("with %s is refused, and its connection ended", async (_name, text) => {
    const client = port.dial(port.pki.client);
    client.socket.write(`${text}0\r\n\r\n${settleRequest()}`);
    await client.closed;
    expect(client.received()).not.toContain("200");
  });
});

describe("a connection", () => {
  test("takes requests one after another, in the order that they came", async () => {
    let atOnce = 0;
    let most = 0;
    port.answers.settle = async () => {
      most = Math.max(most, ++atOnce);
      await Bun.sleep(5);
      atOnce--;
      return SETTLED;
    };
    const client = port.dial(port.pki.client);
    client.socket.write(
      settleRequest() + head("GET", "/nothing") + settleRequest() + head("GET", "/supported"),
    );
    const text = await client.answers(4);
    expect(text.match(/HTTP\/1\.1 \d+/g)?.map((line) => line.slice(-3))).toEqual([
      "200",
      "404",
      "200",
      "200",
    ]);
    expect(most).toBe(1);
    port.answers.settle = async () => SETTLED;
    client.destroy();
  });

  test("that sends requests without waiting for any answer is ended", async () => {
    const { promise, resolve } = Promise.withResolvers<void>();
    port.answers.settle = async () => {
      await promise;
      return SETTLED;
    };
    const before = port.asked.length;
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest().repeat(40));
    await client.closed;
    resolve();
    port.answers.settle = async () => SETTLED;
    expect(port.asked.length).toBeLessThanOrEqual(before + 1);
  });

  const slow: [string, (client: Client) => void][] = [
    [
      "whose head trickles",
      (client) => trickle(client, `GET /supported HTTP/1.1\r\n${"a: b\r\n".repeat(999)}`),
    ],
    [
      "whose body trickles",
      (client) => {
        client.socket.write(head("POST", "/settle", { ...JSON_HEADERS, "content-length": 1000 }));
        trickle(client, "x".repeat(999));
      },
    ],
    [
      "whose second head trickles",
      async (client) => {
        client.socket.write(settleRequest());
        await client.answers(1);
        trickle(client, `GET /supported HTTP/1.1\r\n${"a: b\r\n".repeat(999)}`);
      },
    ],
    ["that says nothing", () => {}],
  ];

  test.concurrent.each(slow)("%s is ended", async (_name, act) => {
    const client = port.dial(port.pki.client);
    act(client);
    expect(await elapsed(client.closed)).toBeLessThan(3_500);
    expect(client.received()).not.toContain("400");
  });

  function trickle(client: Client, text: string): void {
    let at = 0;
    const timer = setInterval(() => client.socket.write(text.slice(at, ++at)), 50);
    client.socket.on("close", () => clearInterval(timer));
  }

  test("that waits for a slow settlement is not idle", async () => {
    port.answers.settle = async () => {
      await Bun.sleep(2_200);
      return SETTLED;
    };
    const response = await settle(port.pki.client);
    expect(response.status).toBe(200);
    port.answers.settle = async () => SETTLED;
  });

  // A half-closed connection is a closed one too: Bun answers the end of the TLS stream with its own.
  test.each([
    ["hangs up", (client: Client) => client.destroy()],
    ["closes its half", (client: Client) => client.socket.end()],
  ])("whose caller %s takes its settlement nowhere", async (_name, leave) => {
    const { promise: ended, resolve } = Promise.withResolvers<void>();
    const { promise: started, resolve: start } = Promise.withResolvers<void>();
    port.answers.settle = async () => {
      start();
      await Bun.sleep(50);
      resolve();
      return SETTLED;
    };
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest());
    await started;
    leave(client);
    await client.closed;
    await ended;
    port.answers.settle = async () => SETTLED;
    expect((await settle(port.pki.client)).status).toBe(200);
  });
});

test("there is no other port that this process listens on", async () => {
  expect(listening().difference(before)).toEqual(new Set([port.port]));
});

test("a client that takes no answers gets no more of them, and is ended", async () => {
  let given = 0;
  const own = await startPort({ flushMs: 600 }, async () => {
    given++;
    return new Response(new Uint8Array(2 ** 23));
  });
  const client = own.dial(own.pki.client);
  client.socket.on("secureConnect", () => client.socket.pause());
  client.socket.write(head("GET", "/supported").repeat(16));
  await until(() => given > 0);
  const sentBack = await elapsed(own.listener.drain());
  expect(sentBack).toBeLessThan(3_000);
  expect(given).toBeLessThan(8);
  client.destroy();
  await own.stop();
});

describe("numbers", () => {
  let small: Port;
  beforeEach(async () => {
    small = await startPort({ handshakes: 2, connections: 6 });
  });
  afterEach(() => small.stop());

  test("handshakes that hang make room for new ones", async () => {
    const hanging: Client[] = [];
    for (let at = 0; at < 4; at++) {
      const client = small.dialPlain();
      await new Promise((resolve) => client.socket.once("connect", resolve));
      hanging.push(client);
    }
    await Promise.all(hanging.slice(0, 2).map(({ closed }) => closed));
    expect(hanging.slice(2).map(({ socket }) => socket.destroyed)).toEqual([false, false]);
    const client = small.dial(small.pki.client);
    client.socket.write(head("GET", "/supported"));
    expect(await client.answers(1)).toStartWith("HTTP/1.1 200");
    for (const each of [client, ...hanging]) each.destroy();
  });

  test("one account alone takes all connections but what is left for the next", async () => {
    const clients: Client[] = [];
    for (let at = 0; at < 6; at++) {
      const client = small.dial(small.pki.client);
      client.socket.write(head("GET", "/supported"));
      await client.answers(1);
      clients.push(client);
    }
    expect(clients.map((client) => client.received().slice(0, 12))).toEqual([
      ...Array(5).fill("HTTP/1.1 200"),
      "",
    ]);
    const other = small.dial(small.pki.otherClient);
    other.socket.write(head("GET", "/supported"));
    expect(await other.answers(1)).toStartWith("HTTP/1.1 200");
    for (const client of [other, ...clients]) client.destroy();
  });

  test("certificates of no account have one share together", async () => {
    const strangers = await Promise.all([1, 2, 3, 4, 5, 6].map((n) => small.pki.issueClient(`client ${n}`)));
    const clients: Client[] = [];
    for (const identity of [...strangers, small.pki.client]) {
      const client = small.dial(identity);
      client.socket.write(head("GET", "/supported"));
      await client.answers(1);
      clients.push(client);
    }
    const got = clients.map((client) => client.received().startsWith("HTTP/1.1 200"));
    expect(got).toEqual([true, true, true, true, true, false, true]);
    for (const client of clients) client.destroy();
  });

  test("beyond the most of all, new ones are closed at once", async () => {
    const identities = await Promise.all([1, 2, 3, 4, 5, 6].map((n) => small.pki.issueClient(`client ${n}`)));
    for (const { cert } of identities) {
      const name = `account of ${fingerprintOf(cert)}`;
      await addAccount(small.store, small.clock, {
        name,
        certificate: cert,
        maxPerTransaction: null,
        dailyCeiling: null,
      });
    }
    const clients: Client[] = [];
    for (const identity of identities) {
      const client = small.dial(identity);
      client.socket.write(head("GET", "/supported"));
      expect(await client.answers(1)).toStartWith("HTTP/1.1 200");
      clients.push(client);
    }
    const late = small.dialPlain();
    await late.closed;
    for (const client of clients) client.destroy();
  });
});

describe("certificates that are renewed while it runs", () => {
  const materialOf = (of: Port["pki"], clientCa: string) => ({
    cert: of.server.cert,
    key: of.server.key,
    clientCa,
  });
  const shownTo = async (client: Client<TLSSocket>) => {
    client.socket.write(head("GET", "/supported"));
    await client.answers(1);
    const shown = client.socket.getPeerCertificate().fingerprint256 ?? "";
    client.destroy();
    return shown.replaceAll(":", "").toLowerCase();
  };

  test("are shown to whoever comes next; what is open and at work goes on", async () => {
    const [own, other] = await Promise.all([startPort(), makePki()]);
    const { promise: started, resolve: start } = Promise.withResolvers<void>();
    const { promise: go, resolve: release } = Promise.withResolvers<void>();
    own.answers.settle = async () => {
      start();
      await go;
      return SETTLED;
    };
    const [atWork, idle] = [own.dial(own.pki.client), own.dial(own.pki.client)];
    idle.socket.write(head("GET", "/supported"));
    await idle.answers(1);
    atWork.socket.write(settleRequest());
    await started;
    own.listener.renew(materialOf(other, own.pki.ca.cert + other.ca.cert));
    const everybody = own.pki.ca.cert + other.ca.cert;
    for (const identity of [own.pki.client, other.client]) {
      expect(await shownTo(own.dial(identity, { ca: everybody }))).toBe(other.server.fingerprint);
    }
    // All else about handshakes is as before.
    for (const options of [{ ALPNProtocols: ["h2"] }, { cert: "", key: "" }]) {
      const refused = own.dial(own.pki.client, { ca: everybody, ...options });
      refused.socket.write(head("GET", "/supported"));
      await refused.closed;
      expect(refused.received()).not.toContain("200");
    }
    idle.socket.write(head("GET", "/supported"));
    expect((await idle.answers(2)).match(/HTTP\/1\.1 200/g)).toHaveLength(2);
    release();
    expect(await atWork.answers(1)).toStartWith("HTTP/1.1 200");
    expect(atWork.received()).not.toMatch(/connection: close/i);
    for (const client of [atWork, idle]) client.destroy();
    await own.stop();
  });

  test("a CA that is taken out ends the connections of its clients, with the answer they are at work on", async () => {
    const [own, other] = await Promise.all([startPort(), makePki()]);
    own.listener.renew(materialOf(own.pki, own.pki.ca.cert + other.ca.cert));
    const { promise: started, resolve: start } = Promise.withResolvers<void>();
    const { promise: go, resolve: release } = Promise.withResolvers<void>();
    own.answers.settle = async () => {
      start();
      await go;
      return SETTLED;
    };
    const [atWork, idle] = [own.dial(own.pki.client), own.dial(own.pki.client)];
    const stays = own.dial(other.client);
    for (const client of [idle, stays]) {
      client.socket.write(head("GET", "/supported"));
      await client.answers(1);
    }
    atWork.socket.write(settleRequest() + settleRequest());
    await started;
    own.listener.renew(materialOf(own.pki, other.ca.cert));
    await idle.closed;
    const late = own.dial(own.pki.client);
    late.socket.write(settleRequest());
    await late.closed;
    expect(late.received()).toBe("");
    stays.socket.write(head("GET", "/supported"));
    expect((await stays.answers(2)).match(/HTTP\/1\.1 200/g)).toHaveLength(2);
    release();
    await atWork.closed;
    expect(atWork.received()).toMatch(/^HTTP\/1\.1 200 [\s\S]*connection: close/i);
    expect(own.asked).toHaveLength(1);
    stays.destroy();
    await own.stop();
  });

  test("that can't be used leave the last ones in force", async () => {
    const [own, other] = await Promise.all([startPort(), makePki()]);
    const { cert, key } = own.pki.server;
    const clientCa = own.pki.ca.cert;
    for (const tls of [
      { cert: other.server.cert, key, clientCa },
      { cert: "none", key, clientCa },
      { cert, key, clientCa: "none" },
    ]) {
      expect(() => own.listener.renew(tls)).toThrow();
      expect(await shownTo(own.dial(own.pki.client))).toBe(own.pki.server.fingerprint);
    }
    await own.stop();
  });
});

test("draining answers what is at work, refuses what is new, and ends", async () => {
  const own = await startPort();
  const { promise: started, resolve: start } = Promise.withResolvers<void>();
  const { promise: go, resolve: release } = Promise.withResolvers<void>();
  own.answers.settle = async () => {
    start();
    await go;
    return SETTLED;
  };
  const idle = own.dial(own.pki.client);
  idle.socket.write(head("GET", "/supported"));
  await idle.answers(1);
  const atWork = own.dial(own.pki.client);
  atWork.socket.write(settleRequest());
  await started;
  own.edge.drain();
  const drained = own.listener.drain();
  await idle.closed;
  const late = own.dial(own.pki.client);
  await late.closed;
  expect(late.received()).toBe("");
  release();
  await drained;
  expect(atWork.received()).toMatch(/^HTTP\/1\.1 200 [\s\S]*connection: close/i);
  await own.stop();
});

test("an account is managed while another process holds the database busy", async () => {
  const holder = new Database(join(port.place.dir, "tollgate.db"));
  holder.run("begin immediate");
  const removing = removeAccount(port.store, "nobody").catch((error) => String(error));
  expect((await settle(port.pki.client)).status).toBe(200);
  holder.run("commit");
  holder.close();
  expect(await removing).toContain("no such account");
});
