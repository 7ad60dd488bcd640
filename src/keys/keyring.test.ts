import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { CompactSign, compactVerify, createLocalJWKSet } from "jose";
import { onlyMasterKey } from "../../test/support/keys.ts";
import { until } from "../../test/support/until.ts";
import { type Log, silentLog } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { systemClock } from "../core/time.ts";
import { openSqlite } from "../storage/sqlite/store.ts";
import type { Store } from "../storage/store.ts";
import { newKey, open } from "./envelope.ts";
import { createWatch, openKeyring } from "./keyring.ts";
import { loadMasterKey } from "./master-keys.ts";

let dir: string;
let stores: Store[];

beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "keys-"));
  stores = [];
});

afterEach(async () => {
  for (const store of stores) await store.close();
  rmSync(dir, { recursive: true });
});

async function openStore(): Promise<Store> {
  const store = await openSqlite({ path: join(dir, "tollgate.db"), log: silentLog, clock: systemClock });
  stores.push(store);
  return store;
}

function load(log: Log = silentLog) {
  return loadMasterKey(null, dir, log);
}

describe("the keyring", () => {
  const secret = Buffer.from("a secret of the tenant acme");

  test("opens what it sealed, after a restart too, for the same tenant and record only", async () => {
    const master = newKey();
    const first = await openKeyring(await openStore(), onlyMasterKey(master), systemClock);
    const sealed = await first.sealSecret("acme", "cred_1", secret);
    await first.sealSecret("other", "cred_1", secret);
    const second = await openKeyring(await openStore(), onlyMasterKey(master), systemClock);
    expect(await second.openSecret("acme", "cred_1", sealed)).toEqual(secret);
    expect(second.openSecret("acme", "cred_2", sealed)).rejects.toThrow();
    expect(second.openSecret("other", "cred_1", sealed)).rejects.toThrow();
    expect(second.openSecret("nobody", "cred_1", sealed)).rejects.toThrow();
  });

  test("two replicas that first meet a tenant at once agree on its key", async () => {
    const master = newKey();
    const rings = await Promise.all([
      openKeyring(await openStore(), onlyMasterKey(master), systemClock),
      openKeyring(await openStore(), onlyMasterKey(master), systemClock),
    ]);
    const sealed = await Promise.all(rings.map((ring) => ring.sealSecret("acme", "cred_1", secret)));
    for (const ring of rings)
      for (const one of sealed) expect(await ring.openSecret("acme", "cred_1", one)).toEqual(secret);
    expect(rings[0]!.signingKey("issuer").kid).toBe(rings[1]!.signingKey("issuer").kid);
    expect(rings[0]!.publicJwks()).toEqual(rings[1]!.publicJwks());
  });

  test("derives a key for each purpose of each tenant, the same on replicas and after a restart", async () => {
    const master = newKey();
    const rings = await Promise.all([
      openKeyring(await openStore(), onlyMasterKey(master), systemClock),
      openKeyring(await openStore(), onlyMasterKey(master), systemClock),
    ]);
    const owners = [
      ["acme", "a"],
      ["acme", "b"],
      ["other", "a"],
      [null, "a"],
    ] as const;
    const keys = await Promise.all(rings.map((ring) => Promise.all(owners.map((of) => ring.deriveKey(of[0], of[1])))));
    expect(keys[0]).toEqual(keys[1]!);
    expect(new Set(keys[0]?.map((key) => key.toString("hex"))).size).toBe(owners.length);
    const later = await openKeyring(await openStore(), onlyMasterKey(master), systemClock);
    expect(await later.deriveKey("acme", "a")).toEqual(keys[0]![0]!);
    // A secret's own wrapping key is no part of what is given out.
    const { sealed } = await later.sealSecret("acme", "cred_1", secret);
    expect(() => open(keys[0]![0]!, sealed, "cred_1")).toThrow();
  });

  test("signs with a key of its own for each purpose, whose public half alone is shown", async () => {
    const ring = await openKeyring(await openStore(), onlyMasterKey(newKey()), systemClock);
    for (const purpose of ["issuer", "receipts"] as const) {
      const { kid, privateKey } = ring.signingKey(purpose);
      const jws = await new CompactSign(secret).setProtectedHeader({ alg: "EdDSA", kid }).sign(privateKey);
      await compactVerify(jws, createLocalJWKSet(ring.publicJwks()));
      if (purpose === "issuer") expect(ring.issuerJwks().keys.map((key) => key.kid)).toEqual([kid]);
    }
    expect(ring.publicJwks().keys.length).toBe(2);
    for (const key of ring.publicJwks().keys) {
      expect(Object.keys(key).sort()).toEqual(["alg", "crv", "kid", "kty", "use", "x"]);
    }
  });

  test("refuses a database that was made with another master key", async () => {
    await openKeyring(await openStore(), onlyMasterKey(newKey()), systemClock);
    const attempt = openKeyring(await openStore(), onlyMasterKey(newKey()), systemClock);
    expect(attempt).rejects.toBeInstanceOf(StartupProblem);
    expect(attempt).rejects.toThrow("TOLLGATE_MASTER_KEY");
  });

  test("leaves no secret and no private key in the database files", async () => {
    const master = newKey();
    const store = await openStore();
    const ring = await openKeyring(store, onlyMasterKey(master), systemClock);
    await ring.sealSecret("acme", "cred_1", secret);
    await store.close();
    stores = [];
    const files = Buffer.concat(readdirSync(dir).map((name) => readFileSync(join(dir, name))));
    expect(files.includes('"x":')).toBe(true);
    for (const needle of [secret, master, Buffer.from('"d":')]) expect(files.includes(needle)).toBe(false);
  });
});

describe("the master key", () => {
  test("is generated once, for its owner alone, and read again", () => {
    const first = load();
    expect(first.generated).toBe(true);
    expect(first.key.length).toBe(32);
    expect(statSync(join(dir, "master.key")).mode & 0o777).toBe(0o600);
    expect(load()).toEqual({ key: first.key, generated: false });
    expect(readdirSync(dir)).toEqual(["master.key"]);
  });

  test("processes that start at once agree on one", async () => {
    const script = `
      import { loadMasterKey } from ${JSON.stringify(join(import.meta.dir, "master-keys.ts"))};
      const log = { warn() {} };
      const { key, generated } = loadMasterKey(null, ${JSON.stringify(dir)}, log);
      console.log(JSON.stringify([key.toString("hex"), generated]));`;
    const children = Array.from({ length: 6 }, () =>
      Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", timeout: 10_000 }),
    );
    const answers = await Promise.all(children.map(async (child) => JSON.parse(await child.stdout.text())));
    expect(new Set(answers.map(([key]) => key)).size).toBe(1);
    expect(answers.filter(([, generated]) => generated).length).toBe(1);
    expect(readdirSync(dir)).toEqual(["master.key"]);
  });

  test("is the configured one where there is one, and nothing is generated", () => {
    const configured = newKey();
    expect(loadMasterKey(configured, dir, silentLog)).toEqual({
      key: configured,
      generated: false,
    });
    expect(readdirSync(dir)).toEqual([]);
  });

  test("is refused when it is malformed, and stays as it is", () => {
    for (const text of ["", "short", `${newKey().toString("base64")}\n\n`, newKey().toString("hex")]) {
      writeFileSync(join(dir, "master.key"), text);
      expect(() => load()).toThrow(StartupProblem);
      expect(readFileSync(join(dir, "master.key"), "utf8")).toBe(text);
    }
  });

  test("is not replaced by a new one when it is missing beside a database which holds keys", async () => {
    await openKeyring(await openStore(), onlyMasterKey(newKey()), systemClock);
    expect(() => load()).toThrow("TOLLGATE_MASTER_KEY must be set");
    expect(readdirSync(dir)).not.toContain("master.key");
  });

  test("is not made either beside a file which is no database", () => {
    writeFileSync(join(dir, "tollgate.db"), "not a database, but something that was meant to be one");
    expect(() => load()).toThrow("TOLLGATE_MASTER_KEY must be set");
  });

  test("is made beside a database that holds no keys, as a facilitator's does not", async () => {
    await openStore();
    expect(load().generated).toBe(true);
  });

  test("is warned of when others may read it", () => {
    load();
    chmodSync(join(dir, "master.key"), 0o644);
    const warnings: string[] = [];
    load({ ...silentLog, warn: (event) => warnings.push(event) });
    expect(warnings).toEqual(["master_key_too_open"]);
  });
});

/** A look that ends when it is told to. */
function heldLook(now?: () => number) {
  const looks: PromiseWithResolvers<void>[] = [];
  const failures: unknown[] = [];
  const begun = () => {
    const look = Promise.withResolvers<void>();
    looks.push(look);
    return look.promise;
  };
  return { looks, failures, watch: createWatch(begun, (error) => failures.push(error), now) };
}

test("a look that was asked for begins after the question, whatever is under way, and is shared", async () => {
  const { looks, watch } = heldLook();
  const first = watch.renewed();
  await Bun.sleep(0);
  expect(looks.length).toBe(1);
  const others = [watch.renewed(), watch.renewed()];
  looks[0]?.resolve();
  await first;
  await until(() => looks.length >= 2);
  looks[1]?.resolve();
  await Promise.all(others);
  expect(looks.length).toBe(2);
});

test("nobody waits long for a look that hangs", async () => {
  const { watch } = heldLook();
  const startedAt = performance.now();
  await watch.renewed();
  expect(performance.now() - startedAt).toBeGreaterThan(400);
});

test("a look that fails is told of, and keeps nobody", async () => {
  const { looks, failures, watch } = heldLook();
  const asked = watch.renewed();
  await until(() => looks.length !== 0);
  looks[0]?.reject(new Error("the database is away"));
  await asked;
  expect(failures).toEqual([new Error("the database is away")]);
});

test("what was seen is fresh for two seconds and no longer: then a look is waited for", async () => {
  let time = 0;
  const { looks, watch } = heldLook(() => time);
  watch.start();
  time = 1_999;
  await watch.refreshed();
  expect(watch.isFresh()).toBe(true);
  time = 2_000;
  expect(watch.isFresh()).toBe(false);
  let isOver = false;
  const waiting = watch.refreshed().then(() => {
    isOver = true;
  });
  await Bun.sleep(0);
  expect(isOver).toBe(false);
  looks[0]?.resolve();
  await waiting;
  expect(watch.isFresh()).toBe(true);
  await watch.stop();
});

test("what was seen is gone by for ten seconds and no longer, and again after the next look", async () => {
  let time = 0;
  const { looks, watch } = heldLook(() => time);
  watch.start();
  const states = [watch.isUsable()];
  time = 9_999;
  states.push(watch.isFresh(), watch.isUsable());
  time = 10_000;
  states.push(watch.isUsable());
  // Whoever comes now waits for a look that goes on.
  const waiting = watch.refreshed();
  looks[0]?.resolve();
  await waiting;
  states.push(watch.isUsable(), watch.isFresh());
  await watch.stop();
  expect(states).toEqual([true, false, true, false, true, true]);
});

test("a process that does not watch waits for nothing", async () => {
  const { looks, watch } = heldLook();
  await watch.refreshed();
  expect([watch.isFresh(), looks.length]).toEqual([true, 0]);
});

test("however many want a look, there is one in a tenth of a second at most", async () => {
  let looks = 0;
  const watch = createWatch(
    async () => {
      looks += 1;
    },
    () => {},
  );
  const startedAt = performance.now();
  for (let n = 0; n < 4; n++) await Promise.all(Array.from({ length: 100 }, () => watch.renewed()));
  // A timer of 100 ms may fire a fraction of a millisecond early.
  expect(looks).toBeLessThanOrEqual((performance.now() - startedAt) / 98 + 1);
});
