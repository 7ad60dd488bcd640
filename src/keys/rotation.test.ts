// A rotation that is cut short at each of its writes, beside keyrings that go on making keys. Whatever was durable at that
// moment must open everything, and the next run must come to the end.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "../../test/support/gateway/process.ts";
import { onlyMasterKey } from "../../test/support/keys.ts";
import type { MakePlace } from "../../test/support/stores/one-store.ts";
import { eachPostgres } from "../../test/support/stores/postgres-kinds.ts";
import { type Place, places, postgresPlace } from "../../test/support/stores/stores.ts";
import { silentLog } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { DAY_MS, systemClock } from "../core/time.ts";
import { createMembership } from "../storage/leases.ts";
import type { Store } from "../storage/store.ts";
import { newKey } from "./envelope.ts";
import { openKeyring } from "./keyring.ts";
import { type MasterKeys, masterKeyId, openMasterKeys, promoteMasterKey, stageMasterKey } from "./master-keys.ts";
import { rotate } from "./rotation.ts";
import { readState } from "./state.ts";

const secretIdentity = (tenant: string, id: string, version: number) => `${id}:${version}:${tenant}`;
const GATEWAYS_MS = 3_000;

class Killed extends Error {}

/** A process that is killed before its n-th write, and so after the one before it and all that came between. */
function killedAt(store: Store, n: number): Store {
  let writes = 0;
  return {
    ...store,
    async write(work, bytes) {
      writes += 1;
      if (writes === n) throw new Killed();
      return store.write(work, bytes);
    },
  };
}

for (const name of ["sqlite", "postgres"] as const) describe(`on ${name}`, () => suite(places[name], "all of it"));
eachPostgres((kind) => suite(async () => postgresPlace(await kind.freshDatabase()), "what others do meanwhile"));

function suite(makePlace: MakePlace, extent: "all of it" | "what others do meanwhile"): void {
  /** What takes longer is tried where it can differ. */
  const whole = (title: string, body: () => Promise<void>) => extent === "all of it" && test(title, body);
  let place: Place;
  let store: Store;
  let dir: string;
  let file: string;
  /** As a process that starts now has them. */
  const onDisk = () => openMasterKeys(Buffer.from(readFileSync(file, "latin1"), "base64"), null, [file, `${file}.new`]);
  const stage = (masterKeys: MasterKeys) => () => masterKeys.add(stageMasterKey(file, newKey(), silentLog));
  const promote = (id: string) => promoteMasterKey(file, id);
  const run = (through: Store, masterKeys = onDisk()) =>
    rotate(
      { store: through, masterKeys, clock: systemClock, secretIdentity },
      { stage: stage(masterKeys), promote },
      GATEWAYS_MS,
    );

  beforeAll(async () => {
    dir = mkdtempSync(join(temporaryRoot(), "rotate-"));
    file = join(dir, "master.key");
    place = await makePlace();
    store = await place.open();
  });
  afterAll(async () => {
    await store.close();
    place.remove();
    rmSync(dir, { recursive: true });
  });

  async function seal(ring: Awaited<ReturnType<typeof openKeyring>>, tenant: string, id: string): Promise<void> {
    const secret = await ring.sealSecret(tenant, secretIdentity(tenant, id, 1), Buffer.from(`${tenant} ${id}`));
    const row = { tenant, id, name: id, auth_type: "bearer", source: "managed", version: 1 } as const;
    await store.write(async (tx) => {
      const times = { created_at: 0, updated_at: 0 };
      await tx.db.insert(tx.tables.credentials).values({ ...row, ...secret, ...times });
    });
  }

  /** By a new process, with what is durable. */
  async function opened(): Promise<string[]> {
    const ring = await openKeyring(store, onDisk(), systemClock);
    const rows = await store.read.db.select().from(store.read.tables.credentials);
    return Promise.all(
      rows.map(async ({ tenant, id, sealed, key_number }) => {
        if (sealed === null) throw new Error("nothing is sealed");
        const secret = await ring.openSecret(tenant, secretIdentity(tenant, id, 1), { sealed, key_number });
        expect(secret.toString()).toBe(`${tenant} ${id}`);
        return `${tenant} ${id}`;
      }),
    );
  }

  /** Which master keys wrap anything, and which numbers of keys seal the secrets. */
  async function wrapping() {
    const { credentials, signingKeys, tenantKeys } = store.read.tables;
    const keys = [
      ...(await store.read.db.select().from(signingKeys)),
      ...(await store.read.db.select().from(tenantKeys)),
    ];
    const numbers = (await store.read.db.select().from(credentials)).map(({ key_number }) => key_number);
    return { masters: [...new Set(keys.map(({ master_key_id }) => master_key_id))], numbers: new Set(numbers) };
  }

  /** An empty database, but for its history. */
  async function begunAnew() {
    rmSync(file, { force: true });
    for (const table of ["tenant_keys", "signing_keys", "credentials"]) await place.execute(`delete from ${table}`);
    await place.execute("update keyring set master_key_id = null");
    writeFileSync(file, `${newKey().toString("base64")}\n`);
    const ring = await openKeyring(store, onDisk(), systemClock);
    for (const tenant of ["t1", "t2"]) await seal(ring, tenant, "c");
    return ring;
  }

  whole(
    "cut short at any write it leaves nothing that can't be opened, and the next run comes to the end",
    async () => {
      let kills = 0;
      for (let isDone = false; !isDone; ) {
        const first = await begunAnew();
        const before = onDisk().own;
        const derived = [await first.deriveKey("t1", "sessions"), await first.deriveKey(null, "via")];
        const killed = await run(killedAt(store, kills + 1)).catch((error: unknown) => {
          if (!(error instanceof Killed)) throw error;
          return null;
        });
        isDone = killed !== null;
        // A gateway of before, which goes on with what it knows.
        await seal(first, "t1", "late");
        await seal(first, "t3", "late");
        const names = ["t1 c", "t1 late", "t2 c", "t3 late"];
        expect((await opened()).sort()).toEqual(names);

        const isBegun = (await readState(store.read)).is_rotating || onDisk().own === before;
        if (isBegun) await run(store);
        expect((await opened()).sort()).toEqual(names);
        const now = onDisk().own;
        expect((await wrapping()).masters).toEqual([now]);
        expect([now === before, (await readState(store.read)).is_rotating]).toEqual([false, false]);
        const after = await openKeyring(store, onDisk(), systemClock);
        const kid = first.signingKey("issuer").kid;
        expect(after.signingKey("issuer").kid).not.toBe(kid);
        expect(after.issuerJwks().keys.map((key) => key.kid)).toContain(kid);
        expect([await after.deriveKey("t1", "sessions"), await after.deriveKey(null, "via")]).toEqual(derived);
        kills += 1;
      }
      expect(kills).toBeGreaterThan(8);
    },
  );

  test("the old master key opens nothing afterwards, and each secret is under its tenant's newest key", async () => {
    await begunAnew();
    const old = onDisk();
    const oldKey = old.all()[0] as Buffer;
    await run(store);
    await expect(openKeyring(store, onlyMasterKey(oldKey), systemClock)).rejects.toBeInstanceOf(StartupProblem);
    expect((await wrapping()).masters).toEqual([masterKeyId(Buffer.from(readFileSync(file, "latin1"), "base64"))]);
    const { credentials, tenantKeys } = store.read.tables;
    const keys = await store.read.db.select().from(tenantKeys);
    for (const { tenant, key_number } of await store.read.db.select().from(credentials)) {
      const numbers = keys.filter((key) => key.tenant === tenant).map(({ number }) => number);
      expect(key_number).toBe(Math.max(...numbers));
    }
  });

  test("a retired key verifies tokens until the last of them has expired, and is published for ever", async () => {
    const { kid } = (await begunAnew()).signingKey("issuer");
    await run(store);
    const verifiesAfter = async (days: number) => {
      const ring = await openKeyring(store, onDisk(), { now: () => systemClock.now() + days * DAY_MS });
      return [ring.issuerJwks(), ring.publicJwks()].map(({ keys }) => keys.some((key) => key.kid === kid));
    };
    expect([await verifiesAfter(0), await verifiesAfter(365), await verifiesAfter(367)]).toEqual([
      [true, true],
      [true, true],
      [false, true],
    ]);
  });

  test("two at once come to one end", async () => {
    const before = onDisk().own;
    const outcomes = await Promise.all([run(store), run(store)]);
    expect(outcomes.map(({ outcome }) => outcome).every((outcome) => ["done", "already"].includes(outcome))).toBe(true);
    const now = onDisk().own;
    expect([(await wrapping()).masters, now === before]).toEqual([[now], false]);
    await opened();
  });

  describe("beside a gateway", () => {
    const member = (id: string) => createMembership({ store, log: silentLog, id, kind: "gateway" });

    test("nothing begins while one that runs has not got the new key, and a late one is refused", async () => {
      const only = onlyMasterKey(onDisk().all()[0] as Buffer);
      const without = await openKeyring(store, only, systemClock);
      const membership = member("rep_without");
      await without.watch(membership);
      const next = newKey();
      const masterKeys = onlyMasterKey(onDisk().all()[0] as Buffer);
      const named = { stage: () => masterKeys.add(next), promote: () => false };
      const options = { store, masterKeys, clock: systemClock, secretIdentity };
      const refused = await rotate(options, named, 300);
      expect(refused).toEqual({ outcome: "lacking", lacks: ["rep_without"] });
      expect((await wrapping()).masters).toEqual([only.own]);
      await without.stop();
      await membership.leave();

      const late = await openKeyring(store, only, systemClock);
      expect(await rotate(options, named, GATEWAYS_MS)).toMatchObject({ outcome: "done", isInPlace: false });
      await expect(late.watch(member("rep_late"))).rejects.toBeInstanceOf(StartupProblem);
      await expect(late.sealSecret("of nobody yet", "c", Buffer.from("x"))).rejects.toThrow();
      // The operator puts it in its place.
      expect(await rotate(options, named)).toEqual({ outcome: "already", isInPlace: false });
      writeFileSync(file, `${next.toString("base64")}\n`);
      await opened();
    });
  });
}
