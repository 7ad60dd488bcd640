import { beforeAll, describe, expect, test } from "bun:test";
import fc from "fast-check";
import {
  linkTo,
  receiptClaims,
  receiptSigner,
  type Signer,
  signedChain,
} from "../../../test/support/stores/receipts.ts";
import { createReceiptChain, type ReceiptKeys, receiptKeys } from "./claims.ts";

let signer: Signer;
let keys: ReceiptKeys;
let export_: string[];

beforeAll(async () => {
  signer = await receiptSigner();
  keys = (await receiptKeys({ keys: [signer.jwk] })) ?? new Map();
  export_ = await signedChain(signer, 6);
});

/** The line, from 1, of the first that does not hold, with the reason; null when all hold. */
async function firstBreak(lines: readonly string[], known = keys) {
  const chain = createReceiptChain(known);
  for (const [at, line] of lines.entries()) {
    const found = await chain.take(line);
    if (found !== null) return { line: at + 1, ...found };
  }
  return null;
}

describe("a chain of receipts", () => {
  test("holds whole, from any line on, and line by line", async () => {
    expect(await firstBreak(export_)).toBeNull();
    expect(await firstBreak(export_.slice(2))).toBeNull();
    for (const line of export_) expect(await firstBreak([line])).toBeNull();
    const chain = createReceiptChain(keys);
    for (const line of export_.slice(1)) await chain.take(line);
    expect([chain.length, chain.first?.previous]).toEqual([5, linkTo(export_[0] ?? "")]);
  });

  test("goes on under another key", async () => {
    const next = await receiptSigner("k2");
    const more = await signedChain(next, 2, linkTo(export_.at(-1) ?? ""));
    const both = (await receiptKeys({ keys: [signer.jwk, next.jwk] })) ?? new Map();
    expect(await firstBreak([...export_, ...more], both)).toBeNull();
    expect(await firstBreak([...export_, ...more])).toMatchObject({
      line: 7,
      problem: "its kid names no key of the key set",
    });
  });

  test("shows a change of any one character, where it is", async () => {
    const text = export_.join("\n");
    const character = fc.oneof(
      fc.constantFrom(..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.\n\r =é"),
      fc.string({ minLength: 0, maxLength: 3 }),
    );
    await fc.assert(
      fc.asyncProperty(fc.nat(text.length - 1), character, async (at, changed) => {
        fc.pre(text[at] !== changed);
        const lines = `${text.slice(0, at)}${changed}${text.slice(at + 1)}`.split("\n");
        // A changed line end makes what is left of it two lines, or one of two.
        const line = text.slice(0, at).split("\n").length;
        const found = await firstBreak(lines);
        expect(found?.line).toBe(line);
      }),
      { numRuns: 300 },
    );
  });

  test("shows each of the last characters of a signature, which other readers take for one another", async () => {
    const [line = ""] = export_;
    for (const last of "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") {
      const changed = line.slice(0, -1) + last;
      expect([last, (await firstBreak([changed])) === null]).toEqual([last, changed === line]);
    }
  });

  test("shows a receipt that is removed inside it, moved, said twice, or put in from elsewhere", async () => {
    const foreign = await signedChain(signer, 1, linkTo(export_[1] ?? ""));
    const arrangement = fc.array(fc.constantFrom(...export_, ...foreign), { minLength: 1, maxLength: 7 });
    await fc.assert(
      fc.asyncProperty(arrangement, async (lines) => {
        const start = export_.indexOf(lines[0] ?? "");
        const isPart = start >= 0 && lines.every((line, at) => line === export_[start + at]);
        const isFork = lines.join() === foreign.join() || lines.join() === [export_[1], ...foreign].join();
        const isLongFork = lines.join() === [export_[0], export_[1], ...foreign].join();
        expect((await firstBreak(lines)) === null).toBe(isPart || isFork || isLongFork);
      }),
      { numRuns: 300 },
    );
    const [a = "", b = "", c = "", d = ""] = export_;
    expect(await firstBreak([a, c, d])).toMatchObject({
      line: 2,
      receipt_id: expect.stringMatching(/^rcpt_/),
    });
    expect(await firstBreak([b, a])).toMatchObject({ line: 2 });
    expect(await firstBreak([a, a])).toMatchObject({ line: 2 });
  });

  test("names no invocation and no receipt twice, even when it is signed so", async () => {
    for (const name of ["invocation_id", "receipt_id"] as const) {
      const claims = receiptClaims();
      const first = await signer.sign(claims);
      const second = await signer.sign(receiptClaims({ [name]: claims[name], previous: linkTo(first) }));
      expect(await firstBreak([first, second])).toMatchObject({
        line: 2,
        problem: `its ${name} is that of line 1 too`,
      });
    }
  });
});

describe("a receipt", () => {
  const problems: [string, (known: Signer) => Promise<string>, string][] = [
    ["when it is empty", async () => "", "it is not a compact JWS"],
    ["as the answer around it", async () => `{"receipt":"x"}`, "it is JSON"],
    ["with another algorithm", ({ sign }) => forged(sign, { alg: "HS256" }), "its alg is not EdDSA"],
    ["with no algorithm", ({ sign }) => forged(sign, { alg: "none" }), "its alg is not EdDSA"],
    ["as a token of another type", ({ sign }) => sign(receiptClaims(), { typ: "JWT" }), "its typ"],
    ["without a type", ({ sign }) => sign(receiptClaims(), { typ: undefined }), "its typ"],
    ["of an unknown key", ({ sign }) => sign(receiptClaims(), { kid: "k9" }), "its kid"],
    ["without a kid", ({ sign }) => sign(receiptClaims(), { kid: undefined }), "its kid"],
    ["with payload of another kind", ({ sign }) => sign("text"), "its payload"],
    ["without a claim", ({ sign }) => sign(receiptClaims({ caller: undefined })), "its caller"],
    ["of a call that runs", ({ sign }) => sign(receiptClaims({ status: "running" })), "its status"],
    ["with a strange hash", ({ sign }) => sign(receiptClaims({ req_sha256: "AB" })), "its req_sha256"],
    [
      "with a strange settlement",
      ({ sign }) => sign(receiptClaims({ settlement: { status: "lost" } })),
      "its settlement",
    ],
    ["signed by somebody else", async () => (await receiptSigner()).sign(receiptClaims()), "its signature"],
  ];
  for (const [what, make, problem] of problems) {
    test(`does not hold ${what}`, async () => {
      const found = await firstBreak([await make(signer)]);
      expect(found?.problem).toStartWith(problem);
    });
  }
});

/** A header that no library would sign. */
async function forged(sign: Signer["sign"], header: object): Promise<string> {
  const [, payload = "", signature = ""] = (await sign(receiptClaims())).split(".");
  const changed = Buffer.from(JSON.stringify({ kid: "k1", typ: "receipt+jwt", ...header }));
  return `${changed.toString("base64url")}.${payload}.${signature}`;
}

describe("a set of keys for receipts", () => {
  test("has to hold an Ed25519 key; what else is in it is passed over", async () => {
    const others = [{ kty: "RSA", kid: "r", n: "AQAB", e: "AQAB" }, null, "x", { ...signer.jwk, kid: 5 }];
    const known = await receiptKeys({ keys: [...others, signer.jwk] });
    expect([...(known?.keys() ?? [])]).toEqual(["k1"]);
    for (const bad of [null, [], {}, { keys: {} }, { keys: others }, { keys: [{ ...signer.jwk, x: "AA" }] }]) {
      expect(await receiptKeys(bad)).toBeNull();
    }
  });
});
