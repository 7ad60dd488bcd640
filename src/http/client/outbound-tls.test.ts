import { afterEach, describe, expect, test } from "bun:test";
import net from "node:net";
import tls from "node:tls";
import { sentText } from "../../../test/support/http/answer-body.ts";
import { ALICE, BOB, CAROL, SERVER, TEST_CA } from "../../../test/support/http/certificates.ts";
import {
  answerOk,
  bind,
  closers,
  closeServers,
  kindOf,
  outboundOf,
  post,
  raw,
  secure,
  to,
} from "../../../test/support/http/outbound-servers.ts";

afterEach(closeServers);

describe("a request over TLS", () => {
  const trusting = (...addresses: string[]) => outboundOf({ extraCa: TEST_CA, ...to(...addresses) });

  test("has the certificate checked against the name, and the name as SNI", async () => {
    const server = await secure();
    const outbound = trusting("127.0.0.1");
    for (const host of ["upstream.test", "a.wild.test", "upstream.test."]) {
      expect((await outbound.request(`https://${host}:${server.port}/`, post())).status).toBe(200);
    }
    expect(server.peers.map((peer) => peer.split(" ")[0])).toEqual(["upstream.test", "a.wild.test", "upstream.test"]);
  });

  test("is not sent under a certificate for another name, or of an unknown CA", async () => {
    const server = await secure();
    const url = (host: string) => `https://${host}:${server.port}/`;
    expect(await kindOf(trusting("127.0.0.1").request(url("wrong.test"), post()))).toBe("unreached");
    expect(await kindOf(trusting("127.0.0.2").request(url("127.0.0.2"), post()))).toBe("unreached");
    const distrusting = outboundOf(to("127.0.0.1"));
    expect(await kindOf(distrusting.request(url("upstream.test"), post()))).toBe("unreached");
    expect(server.requests).toEqual([]);
  });

  test("has no variable switch the check off", async () => {
    const server = await secure();
    try {
      process.env["NODE_TLS_REJECT_UNAUTHORIZED"] = "0";
      const work = outboundOf(to("127.0.0.1")).request(`https://upstream.test:${server.port}/`, post());
      expect(await kindOf(work)).toBe("unreached");
    } finally {
      delete process.env["NODE_TLS_REJECT_UNAUTHORIZED"];
    }
  });

  test("has an address as its host checked as an address, without SNI", async () => {
    const server = await secure();
    expect((await trusting().request(`https://127.0.0.1:${server.port}/`, post())).status).toBe(200);
    expect(server.peers).toEqual(["- -"]);
  });

  test("shares no connection with another name or another client", async () => {
    const server = await secure();
    const outbound = trusting("127.0.0.1");
    const alice = { ...ALICE, ca: null };
    const bob = { ...BOB, ca: null };
    const calls = [
      ["upstream.test", null],
      ["other.test", null],
      ["upstream.test", alice],
      ["upstream.test", bob],
    ] as const;
    for (const [host, identity] of [...calls, ...calls]) {
      const response = await outbound.request(`https://${host}:${server.port}/`, post({ tls: identity }));
      expect(await sentText(response)).toBe("ok");
    }
    expect(server.connections).toEqual([1, 2, 3, 4, 1, 2, 3, 4]);
    expect(server.peers.slice(4)).toEqual([
      "upstream.test -",
      "other.test -",
      "upstream.test alice",
      "upstream.test bob",
    ]);
  });

  test("with a key that is slow to sign with waits, so that no tenant's handshakes keep the event loop", async () => {
    const server = await secure();
    const outbound = trusting("127.0.0.1");
    const url = `https://upstream.test:${server.port}/`;
    const startedAt = performance.now();
    const carol = { ...CAROL, ca: null };
    const calls = Array.from({ length: 12 }, () => outbound.request(url, post({ tls: carol })));
    // Nobody else waits for them.
    await outbound.request(url, post({ tls: { ...ALICE, ca: null } }));
    expect(server.peers.filter((peer) => peer.endsWith("carol")).length).toBeLessThan(12);
    for (const call of calls) expect((await call).status).toBe(200);
    // Four at once, each for 100 ms at least.
    expect(performance.now() - startedAt).toBeGreaterThan(290);
  });

  test("with such a key is told at once that the server closed the connection right after the handshake", async () => {
    const server = tls.createServer(
      { ...SERVER, ca: TEST_CA, requestCert: true, rejectUnauthorized: false },
      (socket) => {
        socket.on("error", () => {});
        socket.end();
      },
    );
    const url = `https://upstream.test:${await bind(server, "127.0.0.1")}/`;
    const signal = AbortSignal.timeout(10_000);
    const request = trusting("127.0.0.1").request(url, post({ tls: { ...CAROL, ca: null }, signal }));
    expect(await kindOf(request)).toBe("unreached");
  });

  test("may have an identity that brings the root of its server, for itself only", async () => {
    const server = await secure();
    const outbound = outboundOf(to("127.0.0.1"));
    const url = `https://upstream.test:${server.port}/`;
    const identity = { ...ALICE, ca: TEST_CA };
    expect((await outbound.request(url, post({ tls: identity }))).status).toBe(200);
    expect(await kindOf(outbound.request(url, post({ tls: { ...ALICE, ca: null } })))).toBe("unreached");
    expect(await kindOf(outbound.request(url, post()))).toBe("unreached");
  });

  test("is not sent plain to a server that speaks no TLS", async () => {
    const server = await raw(answerOk);
    const heard: string[] = [];
    const plain = net.createServer((socket) => {
      closers.push(() => socket.destroy());
      socket.on("error", () => {});
      socket.on("data", (data) => {
        heard.push(data.toString("latin1"));
        socket.end("HTTP/1.1 400 Bad Request\r\n\r\n");
      });
    });
    const port = await bind(plain, "127.0.0.1");
    await kindOf(trusting("127.0.0.1").request(`https://upstream.test:${port}/`, post()));
    expect(heard.join("")).not.toContain("POST");
    expect(server.requests).toEqual([]);
  });

  test("counts as lost, not as never sent, when TLS fails after the upstream took it", async () => {
    let isBroken = false;
    const server = await secure(() => {
      isBroken = true;
      for (const client of clients) client.write("no TLS record");
    });
    const clients: net.Socket[] = [];
    const relay = net.createServer((client) => {
      clients.push(client);
      const upstream = net.connect(server.port, "127.0.0.1");
      closers.push(
        () => client.destroy(),
        () => upstream.destroy(),
      );
      for (const socket of [client, upstream]) socket.on("error", () => {});
      client.on("data", (data) => upstream.write(data));
      upstream.on("data", (data) => isBroken || client.write(data));
    });
    const port = await bind(relay, "127.0.0.1");
    expect(await kindOf(trusting("127.0.0.1").request(`https://upstream.test:${port}/`, post()))).toBe("lost");
    expect(server.requests.length).toBe(1);
  });
});
