import { expect, test } from "bun:test";
import { startCourse } from "./course.ts";
import { type Ended, relayBody } from "./relay.ts";

const LIMITS = { headMs: 1000, silenceMs: 1000, callerMs: 1000 };

test("a whole answer ends whole, though it is stopped while its end is being recorded", async () => {
  const course = startCourse(LIMITS, new AbortController().signal);
  const told: Ended[] = [];
  const body = relayBody({
    response: new Response("abc"),
    course,
    filter: null,
    comments: null,
    piece() {},
    async ended(how) {
      told.push(how);
      course.stop("shutdown");
    },
  });
  expect(await new Response(body).text()).toBe("abc");
  expect(told).toEqual(["whole"]);
});
