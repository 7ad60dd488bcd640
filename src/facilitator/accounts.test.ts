import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { X509Certificate } from "node:crypto";
import { ALICE, BOB, SERVER, TEST_CA } from "../../test/support/http/certificates.ts";
import { clock, type Place, places } from "../../test/support/stores/stores.ts";
import { Fault } from "../core/fault.ts";
import type { Store } from "../storage/store.ts";
import {
  accountOf,
  addAccount,
  addCertificate,
  fingerprintOf,
  listAccounts,
  type NewAccount,
  removeAccount,
  removeCertificate,
  setEnabled,
} from "./accounts.ts";

const problem = (promise: Promise<unknown>) =>
  promise.then(
    () => "none",
    (error) => (error instanceof Fault ? `${error.kind}: ${error.message}` : String(error)),
  );

const account = (name: string, certificate: string, limits: Partial<NewAccount> = {}): NewAccount => ({
  name,
  certificate,
  maxPerTransaction: null,
  dailyCeiling: null,
  ...limits,
});

const alice = fingerprintOf(ALICE.cert);

test("the fingerprint is that of the first certificate of a bundle", () => {
  const expected = new X509Certificate(ALICE.cert).fingerprint256.replaceAll(":", "").toLowerCase();
  expect(alice).toBe(expected);
  expect(fingerprintOf(`notes\r\n${ALICE.key}${ALICE.cert}${TEST_CA}`)).toBe(expected);
});

test("what holds no readable certificate is refused without being repeated", () => {
  const broken = ALICE.cert.replace(/MII\w{8}/, "AAAAAAAAAAA");
  for (const text of ["", "hello", ALICE.key, broken, ALICE.cert.replace("-----END", "")]) {
    expect(() => fingerprintOf(text)).toThrow(/^certificate: must hold a certificate in PEM/);
  }
});

describe.each(Object.entries(places))("on %s", (_name, makePlace) => {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await makePlace();
    store = await place.open();
  });
  afterAll(async () => {
    await store.close();
    place.remove();
  });

  test("an account is found by its certificate until it is disabled or removed", async () => {
    expect(await accountOf(store.read, alice)).toBeNull();
    await addAccount(store, clock, account(" acme ", ALICE.cert, { maxPerTransaction: "007", dailyCeiling: "0" }));
    const found = { name: "acme", maxPerTransaction: 7n, dailyCeiling: 0n };
    expect(await accountOf(store.read, alice)).toEqual(found);
    await setEnabled(store, clock, "acme", false);
    expect(await accountOf(store.read, alice)).toBeNull();
    await setEnabled(store, clock, "acme", true);
    expect(await accountOf(store.read, alice)).toEqual(found);
    await removeAccount(store, "acme");
    expect(await accountOf(store.read, alice)).toBeNull();
    expect(await listAccounts(store.read)).toEqual([]);
  });

  test("another process' change is in force with the next look", async () => {
    await addAccount(store, clock, account("acme", ALICE.cert));
    const other = await place.open();
    expect(await accountOf(store.read, alice)).not.toBeNull();
    await setEnabled(other, clock, "acme", false);
    expect(await accountOf(store.read, alice)).toBeNull();
    await removeAccount(other, "acme");
    await other.close();
  });

  test("names and certificates are unique, and the error says which was taken", async () => {
    await addAccount(store, clock, account("acme", ALICE.cert));
    expect(await problem(addAccount(store, clock, account("acme", BOB.cert)))).toBe(
      "conflict: an account named acme exists already",
    );
    expect(await problem(addAccount(store, clock, account("globex", ALICE.cert)))).toBe(
      "conflict: the certificate belongs to the account acme already",
    );
    await addAccount(store, clock, account("globex", BOB.cert));
    expect((await listAccounts(store.read)).map((row) => row.name)).toEqual(["acme", "globex"]);
    await removeAccount(store, "acme");
    await removeAccount(store, "globex");
  });

  test("of two processes that add the same at once, one makes the account", async () => {
    const outcomes = await Promise.all(
      [1, 2].map(() => problem(addAccount(store, clock, account("acme", ALICE.cert)))),
    );
    expect(outcomes.filter((outcome) => outcome === "none")).toHaveLength(1);
    expect(outcomes.filter((outcome) => outcome.startsWith("conflict"))).toHaveLength(1);
    await removeAccount(store, "acme");
  });

  test("an account may have several certificates, each in force until it is taken away", async () => {
    const find = async (fingerprint: string) => (await accountOf(store.read, fingerprint))?.name ?? null;
    const fingerprints = async () => (await listAccounts(store.read)).map((row) => row.fingerprints);
    const bob = fingerprintOf(BOB.cert);
    await addAccount(store, clock, account("acme", ALICE.cert));
    expect(await addCertificate(store, clock, " acme ", BOB.cert)).toBe(bob);
    expect([await find(alice), await find(bob)]).toEqual(["acme", "acme"]);
    expect((await fingerprints()).map((each) => each.toSorted())).toEqual([[alice, bob].toSorted()]);
    await setEnabled(store, clock, "acme", false);
    expect([await find(alice), await find(bob)]).toEqual([null, null]);
    await setEnabled(store, clock, "acme", true);
    expect(await removeCertificate(store, "acme", ALICE.cert)).toEqual({ fingerprint: alice, left: 1 });
    expect([await find(alice), await find(bob)]).toEqual([null, "acme"]);
    expect(await removeCertificate(store, "acme", BOB.cert)).toEqual({ fingerprint: bob, left: 0 });
    expect([await find(bob), await fingerprints()]).toEqual([null, [[]]]);
    await addCertificate(store, clock, "acme", BOB.cert);
    expect(await find(bob)).toBe("acme");
    await removeAccount(store, "acme");
    expect(await find(bob)).toBeNull();
    await addAccount(store, clock, account("acme", ALICE.cert));
    expect(await fingerprints()).toEqual([[alice]]);
    await removeAccount(store, "acme");
  });

  test("a certificate belongs to one account, and an account has so many at most", async () => {
    await addAccount(store, clock, account("acme", ALICE.cert));
    await addAccount(store, clock, account("globex", BOB.cert));
    const add = (name: string, cert: string) => problem(addCertificate(store, clock, name, cert));
    expect(await add("acme", BOB.cert)).toBe("conflict: the certificate belongs to the account globex already");
    expect(await add("acme", ALICE.cert)).toBe("conflict: the certificate belongs to the account acme already");
    expect(await add("nobody", SERVER.cert)).toBe("not_found: no such account");
    expect(await add("acme", "hello")).toStartWith("invalid_request: certificate:");
    const remove = (name: string, cert: string) => problem(removeCertificate(store, name, cert));
    expect(await remove("acme", BOB.cert)).toBe(
      `conflict: acme has no such certificate: its fingerprint is ${fingerprintOf(BOB.cert)}`,
    );
    expect(await remove("nobody", ALICE.cert)).toBe("not_found: no such account");
    await store.write(({ db, tables: { facilitatorCertificates: t } }) =>
      db
        .insert(t)
        .values(Array.from({ length: 15 }, (_, n) => ({ fingerprint: `${n}`, account: "acme", created_at: 0 }))),
    );
    expect(await add("acme", SERVER.cert)).toStartWith("conflict: an account has at most 16 certificates");
    await removeAccount(store, "acme");
    await removeAccount(store, "globex");
    expect(await store.read.db.select().from(store.read.tables.facilitatorCertificates)).toEqual([]);
  });

  test("of two processes that add one certificate to different accounts at once, one succeeds", async () => {
    await addAccount(store, clock, account("acme", ALICE.cert));
    await addAccount(store, clock, account("globex", BOB.cert));
    const outcomes = await Promise.all(
      ["acme", "globex"].map((name) => problem(addCertificate(store, clock, name, SERVER.cert))),
    );
    expect(outcomes.map((outcome) => outcome.replace(/:.*/, "")).sort()).toEqual(["conflict", "none"]);
    for (const name of ["acme", "globex"]) await removeAccount(store, name);
  });

  test("an account of an unknown name is not found", async () => {
    expect(await problem(setEnabled(store, clock, "nobody", false))).toBe("not_found: no such account");
    expect(await problem(removeAccount(store, "nobody"))).toBe("not_found: no such account");
  });

  test("an account's limits are whole numbers of at most 256 bits", async () => {
    const most = String(2n ** 256n - 1n);
    await addAccount(store, clock, account("big", SERVER.cert, { dailyCeiling: most }));
    expect((await accountOf(store.read, fingerprintOf(SERVER.cert)))?.dailyCeiling).toBe(2n ** 256n - 1n);
    await removeAccount(store, "big");
    for (const wrong of ["", " 1", "-1", "1.5", "1e3", "0x10", "١", String(2n ** 256n), "9".repeat(5000)]) {
      expect(
        await problem(addAccount(store, clock, account("x", ALICE.cert, { maxPerTransaction: wrong }))),
      ).toStartWith("invalid_request: max-per-transaction:");
    }
  });

  test("an account's name has 1 to 128 visible characters after trimming", async () => {
    const longest = "é".repeat(128);
    await addAccount(store, clock, account(`${longest} `, ALICE.cert));
    await removeAccount(store, longest);
    for (const wrong of ["", "   ", "x".repeat(129), "a\nb", "a\0b", "a\u200bb", "a\u202eb", "\ud800"]) {
      expect(await problem(addAccount(store, clock, account(wrong, ALICE.cert)))).toStartWith("invalid_request: name:");
    }
  });
});
