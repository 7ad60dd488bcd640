import { describe, expect, test } from "bun:test";
import { generateKeyPairSync } from "node:crypto";
import { ALICE, BOB, SERVER, TEST_CA } from "../../../test/support/http/certificates.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import { clientIdentity, createFacilitatorClient } from "./facilitator-client.ts";

test("a payment is sent to the facilitator for its tenant, whose connections it uses", async () => {
  const tenants: (string | undefined)[] = [];
  const outbound: Outbound = {
    async request(_, { tenant }) {
      tenants.push(tenant);
      return Response.json({});
    },
  };
  const openSecret = async () => ({ secret: "no bundle", header: () => null });
  const client = createFacilitatorClient({ outbound, timeoutMs: 5_000, openSecret });
  const attempt = {
    facilitator_url: "http://facilitator.test",
    facilitator_credential_ref: "cred_1",
    settle_request: "{}",
    expected: { payer: "0x1", amount: 1n } as const,
    span: null,
    mayLeave: async () => true,
  };
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
