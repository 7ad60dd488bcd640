import { expect, test } from "bun:test";
import { type PkiCommand, readPkiRequest } from "./pki.ts";

function read(command: PkiCommand, flags: Record<string, string>, hosts: string[] = []) {
  return readPkiRequest(command, {
    flags: new Map(Object.entries(flags)),
    lists: new Map([["host", hosts]]),
  });
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
      [expect.stringContaining("--name must")],
    ]);
  }
});

test("all flags that are missing are told at once", () => {
  expect(read("pki init", {}).problems).toHaveLength(1);
  expect(read("pki server", { dir: "" }).problems).toHaveLength(2);
  expect(read("pki client", { dir: "a\0" }).problems).toHaveLength(2);
});
