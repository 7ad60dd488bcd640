import { describe, expect, test } from "bun:test";
import { generateKeyPairSync } from "node:crypto";
import { once } from "node:events";
import net from "node:net";
import { ALICE, BOB, SERVER, TEST_CA } from "../../../test/support/http/certificates.ts";
import { BASE } from "../../../test/support/network.ts";
import { createOutbound, type Outbound } from "../../http/client/outbound.ts";
import { clientIdentity, createFacilitatorClient } from "./facilitator-client.ts";

const openSecret = async () => ({ secret: "no bundle", header: () => null });
const ATTEMPT = {
  tenant: "acme",
  facilitator_credential_ref: "cred_1",
  settle_request: "{}",
  expected: { network: BASE, payer: "0x1", amount: 1n } as const,
  span: null,
};

describe("a payment", () => {
  /** What becomes of one whose facilitator is a bare server that does this with each connection. */
  async function attempted(
    scheme: string,
    open: (socket: Bun.Socket) => void,
    markSending: () => boolean = () => true,
  ) {
    let bytes = 0;
    let asked = 0;
    const stop = new AbortController();
    const server = Bun.listen({
      hostname: "127.0.0.1",
      port: 0,
      socket: {
        open,
        data(socket, chunk) {
          bytes += chunk.length;
          if (scheme === "http") socket.terminate();
          // Its handshake is held: nobody answers.
          else stop.abort();
        },
      },
    });
    const client = createFacilitatorClient({
      outbound: createOutbound({ rules: null, extraCa: null }),
      timeoutMs: 30_000,
      openSecret,
    });
    const url = `${scheme}://127.0.0.1:${server.port}`;
    const noted = async () => {
      asked++;
      return markSending();
    };
    const { kind } = await client.settle({ ...ATTEMPT, facilitator_url: url, markSending: noted }, stop.signal);
    server.stop(true);
    return { kind, asked, isHttpSent: scheme === "http" && bytes > 0 };
  }

  test("has not left when the connection ends before its handshake is over, or is held in it", async () => {
    const unsent = { kind: "unsent" as const, asked: 0, isHttpSent: false };
    expect(await attempted("https", (socket) => void socket.terminate())).toEqual(unsent);
    expect(await attempted("https", () => {})).toEqual(unsent);
  });

  test("does not leave on an open connection when it must not any more", async () => {
    const refused = { kind: "unsent" as const, asked: 1, isHttpSent: false };
    expect(
      await attempted(
        "http",
        () => {},
        () => false,
      ),
    ).toEqual(refused);
  });

  test("has not left when the connection ends while it is being marked as sent", async () => {
    const peer = Promise.withResolvers<net.Socket>();
    let bytes = 0;
    const server = net.createServer((socket) => {
      socket.on("data", ({ length }) => {
        bytes += length;
      });
      peer.resolve(socket);
    });
    const { port } = await new Promise<net.AddressInfo>((resolve) => {
      server.listen(0, "127.0.0.1", () => resolve(server.address() as net.AddressInfo));
    });
    const markSending = async () => {
      const socket = await peer.promise;
      socket.end();
      await once(socket, "close");
      return true;
    };
    const outbound = createOutbound({ rules: null, extraCa: null });
    const client = createFacilitatorClient({ outbound, timeoutMs: 10_000, openSecret });
    const attempt = { ...ATTEMPT, facilitator_url: `http://127.0.0.1:${port}`, markSending };
    expect((await client.settle(attempt, new AbortController().signal)).kind).toBe("unsent");
    expect(bytes).toBe(0);
    server.close();
  });

  test("may have left when the connection ends after it was written", async () => {
    expect(await attempted("http", () => {})).toEqual({ kind: "unknown", asked: 1, isHttpSent: true });
  });
});

test("a facilitator is silent only when it got the payment and its time has run out", async () => {
  const outbound: Outbound = {
    async request(_, { leaving }) {
      await leaving?.();
      return new Promise(() => {});
    },
  };
  const attempt = { ...ATTEMPT, facilitator_url: "http://facilitator.test", markSending: async () => true };
  const settle = (options: object, stop = new AbortController().signal) =>
    createFacilitatorClient({ outbound, timeoutMs: 50, openSecret, ...options }).settle(attempt, stop);
  expect(await settle({})).toEqual({ kind: "unknown", why: "no answer in time", isSilent: true });
  const slowStore = { openSecret: () => new Promise<never>(() => {}) };
  expect(await settle(slowStore)).toEqual({ kind: "unsent", why: "no answer in time" });
  expect(await settle({ timeoutMs: 60_000 }, AbortSignal.timeout(50))).toEqual({
    kind: "unknown",
    why: "no answer in time",
  });
});

test("a payment is sent to the facilitator for its tenant, whose connections it uses", async () => {
  const tenants: (string | undefined)[] = [];
  const outbound: Outbound = {
    async request(_, { tenant }) {
      tenants.push(tenant);
      return Response.json({});
    },
  };
  const client = createFacilitatorClient({ outbound, timeoutMs: 5_000, openSecret });
  const attempt = { ...ATTEMPT, facilitator_url: "http://facilitator.test", markSending: async () => true };
  for (const tenant of ["acme", "rival"]) {
    await client.settle({ ...attempt, tenant }, new AbortController().signal);
  }
  expect(tenants).toEqual(["acme", "rival"]);
});

const flat = (pem: string | null | undefined) => pem?.replace(/\s/g, "") ?? null;

describe("a PEM bundle", () => {
  test("is told apart by the certificates themselves, in any order", () => {
    const parts = [ALICE.cert, ALICE.key, TEST_CA];
    for (const [a, b, c] of [
      [0, 1, 2],
      [2, 1, 0],
      [1, 2, 0],
      [2, 0, 1],
    ] as const) {
      const identity = clientIdentity(`words\r\n${parts[a]}${parts[b]}more${parts[c]}`);
      expect(flat(identity?.cert)).toBe(flat(ALICE.cert));
      expect(flat(identity?.key)).toBe(flat(ALICE.key));
      expect(flat(identity?.ca)).toBe(flat(TEST_CA));
    }
  });

  test("needs no CA, and takes another end certificate for none", () => {
    expect(clientIdentity(ALICE.cert + ALICE.key)?.ca).toBeNull();
    const identity = clientIdentity(BOB.cert + ALICE.cert + ALICE.key);
    expect([flat(identity?.cert), identity?.ca]).toEqual([flat(ALICE.cert), null]);
  });

  test("may hold a server's own certificate as its CA only when that is one", () => {
    expect(clientIdentity(ALICE.cert + ALICE.key + SERVER.cert)?.ca).toBeNull();
  });

  test("is looked for in a time that grows with the text alone", () => {
    const text = "-----BEGIN A-----\n".repeat(60_000);
    expect(clientIdentity(text)).toBeNull();
    expect(clientIdentity(`${text}${ALICE.cert}-----BEGIN B-----${ALICE.key}`)).not.toBeNull();
  });

  test("is refused with a key that is slow to sign with", () => {
    const { privateKey } = generateKeyPairSync("rsa", { modulusLength: 4224 });
    const key = privateKey.export({ type: "pkcs8", format: "pem" });
    expect(() => clientIdentity(`${ALICE.cert}${key}`)).toThrow("longer than 4096 bits");
  });

  test.each([
    ["a token", "secret-token"],
    ["a certificate alone", ALICE.cert],
    ["a key alone", ALICE.key],
    ["a public key", `${ALICE.cert}-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n`],
  ])("is not %s", (_, text) => {
    expect(clientIdentity(text)).toBeNull();
  });

  test.each([
    ["another's key", ALICE.cert + BOB.key],
    ["a broken certificate", ALICE.key + ALICE.cert.replace(/M/g, "N")],
    ["a broken key", ALICE.cert + ALICE.key.replace(/[A-Za-z0-9+/]{20}=*\n-----END/, "AAAA\n-----END")],
  ])("is refused with %s, and the message repeats nothing of it", (_, text) => {
    let message = "";
    try {
      clientIdentity(text);
    } catch (error) {
      message = String(error);
    }
    expect(message).toStartWith("Error: ");
    for (const line of text.split("\n")) if (line.length > 20) expect(message).not.toContain(line.slice(0, 12));
  });
});
