// `tollgate pki` as its users meet it: the compiled binary writes a CA, a server and clients, which openssl takes
// for what they are, and with which two parties shake hands.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tollgateBinary } from "./support/gateway/binary.ts";

let home: string;
beforeAll(() => {
  home = mkdtempSync(join(tmpdir(), "pki-"));
  expect(pki("init", "--dir", "ca").code).toBe(0);
  const hosts = ["localhost", "127.0.0.1", "::1", "*.wild.test", "::ffff:192.0.2.1", "LOCALHOST"];
  expect(pki("server", "--dir", "ca", ...hosts.flatMap((host) => ["--host", host])).code).toBe(0);
  expect(pki("client", "--dir", "ca", "--name", "alice").code).toBe(0);
});
afterAll(() => rmSync(home, { recursive: true, force: true }));

function pki(...words: string[]) {
  // Variables that no other command would start with.
  const env = { TOLLGATE_MODE: "nonsense", TOLLGATE_DATA_DIR: "/dev/null" };
  const run = Bun.spawnSync([tollgateBinary(), "pki", ...words], { cwd: home, env, stdin: "ignore" });
  return { code: run.exitCode, out: run.stdout.toString(), err: run.stderr.toString() };
}

function openssl(...words: string[]): string {
  const run = Bun.spawnSync(["openssl", ...words], { cwd: home });
  return run.stdout.toString() + run.stderr.toString();
}

const read = (path: string) => readFileSync(join(home, path), "utf8");
const text = (name: string) => openssl("x509", "-in", `ca/${name}.crt`, "-noout", "-text");

describe("openssl takes", () => {
  const verified = (name: string, purpose: string) =>
    openssl("verify", "-x509_strict", "-CAfile", "ca/ca.crt", "-purpose", purpose, `ca/${name}.crt`);

  test("each certificate for what it is, and for nothing else", () => {
    expect(verified("server", "sslserver")).toBe("ca/server.crt: OK\n");
    expect(verified("alice", "sslclient")).toBe("ca/alice.crt: OK\n");
    expect(verified("server", "sslclient")).toContain("purpose");
    expect(verified("alice", "sslserver")).toContain("purpose");
    for (const name of ["server", "alice"]) expect(verified(name, "smimesign")).toContain("purpose");
  });

  test("the CA for one that signs end certificates only", () => {
    const ca = text("ca");
    expect(ca).toContain("X509v3 Basic Constraints: critical\n                CA:TRUE, pathlen:0\n");
    expect(ca).toContain("X509v3 Key Usage: critical\n                Certificate Sign, CRL Sign\n");
    expect(ca).toMatch(/Issuer: (CN = tollgate CA [0-9a-f]{8})\n(.*\n)*? +Subject: \1\n/);
  });

  test("the others for end certificates that name their CA's key", () => {
    const caKey = /Subject Key Identifier: \n +(\S+)/.exec(text("ca"))?.[1] ?? "none";
    for (const name of ["server", "alice"]) {
      expect(text(name)).toContain("X509v3 Basic Constraints: critical\n                CA:FALSE\n");
      expect(text(name)).toContain("X509v3 Key Usage: critical\n                Digital Signature\n");
      expect(text(name)).toContain(`X509v3 Authority Key Identifier: \n                ${caKey}\n`);
      expect(text(name)).toMatch(/X509v3 Subject Key Identifier: \n {16}[0-9A-F:]{59}\n/);
      expect(text(name)).toContain("NIST CURVE: P-256");
    }
    expect(text("alice")).toContain("Subject: CN = alice\n");
  });

  test("the hosts of a certificate for what they are, each once", () => {
    expect(openssl("x509", "-in", "ca/server.crt", "-noout", "-ext", "subjectAltName")).toContain(
      "DNS:localhost, IP Address:127.0.0.1, IP Address:0:0:0:0:0:0:0:1, DNS:*.wild.test, IP Address:0:0:0:0:0:FFFF:C000:201\n",
    );
  });

  test("the keys of PKCS #8 that belong to the certificates", () => {
    for (const name of ["ca", "server", "alice"]) {
      expect(read(`ca/${name}.key`)).toStartWith("-----BEGIN PRIVATE KEY-----\n");
      expect(openssl("pkey", "-in", `ca/${name}.key`, "-pubout")).toBe(
        openssl("x509", "-in", `ca/${name}.crt`, "-noout", "-pubkey"),
      );
    }
  });
});

test("certificates hold from an hour ago, the CA for ten years, the others for 397 days", () => {
  const day = 86_400_000;
  for (const [name, days] of [
    ["ca", 3652],
    ["server", 397],
    ["alice", 397],
  ] as const) {
    const dates = openssl("x509", "-in", `ca/${name}.crt`, "-noout", "-dates");
    const [from = 0, to = 0] = [...dates.matchAll(/=(.*)/g)].map(([, date = ""]) => Date.parse(date));
    expect(to - from).toBe(days * day + day / 24);
    expect(Math.abs(Date.now() - day / 24 - from)).toBeLessThan(60_000);
  }
});

test("serial numbers are 16 bytes and never the same", () => {
  const serials = ["ca", "server", "alice"].map((name) =>
    openssl("x509", "-in", `ca/${name}.crt`, "-noout", "-serial"),
  );
  for (const serial of serials) expect(serial).toMatch(/^serial=[4-7][0-9A-F]{31}\n$/);
  expect(new Set(serials).size).toBe(3);
});

test("the bundle of a client is its certificate, its key and the CA", () => {
  expect(read("ca/alice.pem")).toBe(read("ca/alice.crt") + read("ca/alice.key") + read("ca/ca.crt"));
});

test("every file is for its owner only, and nothing else is left", () => {
  const files = ["alice.crt", "alice.key", "alice.pem", "ca.crt", "ca.key", "server.crt", "server.key"];
  expect(readdirSync(join(home, "ca")).sort()).toEqual(files);
  for (const path of files) expect([path, statSync(join(home, "ca", path)).mode & 0o777]).toEqual([path, 0o600]);
  expect(statSync(join(home, "ca")).mode & 0o777).toBe(0o700);
});

describe("a handshake with the certificates", () => {
  const url = (host: string, server: { port?: number | undefined }) => `https://${host}:${server.port}/`;
  const serve = (hostname: string) =>
    Bun.serve({
      hostname,
      port: 0,
      tls: {
        cert: read("ca/server.crt"),
        key: read("ca/server.key"),
        ca: read("ca/ca.crt"),
        requestCert: true,
        rejectUnauthorized: true,
      },
      fetch: () => new Response("in"),
    });
  const bundle = () => {
    const [cert = "", key = "", ca = ""] =
      read("ca/alice.pem").match(/-----BEGIN [^-]+-----[^-]+-----END [^-]+-----\n/g) ?? [];
    return { cert, key, ca };
  };

  test("succeeds with the bundle, by every name and address of the server", async () => {
    for (const [listen, hosts] of [
      ["127.0.0.1", ["127.0.0.1", "localhost"]],
      ["::1", ["[::1]"]],
    ] as const) {
      const server = serve(listen);
      try {
        for (const host of hosts) expect(await (await fetch(url(host, server), { tls: bundle() })).text()).toBe("in");
      } finally {
        await server.stop(true);
      }
    }
  });

  test("fails without a certificate, with another CA's, and by another name of the server", async () => {
    expect(pki("init", "--dir", "other").code).toBe(0);
    expect(pki("client", "--dir", "other", "--name", "alice").code).toBe(0);
    const server = serve("127.0.0.1");
    const { ca } = bundle();
    const foreign = { cert: read("other/alice.crt"), key: read("other/alice.key"), ca };
    const asServer = { cert: read("ca/server.crt"), key: read("ca/server.key"), ca };
    try {
      for (const tls of [{ ca }, foreign, asServer, { ...bundle(), ca: read("other/ca.crt") }]) {
        await expect(fetch(url("127.0.0.1", server), { tls })).rejects.toThrow();
      }
      const misnamed = fetch(url("127.0.0.1", server), {
        tls: { ...bundle(), serverName: "else.test" },
        headers: { host: "else.test" },
      });
      await expect(misnamed).rejects.toThrow();
    } finally {
      await server.stop(true);
    }
  });
});

describe("the command pki writes nothing over", () => {
  for (const [words, taken] of [
    [["init", "--dir", "ca"], "ca/ca.key"],
    [["server", "--dir", "ca", "--host", "x.test"], "ca/server.key"],
    [["client", "--dir", "ca", "--name", "alice"], "ca/alice.key"],
  ] as const) {
    test(`that ${words.join(" ")} made before`, () => {
      const before = read(taken);
      const { code, out, err } = pki(...words);
      expect({ code, out }).toEqual({ code: 2, out: "" });
      expect(err).toContain(`  - ${taken} exists already, and no file is ever overwritten\n`);
      expect(read(taken)).toBe(before);
    });
  }

  test("and none of several files when the last of them is there", () => {
    writeFileSync(join(home, "ca", "bob.pem"), "mine");
    expect(pki("client", "--dir", "ca", "--name", "bob").err).toContain("ca/bob.pem exists already");
    expect(readdirSync(join(home, "ca")).filter((name) => name.includes("bob"))).toEqual(["bob.pem"]);
    expect(read("ca/bob.pem")).toBe("mine");
  });
});

test("the command pki says what it wrote, and the command that comes next", () => {
  const { code, out, err } = pki("client", "--dir", "ca", "--name", "bob.b-1_x");
  const files = ["key", "crt", "pem"].map((end) => `wrote ca/bob.b-1_x.${end}\n`).join("");
  expect({ code, err }).toEqual({ code: 0, err: "" });
  expect(out).toStartWith(`${files}next: `);
  expect(out).toEndWith(" account add bob.b-1_x --cert ca/bob.b-1_x.crt\n");
  expect(out.split("\n")).toHaveLength(5);
});

describe("the command pki refuses with status 2", () => {
  const problem = (...words: string[]) => {
    const { code, out, err } = pki(...words);
    expect({ code, out }).toEqual({ code: 2, out: "" });
    return err;
  };

  test("all that is missing, at once", () => {
    expect(problem("init")).toContain("--dir is missing");
    expect(problem("server", "--drr", "x")).toMatch(
      /--drr is not a flag of this command; did you mean --dir\?[\s\S]*--dir is missing[\s\S]*--host is missing/,
    );
    expect(problem("client")).toMatch(/--dir is missing[\s\S]*--name is missing/);
  });

  test("a directory without a CA, or with something else in its place", () => {
    expect(problem("server", "--dir", "none", "--host", "a")).toContain(
      "none/ca.crt does not exist: make the CA first, with ",
    );
    mkdirSync(join(home, "mixed"));
    writeFileSync(join(home, "mixed/ca.crt"), read("ca/ca.crt"));
    writeFileSync(join(home, "mixed/ca.key"), read("ca/server.key"));
    expect(problem("server", "--dir", "mixed", "--host", "a")).toContain("the key does not belong to the certificate");
    writeFileSync(join(home, "mixed/ca.crt"), read("ca/server.crt"));
    expect(problem("server", "--dir", "mixed", "--host", "a")).toContain("the certificate is not a CA's");
    writeFileSync(join(home, "mixed/ca.key"), "nonsense");
    expect(problem("client", "--dir", "mixed", "--name", "a")).toContain(
      "they are not a certificate and its private key",
    );
    expect(readdirSync(join(home, "mixed")).sort()).toEqual(["ca.crt", "ca.key"]);
  });

  test("a place that can't be a directory", () => {
    expect(problem("init", "--dir", "ca/ca.crt")).toContain("--dir must be a directory, and ca/ca.crt is a file");
    expect(problem("init", "--dir", "/proc/nowhere")).toContain(
      "/proc/nowhere can't be written: no such file or directory (ENOENT)",
    );
  });
});

test("the command pki tells of a directory that others may look into", () => {
  mkdirSync(join(home, "open"));
  chmodSync(join(home, "open"), 0o755);
  expect(pki("init", "--dir", "open").out).toContain("warning: other users can read open\n");
});
