// Connections of the mutual-TLS port on real sockets: how long they may take, how many there may be, and what becomes
// of them when the certificates are renewed or the port is drained.

import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import type { TLSSocket } from "node:tls";
import { addAccount, fingerprintOf } from "../src/facilitator/accounts.ts";
import {
  type Client,
  elapsed,
  head,
  JSON_HEADERS,
  type Port,
  SETTLEMENT,
  settleRequest,
  startPort,
  until,
} from "./support/http/mutual-tls.ts";
import { makePki } from "./support/http/pki.ts";

/** The limits of these ports are a second and less, those of others ten. */
const ENDED_MS_MAX = 9_000;

let port: Port;
beforeAll(async () => {
  port = await startPort({ handshakeMs: 600, idleMs: 1_500, headMs: 600, bodyMs: 600, flushMs: 600 });
});
afterAll(() => port.stop());

/** From here on a settlement begins, and ends when it is released. */
function holdSettling({ answers }: Port) {
  const { promise: started, resolve: start } = Promise.withResolvers<void>();
  const { promise: go, resolve: release } = Promise.withResolvers<void>();
  answers.settle = async () => {
    start();
    await go;
    return SETTLEMENT;
  };
  return { started, release };
}

describe("a connection", () => {
  test("takes requests one after another, in the order that they came", async () => {
    let atOnce = 0;
    let most = 0;
    port.answers.settle = async () => {
      most = Math.max(most, ++atOnce);
      await Bun.sleep(5);
      atOnce--;
      return SETTLEMENT;
    };
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest() + head("GET", "/nothing") + settleRequest() + head("GET", "/supported"));
    const text = await client.answers(4);
    expect(text.match(/HTTP\/1\.1 \d+/g)?.map((line) => line.slice(-3))).toEqual(["200", "404", "200", "200"]);
    expect(most).toBe(1);
    port.answers.settle = async () => SETTLEMENT;
    client.destroy();
  });

  test("is ended when it sends requests without waiting for any answer", async () => {
    const { promise, resolve } = Promise.withResolvers<void>();
    port.answers.settle = async () => {
      await promise;
      return SETTLEMENT;
    };
    const before = port.asked.length;
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest().repeat(40));
    await client.closed;
    resolve();
    port.answers.settle = async () => SETTLEMENT;
    expect(port.asked.length).toBeLessThanOrEqual(before + 1);
  });

  const slow: [string, (client: Client) => void][] = [
    ["whose head trickles", (client) => trickle(client, `GET /supported HTTP/1.1\r\n${"a: b\r\n".repeat(999)}`)],
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

  test.concurrent.each(slow)("is ended: one %s", async (_name, act) => {
    const client = port.dial(port.pki.client);
    act(client);
    expect(await elapsed(client.closed)).toBeLessThan(ENDED_MS_MAX);
    expect(client.received()).not.toContain("HTTP/1.1 400");
  });

  function trickle(client: Client, text: string): void {
    let at = 0;
    const timer = setInterval(() => client.socket.write(text.slice(at, ++at)), 50);
    client.socket.on("close", () => clearInterval(timer));
  }

  test("is not idle while it waits for a slow settlement", async () => {
    port.answers.settle = async () => {
      await Bun.sleep(2_200);
      return SETTLEMENT;
    };
    const response = await port.settle(port.pki.client);
    expect(response.status).toBe(200);
    port.answers.settle = async () => SETTLEMENT;
  });

  // A half-closed connection is a closed one too: Bun answers the end of the TLS stream with its own.
  test.each([
    ["hangs up", (client: Client) => client.destroy()],
    ["closes its half", (client: Client) => client.socket.end()],
  ])("does not take its settlement with it when its caller %s", async (_name, leave) => {
    const { promise: ended, resolve } = Promise.withResolvers<void>();
    const { promise: started, resolve: start } = Promise.withResolvers<void>();
    port.answers.settle = async () => {
      start();
      await Bun.sleep(50);
      resolve();
      return SETTLEMENT;
    };
    const client = port.dial(port.pki.client);
    client.socket.write(settleRequest());
    await started;
    leave(client);
    await client.closed;
    await ended;
    port.answers.settle = async () => SETTLEMENT;
    expect((await port.settle(port.pki.client)).status).toBe(200);
  });
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
  expect(sentBack).toBeLessThan(ENDED_MS_MAX);
  expect(given).toBeLessThan(8);
  client.destroy();
  await own.stop();
});

describe("the numbers of connections", () => {
  let small: Port;
  beforeEach(async () => {
    small = await startPort({ handshakes: 2, connections: 6 });
  });
  afterEach(() => small.stop());

  test("make room for new handshakes when others hang", async () => {
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

  test("leave some for the next account when one alone takes all that it may", async () => {
    const clients: Client[] = [];
    for (let at = 0; at < 6; at++) {
      const client = small.dial(small.pki.client);
      client.socket.write(head("GET", "/supported"));
      await client.answers(1);
      clients.push(client);
    }
    expect(clients.map((client) => client.received().slice(0, 12))).toEqual([...Array(5).fill("HTTP/1.1 200"), ""]);
    const other = small.dial(small.pki.otherClient);
    other.socket.write(head("GET", "/supported"));
    expect(await other.answers(1)).toStartWith("HTTP/1.1 200");
    for (const client of [other, ...clients]) client.destroy();
  });

  test("are one share for all certificates of no account", async () => {
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

  test("have a bound for all, beyond which new ones are closed at once", async () => {
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

describe("certificates that are renewed while the facilitator runs", () => {
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
    const { started, release } = holdSettling(own);
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
      expect(refused.received()).not.toContain("HTTP/1.1 200");
    }
    idle.socket.write(head("GET", "/supported"));
    expect((await idle.answers(2)).match(/HTTP\/1\.1 200/g)).toHaveLength(2);
    release();
    expect(await atWork.answers(1)).toStartWith("HTTP/1.1 200");
    expect(atWork.received()).not.toMatch(/connection: close/i);
    for (const client of [atWork, idle]) client.destroy();
    await own.stop();
  });

  test("end the connections of the clients of a CA that is taken out, with the answer they are at work on", async () => {
    const [own, other] = await Promise.all([startPort(), makePki()]);
    own.listener.renew(materialOf(own.pki, own.pki.ca.cert + other.ca.cert));
    const { started, release } = holdSettling(own);
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

  test("leave the last ones in force when they can't be used", async () => {
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

test("draining answers the requests that are at work, refuses new ones, and ends", async () => {
  const own = await startPort();
  const { started, release } = holdSettling(own);
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
