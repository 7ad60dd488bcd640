import { expect, test } from "bun:test";
import fc from "fast-check";
import { FieldHeaders, ReceivedAnswer } from "./answer.ts";

const NAMES = ["content-type", "Content-Type", "x-a", "X-A", "x-b", "Content-Length", "set-cookie", "Set-Cookie"];
const name = fc.constantFrom(...NAMES);
const value = fc.string({ unit: fc.constantFrom("a", "B", "1", " ", "\t", ",", ";", '"', "é"), maxLength: 8 });
const heads = fc.array(fc.tuple(name, value), { maxLength: 8 });

test("headers of an answer read like the runtime's", () => {
  fc.assert(
    fc.property(heads, (head) => {
      const oracle = new Headers();
      for (const [name, value] of head) oracle.append(name, value);
      const headers = new FieldHeaders(head.flat());
      for (const asked of ["content-type", "x-a", "x-b", "content-length", "x-none"]) {
        expect([asked, headers.get(asked), headers.has(asked)]).toEqual([asked, oracle.get(asked), oracle.has(asked)]);
      }
      const copied = new Headers();
      for (const [name, value] of headers) copied.append(name, value);
      expect([...copied]).toEqual([...oracle]);
    }),
  );
});

test("an answer that came whole has its body as a stream, too", async () => {
  const answer = new ReceivedAnswer(200, ["a", "b"], new TextEncoder().encode("ok"));
  expect(answer.whole).toEqual(new TextEncoder().encode("ok"));
  expect(await new Response(answer.body as ReadableStream<Uint8Array<ArrayBuffer>>).text()).toBe("ok");
  expect(new ReceivedAnswer(204, [], null).body).toBe(null);
});

test("blanks within a value cost no more than its other characters, however many an upstream sends", () => {
  const value = `x${" ".repeat(60_000)}y`;
  const headers = new FieldHeaders(["content-type", ` ${value}\t`]);
  const before = process.cpuUsage();
  for (let time = 0; time < 10; time++) {
    expect(headers.get("content-type")).toBe(value);
    expect([...headers]).toEqual([["content-type", value]]);
  }
  // It takes a millisecond. A pattern that begins anew at each blank took seconds for each time.
  expect(process.cpuUsage(before).user).toBeLessThan(1_000_000);
});
