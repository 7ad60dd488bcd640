import { expect, test } from "bun:test";
import { waitWholeTurn } from "./turns.ts";

test("all that wait are told, in order, after what the turn had left to do", async () => {
  const told: string[] = [];
  const last = Promise.withResolvers<void>();
  const waiter = (name: string) => () => void told.push(name);
  waitWholeTurn(waiter("first"));
  setImmediate(() => {
    told.push("this turn");
    waitWholeTurn(() => {
      told.push("later");
      last.resolve();
    });
  });
  waitWholeTurn(waiter("second"));
  await last.promise;
  expect(told).toEqual(["this turn", "first", "second", "later"]);
});
