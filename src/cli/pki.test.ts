import { expect, test } from "bun:test";
import { X509Certificate } from "node:crypto";
import { caProblem, issueCa, issueClient, issueServer, readPkiRequest } from "./pki.ts";

function read(command: string, flags: Record<string, string>, hosts: string[] = []) {
  const problems: string[] = [];
  const lists = new Map([["host", hosts]]);
  const request = readPkiRequest({ command, words: [], flags: new Map(Object.entries(flags)), lists, problems });
  return { request: problems.length === 0 ? request : null, problems };
}

test("a server has names and addresses, each once and in its shortest form", () => {
  const { request, problems } = read("pki server", { dir: "d" }, [
    "Gateway.Test.",
    "gateway.test",
    "*.wild.test",
    "10.0.0.1",
    "[2001:DB8:0:0::1]",
    "::ffff:192.0.2.1",
  ]);
  const hosts = ["gateway.test", "*.wild.test", "10.0.0.1", "2001:db8::1", "::ffff:c000:201"];
  expect({ request, problems }).toEqual({
    request: { dir: "d", wanted: { kind: "server", hosts } },
    problems: [],
  });
});

test("hosts that are none are refused, and all of them are named", () => {
  for (const host of [
    "",
    "a b",
    "http://a",
    "a:1",
    "10.0.0.0/8",
    "*.1.2.3.4",
    "*",
    "*.*.a",
    "fe80::1%eth0",
    "*.::1",
    "1.2.3",
    "é.test",
  ]) {
    const { request, problems } = read("pki server", { dir: "d" }, ["ok.test", host]);
    expect([host, request, problems]).toEqual([host, null, [expect.stringContaining("--host must")]]);
  }
  expect(read("pki server", { dir: "d" }, []).request).toBeNull();
  expect(
    read(
      "pki server",
      { dir: "d" },
      Array.from({ length: 101 }, (_, n) => `h${n}.test`),
    ).request,
  ).toBeNull();
});

test("a client's name is a safe one of a file, and none of the others'", () => {
  for (const name of ["alice", "a.b-c_d", "_", "x".repeat(64), "ca2", "servers"]) {
    expect(read("pki client", { dir: "d", name }).request).toEqual({
      dir: "d",
      wanted: { kind: "client", name },
    });
  }
  for (const name of [
    "",
    "..",
    ".a",
    "-a",
    "a/b",
    "../a",
    "a b",
    "a\n",
    "a\0",
    "ca",
    "CA",
    "Server",
    "é",
    "x".repeat(65),
  ]) {
    expect([name, read("pki client", { dir: "d", name }).problems]).toEqual([
      name,
      [expect.stringMatching(/^--name must .*1 to 64 letters/)],
    ]);
  }
});

test("all flags that are missing are told at once", () => {
  expect(read("pki init", {}).problems).toHaveLength(1);
  expect(read("pki server", { dir: "" }).problems).toHaveLength(2);
  expect(read("pki client", {}).problems).toHaveLength(2);
});

const DAY_MS = 86_400_000;
const NOW = Date.parse("2026-11-21T12:00:00Z");
const notAfter = (cert: string) => Date.parse(new X509Certificate(cert).validTo);

test("no certificate outlives its CA, and a CA that has expired signs nothing", async () => {
  const ca = await issueCa(NOW);
  const end = notAfter(ca.cert);
  expect(end).toBe(NOW + 3652 * DAY_MS);
  expect(notAfter((await issueClient(ca, "a", end - 398 * DAY_MS)).cert)).toBe(end - DAY_MS);
  expect(notAfter((await issueServer(ca, ["a.test"], end - 30 * DAY_MS)).cert)).toBe(end);
  expect(caProblem(ca, end - 1)).toBeNull();
  expect(caProblem(ca, end)).toBe("the certificate has expired");
});

test("two CAs have names and keys of their own", async () => {
  const [one, two] = [await issueCa(NOW), await issueCa(NOW)];
  expect(new X509Certificate(one.cert).subject).not.toBe(new X509Certificate(two.cert).subject);
  expect(caProblem({ cert: one.cert, key: two.key }, NOW)).toBe("the key does not belong to the certificate");
});
