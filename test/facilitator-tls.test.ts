// The mutual-TLS port on real sockets: who gets in, who is refused in the handshake, and what strange clients
// can't do.

import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { X509Certificate } from "node:crypto";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { join } from "node:path";
import { removeAccount, setEnabled } from "../src/facilitator/accounts.ts";
import {
  elapsed,
  head,
  JSON_HEADERS,
  type Port,
  SETTLED,
  settleBody,
  settleRequest,
  startPort,
  until,
} from "./support/http/mutual-tls.ts";
import type { TestIdentity } from "./support/http/pki.ts";

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

describe("the handshake", () => {
  test("lets in a certificate of the client CA that belongs to an account", async () => {
    const response = await port.settle(port.pki.client, settleBody(), {
      ...JSON_HEADERS,
      "x-request-id": "r.1",
    });
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

  describe.each(strangers)("the handshake with %s", (_name, choose, reason) => {
    test.each(["TLSv1.2", "TLSv1.3"] as const)("is refused by %s, and nothing is processed", async (version) => {
      const before = port.asked.length;
      port.lines.length = 0;
      const client = port.dial(choose(port.pki), { minVersion: version, maxVersion: version });
      client.socket.write(settleRequest());
      await client.closed;
      expect(client.received()).toBe("");
      expect(port.asked.length).toBe(before);
      await until(() => refusals().length > 0);
      expect(refusals()).toEqual([reason]);
    });
  });

  test("is seen to fail by the client itself in version 1.2", async () => {
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
    "takes no certificate that a client's certificate has issued (%s)",
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

  test("is refused in versions before 1.2", async () => {
    const client = port.dialPlain();
    client.socket.write(clientHello(0x0302));
    await client.closed;
    // An alert (21) that is fatal (2): protocol_version (70).
    const alert = Buffer.from(client.received(), "latin1");
    expect([alert[0], alert[5], alert[6]]).toEqual([21, 2, 70]);
  });

  test.each(["TLSv1.2", "TLSv1.3"] as const)("resumes no session of %s", async (version) => {
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

  test("leads to no HTTP/2", async () => {
    const client = port.dial(port.pki.client, { ALPNProtocols: ["h2"] });
    client.socket.write("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    await client.closed;
    expect(client.received()).not.toContain("HTTP/1.1 200");
  });

  test("gives a plain HTTP probe nothing", async () => {
    const client = port.dialPlain();
    client.socket.write(settleRequest());
    await client.closed;
    expect(client.received()).not.toContain("HTTP");
  });

  test("is ended when it never comes to an end", async () => {
    const client = port.dialPlain();
    // The start of a record that promises more.
    client.socket.write(Buffer.from([22, 3, 1, 2, 0, 1]));
    // Of a port with the usual limits it would be 5 s.
    expect(await elapsed(client.closed)).toBeLessThan(4_500);
  });
});

describe("the account of a certificate", () => {
  test("is missing for a certificate of the CA that nobody added: 403, whatever the body", async () => {
    const before = port.asked.length;
    for (const body of [settleBody(), "{", "x".repeat(70_000)]) {
      const response = await port.settle(port.pki.otherClient, body);
      expect([response.status, await response.json()]).toEqual([
        403,
        { error: "no active account has this certificate" },
      ]);
    }
    expect(port.asked.length).toBe(before);
  });

  test("may be disabled, enabled and removed, and that is in force on an open connection", async () => {
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

  test("serves no longer when its certificate expires while its connection is open", async () => {
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

  test("is not needed by the open endpoints", async () => {
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
  test("is 400 in another form, and the field is named", async () => {
    const cases: [string, Record<string, string>, RegExp][] = [
      [settleBody(), { "content-type": "text/plain" }, /^content-type:/],
      ["{", JSON_HEADERS, /^body:/],
      ["", JSON_HEADERS, /^body:/],
      [settleBody({ x402Version: 2 }), JSON_HEADERS, /^x402Version/],
      [settleBody({ paymentPayload: null }), JSON_HEADERS, /^paymentPayload/],
    ];
    const before = port.asked.length;
    for (const [body, headers, message] of cases) {
      const response = await port.settle(port.pki.client, body, headers);
      const { error } = (await response.json()) as { error: string };
      expect([response.status, error]).toEqual([400, expect.stringMatching(message)]);
    }
    expect(port.asked.length).toBe(before);
  });

  test("is read with exactly 64 KiB, and one byte more is 400 and the end of the connection", async () => {
    const padded = (bytes: number) => settleBody({ padding: "x".repeat(bytes - settleBody({ padding: "" }).length) });
    const largest = await port.settle(port.pki.client, padded(65_536));
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
  ])("is told 400 with 1 MiB %s", async (_name, headers, encode) => {
    const client = port.dial(port.pki.client);
    client.socket.write(head("POST", "/settle", { ...JSON_HEADERS, ...headers }) + encode("x".repeat(2 ** 20)));
    await client.closed;
    expect(client.received()).toMatch(/^HTTP\/1\.1 400 /);
  });

  test("is cut off when it has no end", async () => {
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

  test("is 404 with another path, and 405 with another method", async () => {
    const none = await port.fetch("/metrics", port.pki.client);
    expect([none.status, await none.json()]).toEqual([
      404,
      { error: "no such route; known here: GET /supported, GET /healthz, POST /settle" },
    ]);
    for (const path of ["/settle/", "/Settle", "/settle%2f", "/v1/agents", "/"]) {
      expect([path, (await port.fetch(path, port.pki.client, { method: "POST" })).status]).toEqual([path, 404]);
    }
    const wrong = await port.fetch("/settle", port.pki.client);
    expect([wrong.status, wrong.headers.get("allow")]).toEqual([405, "POST"]);
  });

  test.each([
    ["//settle", "404"],
    ["/settle?x=1", "200"],
    ["http://elsewhere.test/settle", "200"],
    ["*", "404"],
  ])("to %s is answered %s", async (target, status) => {
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest().replace("/settle", target));
    expect(await client.answers(1)).toStartWith(`HTTP/1.1 ${status}`);
    client.destroy();
  });

  test.each(["TRACE", "CONNECT", "OPTIONS"])("does no harm with the method %s", async (method) => {
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
  ])("is refused with %s, and its connection ended", async (_name, text) => {
    const client = port.dial(port.pki.client);
    client.socket.write(`${text}0\r\n\r\n${settleRequest()}`);
    await client.closed;
    expect(client.received()).not.toContain("HTTP/1.1 200");
  });
});

test("the facilitator listens on no other port", async () => {
  expect(listening().difference(before)).toEqual(new Set([port.port]));
});

test("an account is managed while another process holds the database busy", async () => {
  const holder = new Database(join(port.place.dir, "tollgate.db"));
  holder.run("begin immediate");
  const removing = removeAccount(port.store, "nobody").catch((error) => String(error));
  expect((await port.settle(port.pki.client)).status).toBe(200);
  holder.run("commit");
  holder.close();
  expect(await removing).toContain("no such account");
});
