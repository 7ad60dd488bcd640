import { expect, test } from "bun:test";
import { type LogFields, silentLog } from "../core/log.ts";
import { createAccessLog, shownPath } from "./access-log.ts";

test("requests of strangers get so many lines of the access log in a second, and one that sums up the others; those of callers all get one", async () => {
  const lines: [event: string, fields: LogFields][] = [];
  let heard = () => {};
  const info = (event: string, fields: LogFields = {}) => {
    lines.push([event, fields]);
    if (event !== "request") heard();
  };
  const access = createAccessLog({ ...silentLog, info });
  for (let round = 0; round < 2; round++) {
    const summedUp = new Promise<void>((resolve) => {
      heard = resolve;
    });
    for (let at = 0; at < 500; at++) {
      access.stranger({ at });
      access.known({ tenant: "t" });
      access.open({});
    }
    await summedUp;
    expect(lines.filter(([, { tenant }]) => tenant === "t")).toHaveLength(500);
    expect(lines.filter(([, { at }]) => at !== undefined)).toHaveLength(20);
    expect(lines.at(-1)).toEqual(["unauthenticated_requests", { count: 480 }]);
    lines.length = 0;
  }
});

test("a path is logged as far as any of our routes goes", () => {
  const longest = `/v1/${"x".repeat(252)}`;
  expect(shownPath(longest)).toBe(longest);
  expect(shownPath(`${longest}y`)).toBe(`${longest}…`);
});
