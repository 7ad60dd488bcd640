// The files of the mutual-TLS port, changed in the ways in which certificates are renewed: written over, moved over,
// swapped by a link as Kubernetes does it, and caught half-written.
import { afterEach, beforeAll, beforeEach, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, unlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readTlsFiles } from "../src/config/pem.ts";
import type { LogFields } from "../src/core/log.ts";
import { followTlsFiles, type TlsMaterial } from "../src/facilitator/mtls.ts";
import { makePki, type Pki } from "./support/http/pki.ts";

let first: Pki;
let second: Pki;
beforeAll(async () => {
  [first, second] = await Promise.all([makePki(), makePki()]);
});

const materialOf = (pki: Pki): TlsMaterial => ({
  cert: pki.server.cert,
  key: pki.server.key,
  clientCa: pki.ca.cert,
});

let dir: string;
let stop: () => void;
let taken: TlsMaterial[];
let lines: [string, LogFields][];
let looks: number;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "tollgate-tls-"));
  [taken, lines, looks] = [[], [], 0];
});
afterEach(() => {
  stop();
  rmSync(dir, { recursive: true });
});

function put(folder: string, pki: Pki): void {
  mkdirSync(folder, { recursive: true });
  for (const [name, text] of Object.entries(materialOf(pki))) writeFileSync(join(folder, name), text);
}

function follow(folder: string, take = (tls: TlsMaterial) => void taken.push(tls)): void {
  const note = (event: string, fields: LogFields = {}) => void lines.push([event, fields]);
  const paths = { cert: join(folder, "cert"), key: join(folder, "key"), clientCa: join(folder, "clientCa") };
  stop = followTlsFiles({
    read: async () => {
      const reading = await readTlsFiles(paths);
      looks++;
      return reading;
    },
    tls: materialOf(first),
    take,
    log: { debug: note, info: note, warn: note, error: note },
    lookMs: 5,
  });
}

/** As many as it takes to see a change, and to see that it stays. */
async function someLooks(): Promise<void> {
  const until = looks + 4;
  while (looks < until) await Bun.sleep(1);
}

const refusals = () => lines.filter(([event]) => event === "tls_files_refused");

test("certificate files that stay as they are change nothing, and say nothing", async () => {
  put(dir, first);
  follow(dir);
  await someLooks();
  put(dir, first);
  await someLooks();
  expect([taken, lines]).toEqual([[], []]);
});

test("certificate files that are written over are taken, once", async () => {
  put(dir, first);
  follow(dir);
  await someLooks();
  put(dir, second);
  await someLooks();
  await someLooks();
  expect(taken).toEqual([materialOf(second)]);
  expect(lines.map(([event]) => event)).toEqual(expect.arrayContaining(["tls_files_taken"]));
});

test("a link to certificate files that is swapped is taken, and back again", async () => {
  put(join(dir, "1"), first);
  put(join(dir, "2"), second);
  symlinkSync("1", join(dir, "data"));
  follow(join(dir, "data"));
  await someLooks();
  for (const name of ["2", "1"]) {
    symlinkSync(name, join(dir, "next"));
    renameSync(join(dir, "next"), join(dir, "data"));
    await someLooks();
  }
  expect(taken).toEqual([materialOf(second), materialOf(first)]);
});

test("a key that is not the certificate's leaves the last files in force, is told once, and tried at the next change", async () => {
  put(dir, first);
  follow(dir);
  await someLooks();
  writeFileSync(join(dir, "cert"), second.server.cert);
  await someLooks();
  await someLooks();
  expect(refusals()).toEqual([
    [
      "tls_files_refused",
      {
        problem: `TOLLGATE_TLS_KEY_FILE must hold the key of the first certificate in TOLLGATE_TLS_CERT_FILE: ${join(dir, "key")} is not the key of ${join(dir, "cert")}`,
      },
    ],
  ]);
  expect(taken).toEqual([]);
  writeFileSync(join(dir, "key"), second.server.key);
  await someLooks();
  expect(taken).toEqual([{ ...materialOf(second), clientCa: first.ca.cert }]);
  expect(refusals()).toHaveLength(1);
});

test("half of a file, no file, and what is no CA are refused by name, and no value is told", async () => {
  put(dir, first);
  follow(dir);
  await someLooks();
  writeFileSync(join(dir, "key"), first.server.key.slice(0, 100));
  await someLooks();
  writeFileSync(join(dir, "key"), first.server.key);
  unlinkSync(join(dir, "cert"));
  await someLooks();
  writeFileSync(join(dir, "cert"), first.server.cert);
  writeFileSync(join(dir, "clientCa"), first.client.cert);
  await someLooks();
  writeFileSync(join(dir, "clientCa"), first.ca.cert + second.ca.cert.slice(0, -100));
  await someLooks();
  writeFileSync(join(dir, "clientCa"), first.ca.cert);
  writeFileSync(join(dir, "cert"), first.server.cert + first.ca.cert.slice(0, 100));
  await someLooks();
  expect(refusals().map(([, { problem }]) => String(problem).split(" ")[0])).toEqual([
    "TOLLGATE_TLS_KEY_FILE",
    "TOLLGATE_TLS_CERT_FILE",
    "TOLLGATE_CLIENT_CA_FILE",
    "TOLLGATE_CLIENT_CA_FILE",
    "TOLLGATE_TLS_CERT_FILE",
  ]);
  expect(taken).toEqual([]);
  put(dir, first);
  await someLooks();
  expect([taken, refusals().length]).toEqual([[], 5]);
  const told = JSON.stringify(lines);
  const texts = [first, second].map(materialOf).flatMap(({ cert, key, clientCa }) => [cert, key, clientCa]);
  // A random name of a folder may hold any two letters, and the lines of a PEM text are longer.
  const values = texts.join("").match(/^[\w+/]{12}/gm) ?? [];
  expect(values.length).toBeGreaterThan(20);
  for (const value of values) expect(told).not.toContain(value);
});

test("files that the port refuses leave the last ones in force as well", async () => {
  put(dir, first);
  follow(dir, () => {
    throw new Error("unsupported");
  });
  await someLooks();
  put(dir, second);
  await someLooks();
  expect(refusals()).toHaveLength(1);
});
