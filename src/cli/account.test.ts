import { Database } from "bun:sqlite";
import { afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makePki, type Pki } from "../../test/support/http/pki.ts";
import { places } from "../../test/support/stores/stores.ts";
import { until } from "../../test/support/until.ts";
import { accountOf } from "../facilitator/accounts.ts";

const MAIN = join(import.meta.dir, "..", "main.ts");

let pki: Pki;
let dir: string;
beforeAll(async () => {
  pki = await makePki();
});
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "account-"));
});
afterEach(() => rmSync(dir, { recursive: true }));

function file(name: string, text: string): string {
  writeFileSync(join(dir, name), text);
  return join(dir, name);
}

function start(words: readonly string[], environment: Record<string, string> = {}) {
  return Bun.spawn([process.execPath, MAIN, "account", ...words], {
    cwd: dir,
    env: { PATH: process.env["PATH"], ...environment },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: 20_000,
  });
}

async function account(words: readonly string[], environment: Record<string, string> = {}) {
  const child = start(words, environment);
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return { code: await child.exited, out, err };
}

const refused = (...problems: string[]) => ({
  code: 2,
  out: "",
  err: expect.stringContaining(problems.map((problem) => `  - ${problem}\n`).join("")),
});

for (const [name, makePlace] of Object.entries(places)) {
  describe(`on ${name}`, () => {
    test("accounts come and go beside an open store, which sees each change at once", async () => {
      const place = await makePlace();
      const store = await place.open();
      const environment: Record<string, string> =
        "url" in place ? { DATABASE_URL: place.url } : { TOLLGATE_DATA_DIR: place.dir };
      const run = (...words: string[]) => account(words, environment);
      const found = () => accountOf(store.read, pki.client.fingerprint);
      try {
        const cert = file("client.crt", pki.client.cert);
        expect(await run("list")).toEqual({ code: 0, out: "there are no accounts\n", err: "" });
        expect(await run("add", "alice", "--cert", cert, "--daily-ceiling", "5000000")).toEqual({
          code: 0,
          out: `added alice, certificate ${pki.client.fingerprint}\nat most 5000000 (5 USDC) a day\n`,
          err: "",
        });
        expect(await found()).toEqual({ name: "alice", maxPerTransaction: null, dailyCeiling: 5_000_000n });
        expect(await run("disable", "alice")).toEqual({ code: 0, out: "disabled alice\n", err: "" });
        expect(await found()).toBeNull();
        expect((await run("enable", "alice")).out).toBe("enabled alice\n");
        expect(await found()).toMatchObject({ name: "alice" });
        const [other, next] = [file("other.crt", pki.otherClient.cert), pki.otherClient.fingerprint];
        expect(await run("add-cert", "alice", "--cert", other)).toEqual({
          code: 0,
          out: `added to alice, certificate ${next}\n`,
          err: "",
        });
        expect([await found(), await accountOf(store.read, next)]).toMatchObject([
          { name: "alice" },
          { name: "alice" },
        ]);
        expect((await run("remove-cert", "alice", "--cert", cert)).out).toBe(
          `removed certificate ${pki.client.fingerprint} from alice\n`,
        );
        expect(await found()).toBeNull();
        expect((await run("remove-cert", "alice", "--cert", other)).out).toBe(
          `removed certificate ${next} from alice; the account has no certificate left and can't settle payments\n`,
        );
        expect((await run("list")).out).toMatch(/^alice +yes +none +default +5000000 \(5 USDC\)$/m);
        expect((await run("add-cert", "alice", "--cert", cert)).code).toBe(0);
        expect(await found()).toMatchObject({ name: "alice" });
        expect((await run("remove", "alice", "--yes")).out).toBe("removed alice\n");
        expect(await found()).toBeNull();
        expect(await run("remove", "alice", "--yes")).toEqual(refused('there is no account "alice"'));
        if ("dir" in place) expect(readdirSync(place.dir)).not.toContain("master.key");
      } finally {
        await store.close();
        place.remove();
      }
    });
  });
}

test("the list is a table, in the order of the names", async () => {
  const bundle = pki.otherClient.cert + pki.otherClient.key + pki.ca.cert;
  await account(["add", "zürich 株", "--cert", file("client.crt", pki.client.cert), "--max-per-transaction", "7"]);
  await account(["add", "bob", "--cert", file("other.pem", bundle)]);
  await account(["disable", "bob"]);
  await account(["add-cert", "bob", "--cert", file("third.crt", pki.expired.cert)]);
  const { out } = await account(["list"]);
  const [headings, ...rows] = out.trimEnd().split("\n");
  expect(headings).toMatch(/^NAME +ENABLED +FINGERPRINT +MAX PER TRANSACTION +DAILY CEILING$/);
  expect(rows).toHaveLength(3);
  expect(rows[0]).toMatch(new RegExp(`^bob        no       ${pki.otherClient.fingerprint}  default +default$`));
  expect(rows[1]).toBe(`${" ".repeat(20)}${pki.expired.fingerprint}`);
  expect(rows[2]).toMatch(
    new RegExp(`^zürich 株  yes      ${pki.client.fingerprint}  7 \\(0.000007 USDC\\) +default$`),
  );
});

test("limits are shown in USDC too, and a maximum that refuses every payment is warned of", async () => {
  const limits = ["--max-per-transaction", "1", "--daily-ceiling", "5"];
  const { code, out, err } = await account(["add", "acme", "--cert", file("client.crt", pki.client.cert), ...limits]);
  expect([code, out]).toEqual([
    0,
    `added acme, certificate ${pki.client.fingerprint}
at most 1 (0.000001 USDC) a payment
at most 5 (0.000005 USDC) a day
`,
  ]);
  expect(err).toBe(
    "warning: the maximum is below 100 (0.0001 USDC), the default of TOLLGATE_MIN_VALUE, so a facilitator with that default " +
      "refuses every payment of acme; limits are in smallest units (1 USDC is 1000000)\n",
  );
});

test("a command waits for a writer in another process", async () => {
  const add = ["add", "alice", "--cert", file("client.crt", pki.client.cert)];
  expect((await account(["add", "bob", "--cert", file("other.crt", pki.otherClient.cert)])).code).toBe(0);
  const database = new Database(join(dir, "data", "tollgate.db"));
  database.run("begin immediate");
  const child = start(add);
  await until(() => openFiles(child.pid).some((path) => path.endsWith("/tollgate.db")));
  expect(child.exitCode).toBeNull();
  database.run("commit");
  expect(await child.exited).toBe(0);
  expect(database.query("select name from facilitator_accounts order by name").values()).toEqual([["alice"], ["bob"]]);
  database.close();
});

function openFiles(pid: number): string[] {
  const table = `/proc/${pid}/fd`;
  return readdirSync(table).flatMap((fd) => {
    try {
      return readlinkSync(join(table, fd));
    } catch {
      return [];
    }
  });
}

describe("a bad account command", () => {
  test("bad flags are all named at once with status 2, and nothing is made", async () => {
    const limits = ["--max-per-transaction", "1e6", "--daily-ceiling", "-1"];
    expect(await account(["add", "alice", "--cert", join(dir, "none"), ...limits])).toEqual(
      refused(
        `--cert must be the path of a readable file with PEM certificates: ${join(dir, "none")} does not exist`,
        "--max-per-transaction must be a whole number of at most 256 bits, in decimal digits only, in smallest units (1 USDC is 1000000)",
        "--daily-ceiling must be a whole number of at most 256 bits, in decimal digits only, in smallest units (1 USDC is 1000000)",
      ),
    );
    expect(await account(["add"])).toEqual(
      refused(
        "NAME is missing: tollgate account add NAME",
        "--cert is missing: a PEM file with the client's certificate",
      ),
    );
    expect(existsSync(join(dir, "data"))).toBe(false);
  });

  test("what is no certificate of a client is refused with status 2", async () => {
    const key = file("client.key", pki.client.key);
    for (const [path, problem] of [
      [key, "is a PEM file, but holds something else"],
      ["/etc/passwd", "is not a PEM file"],
    ] as const) {
      expect(await account(["add", "alice", "--cert", path])).toEqual(
        refused(`--cert must be the path of a readable file with PEM certificates: ${path} ${problem}`),
      );
    }
    const ca = file("ca.crt", pki.ca.cert);
    expect(await account(["add", "alice", "--cert", ca])).toEqual(
      refused("--cert must be a client's certificate, not a CA's"),
    );
  });

  test("a name or a certificate that is taken, or a name that can't be, is refused with status 2", async () => {
    const cert = file("client.crt", pki.client.cert);
    const other = file("other.crt", pki.otherClient.cert);
    await account(["add", "alice", "--cert", cert]);
    expect(await account(["add", "alice", "--cert", other])).toEqual(refused("an account named alice exists already"));
    expect(await account(["add", "bob", "--cert", cert])).toEqual(
      refused("the certificate belongs to the account alice already"),
    );
    expect(await account(["add", "a\nb", "--cert", other])).toEqual(
      refused("NAME must not contain control characters"),
    );
    expect(await account(["add-cert", "alice", "--cert", cert])).toEqual(
      refused("the certificate belongs to the account alice already"),
    );
    expect(await account(["remove-cert", "alice", "--cert", other])).toEqual(
      refused(`alice has no such certificate: its fingerprint is ${pki.otherClient.fingerprint}`),
    );
    for (const words of [["disable"], ["add-cert", "--cert", other], ["remove-cert", "--cert", cert]]) {
      const [command = "", ...flags] = words;
      expect(await account([command, "alcie", ...flags])).toEqual(
        refused('there is no account "alcie"; did you mean alice?'),
      );
    }
    expect(await account(["add-cert", "alice"])).toEqual(
      refused("--cert is missing: a PEM file with the client's certificate"),
    );
    expect((await account(["add-crt", "alice"])).err).toContain("did you mean account add-cert?");
  });

  test("a directory without a database is refused with status 2, and only the first account makes one", async () => {
    for (const words of [["list"], ["disable", "a"], ["enable", "a"], ["remove", "a", "--yes"]]) {
      expect((await account([...words, "--data-dir", "typo"])).err).toContain(
        `--data-dir (or TOLLGATE_DATA_DIR) must be the facilitator's data directory: ${join(dir, "typo")} holds no tollgate.db`,
      );
    }
    expect(readdirSync(dir)).toEqual([]);
  });
});
