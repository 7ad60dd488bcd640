import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import fc from "fast-check";
import { type Place, places } from "../../test/support/stores/stores.ts";
import { StartupProblem } from "../core/startup.ts";
import { MAX } from "../kernel/limits.ts";
import type { Store } from "../storage/store.ts";
import { createRevocations, revokeTokens } from "./signing-keys.ts";

const TENANTS = ["acme", "other"];
const USERS = ["alice", "bob"];
const named = { tenant: fc.constantFrom(...TENANTS), user: fc.constantFrom(...USERS) };
const steps = fc.array(
  fc.oneof(
    fc.record({ kind: fc.constant("mint" as const), ...named }),
    fc.record({ kind: fc.constant("revoke" as const), ...named, isWhole: fc.boolean() }),
    fc.record({ kind: fc.constant("look" as const) }),
  ),
  { maxLength: 12 },
);

describe.each(["sqlite", "postgres"] as const)("on %s", (dialect) => {
  let place: Place;
  let store: Store;
  beforeAll(async () => {
    place = await places[dialect]();
    store = await place.open();
  });
  afterAll(async () => {
    await store.close();
    place.remove();
  });

  const known = async () => {
    const revocations = createRevocations(store.read);
    await revocations.catchUp();
    return revocations;
  };

  test("a token is refused if its user or tenant was revoked after it was made, and only then", async () => {
    await fc.assert(
      fc.asyncProperty(steps, async (sequence) => {
        // One gateway that was there before all of it, and looks now and then.
        const gateway = await known();
        const tokens: { tenant: string; user: string; madeAfter: number; isRevoked: boolean }[] = [];
        for (const step of sequence) {
          if (step.kind === "look") await gateway.catchUp();
          if (step.kind === "mint") {
            const { tenant, user } = step;
            tokens.push({ tenant, user, madeAfter: (await known()).newest(), isRevoked: false });
          }
          if (step.kind === "revoke") {
            await revokeTokens(store, step.tenant, step.isWhole ? null : step.user);
            for (const token of tokens) {
              token.isRevoked ||= token.tenant === step.tenant && (step.isWhole || token.user === step.user);
            }
          }
        }
        await gateway.catchUp();
        for (const revocations of [gateway, await known()]) {
          const judged = tokens.map((one) => revocations.isRevoked(one.tenant, one.user, one.madeAfter));
          expect(judged).toEqual(tokens.map(({ isRevoked }) => isRevoked));
        }
      }),
      { numRuns: 25 },
    );
  });

  test("a token of an earlier version says nothing, and is older than every revocation", async () => {
    await revokeTokens(store, "acme", "carol");
    const revocations = await known();
    expect([revocations.isRevoked("acme", "carol", 0), revocations.isRevoked("elsewhere", "carol", 0)]).toEqual([
      true,
      false,
    ]);
  });

  test("a revocation after the database's clock went back is still the newest", async () => {
    await place.execute("update keyring set revoked_at = 9000000000000000");
    await place.execute(
      "insert into token_revocations (tenant, user_name, revoked_at) values ('x', '', 8999999999999999)",
    );
    const { isRevoked } = await known();
    expect(isRevoked("acme", "dave", 9_000_000_000_000_000)).toBe(false);
    await revokeTokens(store, "acme", "dave");
    expect((await known()).isRevoked("acme", "dave", 9_000_000_000_000_000)).toBe(true);
    await place.execute("delete from token_revocations");
    await place.execute("update keyring set revoked_at = 0");
  });

  test("there is room for so many users, and always for a whole tenant", async () => {
    const numbers =
      dialect === "sqlite"
        ? "with recursive n (i) as (select 1 union all select i + 1 from n where i < MAX) select i from n"
        : "select i from generate_series(1, MAX) as s (i)";
    await place.execute("delete from token_revocations");
    // They are recent: those that are older than every token are removed.
    const from = `(${numbers.replace("MAX", String(MAX.revokedUsers))}) as numbers`;
    await place.execute(
      `insert into token_revocations (tenant, user_name, revoked_at) select 'many', 'user' || i, 4000000000000 + i from ${from}`,
    );
    await place.execute("update keyring set revoked_at = 4000000100000");
    await expect(revokeTokens(store, "acme", "alice")).rejects.toBeInstanceOf(StartupProblem);
    expect((await known()).isRevoked("acme", "alice", 0)).toBe(false);
    await revokeTokens(store, "many", null);
    await revokeTokens(store, "acme", "alice");
    const revocations = await known();
    expect(revocations.isRevoked("many", "user7", 4_000_000_000_007)).toBe(true);
    expect(revocations.isRevoked("acme", "alice", 0)).toBe(true);
  });
});
