import { expect, test } from "bun:test";
import { accepted, SUCCESS } from "../../../test/support/stores/invocations.ts";
import { clock, places } from "../../../test/support/stores/stores.ts";
import { silentLog } from "../../core/log.ts";
import { CommitUnknown, type Store } from "../../storage/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { accept, claim, endOpen } from "../invocations/service.ts";
import { compareOnce, createClaims, recordEnd } from "./ownership.ts";

for (const [name, place] of Object.entries(places)) {
  test(`on ${name} the calls that run here and in the database are brought together, both ways`, async () => {
    const where = await place();
    const store = await where.open();
    const claims = createClaims();
    const begin = async (owner: string) => {
      const call = accepted(clock.now(), { mode: "streaming" });
      const key = { tenant: "acme", id: call.row.id };
      const token = claims.begin();
      await store.write(async (tx) => {
        await accept(tx, call);
        await claim(tx, { key, owner, token, now: clock.now() });
      });
      return { ...key, token };
    };
    try {
      const [kept, cancelled, unanswered] = [await begin("rep_1"), await begin("rep_1"), await begin("rep_1")];
      const [unrecorded, beingClaimed, other] = [await begin("rep_1"), await begin("rep_1"), await begin("rep_2")];
      for (const { token, id } of [kept, cancelled, unrecorded]) claims.took(token, id);
      for (const key of [cancelled, other]) {
        await store.write((tx) => endOpen(tx, key, "cancelled", clock.now()));
      }
      claims.over(unanswered.token);
      claims.over(unrecorded.token, true);
      const told: string[] = [];
      store.onCallEnded(({ invocation_id }) => void told.push(`ended ${invocation_id}`));
      await compareOnce({
        store,
        clock,
        log: silentLog,
        replica: "rep_1",
        claims,
        stop: (id) => void told.push(`stop ${id}`),
        released: (_tenant, agent) => void told.push(`released ${agent}`),
      });
      expect(told.toSorted()).toEqual([`stop ${cancelled.id}`, "released agt_a", `ended ${unrecorded.id}`].toSorted());
      const rows = await Promise.all(
        [kept, unanswered, unrecorded, beingClaimed].map(({ id }) => findInvocation(store.read, "acme", id)),
      );
      expect(rows.map(({ status, error_class }) => [status, error_class])).toEqual([
        ["running", null],
        ["pending", null],
        ["failed", "internal"],
        ["running", null],
      ]);
    } finally {
      await store.close();
      where.remove();
    }
  });

  test(`on ${name} who records an end learns whether the record says so`, async () => {
    const where = await place();
    const store = await where.open();
    const answersOf = { lost: 0, refused: 0, late: 0 };
    /** Loses the answers of some writes, refuses some, and fails some before they are made. */
    const troubled: Store = {
      ...store,
      async execute(command, input) {
        if (answersOf.refused-- > 0) throw new Error("refused");
        if (answersOf.late-- > 0) throw new CommitUnknown("late");
        const answer = await store.execute(command, input);
        if (answersOf.lost-- > 0) throw new CommitUnknown("lost");
        return answer;
      },
    };
    const ended = async (trouble: Partial<typeof answersOf>, isCancelled = false) => {
      const call = accepted(clock.now(), { mode: "streaming" });
      const key = { tenant: "acme", id: call.row.id };
      await accept(store, call, { owner: "rep_1", token: "t" });
      if (isCancelled) await endOpen(store, key, "cancelled", clock.now());
      Object.assign(answersOf, { lost: 0, refused: 0, late: 0 }, trouble);
      const options = { store: troubled, clock, log: silentLog, claims: createClaims() };
      const isRecorded = await recordEnd(options, { key, token: "t", request_id: "r" }, SUCCESS, () => false);
      return [isRecorded, (await findInvocation(store.read, key.tenant, key.id)).error_class];
    };
    try {
      expect(await ended({})).toEqual([true, null]);
      expect(await ended({ lost: 1 })).toEqual([true, null]);
      expect(await ended({ refused: 1 })).toEqual([false, "internal"]);
      expect(await ended({}, true)).toEqual([false, "cancelled"]);
      expect(await ended({ late: 1 })).toEqual([true, null]);
      expect(await ended({ late: 1 }, true)).toEqual([false, "cancelled"]);
    } finally {
      await store.close();
      where.remove();
    }
  });

  test(`on ${name} a call that ends while the calls that run are compared is not taken for one that nobody works on`, async () => {
    const where = await place();
    const store = await where.open();
    const claims = createClaims();
    const call = accepted(clock.now(), { mode: "streaming" });
    const key = { tenant: "acme", id: call.row.id };
    const token = claims.begin();
    try {
      await store.write(async (tx) => {
        await accept(tx, call);
        await claim(tx, { key, owner: "rep_1", token, now: clock.now() });
      });
      const told: string[] = [];
      const log = { ...silentLog, warn: (event: string) => void told.push(event) };
      // The row has been read when its fate is asked for.
      const fateOf = (asked: string) => {
        claims.over(token);
        return claims.fateOf(asked);
      };
      const released = () => void told.push("released");
      await compareOnce({ store, clock, log, replica: "rep_1", claims: { ...claims, fateOf }, stop() {}, released });
      expect(told).toEqual([]);
    } finally {
      await store.close();
      where.remove();
    }
  });
}
