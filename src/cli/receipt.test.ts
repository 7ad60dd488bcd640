import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { decodeJwt } from "jose";
import { startUpstream } from "../../test/support/http/upstream.ts";
import { linkTo, receiptSigner, type Signer, signedChain } from "../../test/support/stores/receipts.ts";
import { COMMANDS, SERVE } from "../commands.ts";
import { StartupProblem } from "../core/startup.ts";
import { Misuse, readCommandLine } from "./command-line.ts";
import * as receipt from "./receipt.ts";

const dir = mkdtempSync(join(tmpdir(), "tollgate-receipt-"));
let signer: Signer;
let jwks: string;
let serial = 0;

const file = (text: string) => {
  const path = join(dir, `file-${++serial}`);
  writeFileSync(path, text);
  return path;
};
/** How a file ends that has lost nothing at its end. */
const lastOf = (lines: readonly string[]) => {
  const { receipt_id, completed_at } = decodeJwt(lines.at(-1) ?? "");
  return `the last one is ${receipt_id}, of ${completed_at}\n`;
};
const lineOf = (...words: string[]) => readCommandLine(["receipt", ...words], COMMANDS, SERVE);
const verifyReceipts = (of: { readonly file: string; readonly jwks: string }) =>
  receipt.verify(lineOf("verify", of.file, `--jwks=${of.jwks}`));
const verify = (text: string) => verifyReceipts({ file: file(text), jwks });

beforeAll(async () => {
  signer = await receiptSigner();
  jwks = file(JSON.stringify({ keys: [signer.jwk] }));
});

afterAll(() => rmSync(dir, { recursive: true }));

describe("tollgate receipt verify", () => {
  test("says what holds of a chain", async () => {
    const lines = await signedChain(signer, 3);
    expect(await verify(`${lines.join("\n")}\n`)).toMatchObject({
      holds: true,
      text: `3 receipts are valid, in one unbroken chain: tenant "acme", from the tenant's first\n${lastOf(lines)}`,
    });
    expect(await verify(lines.slice(1).join("\n"))).toMatchObject({
      holds: true,
      text: `2 receipts are valid, in one unbroken chain: tenant "acme", following an earlier one, which is not in this file\n${lastOf(lines)}`,
    });
    expect(await verify(`${lines[0]}\n`)).toMatchObject({
      holds: true,
      text: `1 receipt is valid: tenant "acme", from the tenant's first\n${lastOf(lines.slice(0, 1))}`,
    });
  });

  test("names the first receipt that does not hold", async () => {
    const [a = "", b = "", c = ""] = await signedChain(signer, 3);
    expect(await verify(`${a}\n${c}\n`)).toMatchObject({
      holds: false,
      text: expect.stringMatching(/^line 2, rcpt_[0-9a-f-]{36}, does not hold: its `previous` /),
    });
    expect((await verify(`${a}\n\n${b}\n`)).text).toStartWith("line 2 does not hold: it is not a compact JWS");
    expect((await verify(`${a}\n${b}\n\n`)).text).toStartWith("line 3 does not hold");
    expect((await verify(`${a}\r\n${b}\n`)).text).toStartWith("line 1");
    expect((await verify(`${a}\n${"x".repeat(100_000)}`)).text).toBe(
      "line 2 does not hold: it is too long for a receipt\n",
    );
  });

  test("gives a verdict that programs can read too", async () => {
    const [a = "", b = "", c = ""] = await signedChain(signer, 3);
    const { receipt_id, completed_at } = decodeJwt(c);
    expect((await verify(`${a}\n${b}\n${c}\n`)).document).toEqual({
      ...{ holds: true, receipts: 3, tenant: "acme", previous: null, broken: null },
      last: { receipt_id, completed_at },
    });
    const nothing = { holds: false, receipts: 0, tenant: null, previous: null, last: null };
    expect((await verify(`${a}\n${c}\n`)).document).toEqual({
      ...nothing,
      broken: { line: 2, receipt_id, problem: expect.stringContaining("`previous`") },
    });
    expect((await verify("")).document).toEqual({
      ...nothing,
      broken: { line: null, receipt_id: null, problem: "it is empty" },
    });
  });

  test("says of an empty file that it does not hold", async () => {
    const path = file("");
    expect(await verifyReceipts({ file: path, jwks })).toMatchObject({
      holds: false,
      text: `there are no receipts in ${path}\n`,
    });
    expect((await verify("\n")).text).toStartWith("line 1 does not hold");
  });

  test("reads a long export piece by piece", async () => {
    const lines = await signedChain(signer, 400);
    expect((await verify(lines.join("\n"))).holds).toBe(true);
    const changed = [...lines.slice(0, 350), ...(await signedChain(signer, 1, linkTo("x"))), ...lines.slice(351)];
    expect((await verify(changed.join("\n"))).text).toStartWith("line 351, rcpt_");
  });

  test("takes the keys from a URL too", async () => {
    const upstream = startUpstream((request) => {
      const answers = request.url.endsWith("/jwks.json");
      return answers ? Response.json({ keys: [signer.jwk] }) : new Response("none", { status: 404 });
    });
    try {
      const path = file((await signedChain(signer, 2)).join("\n"));
      expect((await verifyReceipts({ file: path, jwks: `${upstream.url}jwks.json` })).holds).toBe(true);
      expect(verifyReceipts({ file: path, jwks: `${upstream.url}other` })).rejects.toThrow("answered 404");
    } finally {
      await upstream.stop();
    }
  });

  test("takes no keys over plain HTTP from another machine", async () => {
    const path = file((await signedChain(signer, 1)).join("\n"));
    for (const host of ["keys.example.com", "10.0.0.1", "127.0.0.1.example.com", "localhost.example.com", "[::2]"]) {
      const verdict = verifyReceipts({ file: path, jwks: `HTTP://${host}/.well-known/jwks.json` });
      await expect(verdict).rejects.toThrow("keys must come over https");
    }
    const local = ["127.0.0.1:1", "127.1:1", "LocalHost:1", "[0::1]:1"];
    for (const host of local) {
      await expect(verifyReceipts({ file: path, jwks: `http://${host}/` })).rejects.not.toThrow("https");
    }
  });

  test("gives no verdict on what can't be read", async () => {
    const path = file("x");
    for (const bad of [join(dir, "none"), dir, path, file("{}"), file(JSON.stringify({ keys: [] }))]) {
      expect(verifyReceipts({ file: path, jwks: bad })).rejects.toThrow("--jwks must be a JSON Web Key Set");
      expect(verifyReceipts({ file: path, jwks: bad })).rejects.toBeInstanceOf(StartupProblem);
    }
    expect(verifyReceipts({ file: join(dir, "none"), jwks })).rejects.toThrow(`FILE ${dir}/none does not exist`);
    expect(verifyReceipts({ file: dir, jwks })).rejects.toThrow("FILE must be readable");
  });

  test("tells what is missing on the command line", async () => {
    const line = lineOf("verify");
    expect(receipt.verify(line)).rejects.toBeInstanceOf(Misuse);
    expect(line.problems).toEqual([
      "FILE is missing: tollgate receipt verify FILE",
      expect.stringContaining("--jwks is missing"),
    ]);
    const whole = lineOf("verify", file("x"), `--jwks=${dir}/keys.json`);
    expect(receipt.verify(whole)).rejects.toThrow(
      `--jwks must be a JSON Web Key Set with an Ed25519 key: ${dir}/keys.json`,
    );
    expect([...whole.problems, ...lineOf().problems]).toEqual([
      "receipt is not a command by itself; did you mean receipt verify?",
    ]);
  });
});
