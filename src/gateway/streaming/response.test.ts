import { expect, test } from "bun:test";
import fc from "fast-check";
import { MAX } from "../../kernel/limits.ts";
import { answerHeaders, createBudget, createResponseRecorder, leadsBack } from "./response.ts";

const KEPT = { capture: true, receipt: false };

test("the captured start is the answer's own, and its memory is given back", () => {
  const sizes = fc.array(fc.oneof(fc.nat(100), fc.nat(70_000), fc.nat(400_000)), { maxLength: 12 });
  const told = fc.constantFrom("none", "right", "short", "long", "nonsense");
  fc.assert(
    fc.property(sizes, told, (pieces, how) => {
      const all = Buffer.concat(pieces.map((size, at) => new Uint8Array(size).fill(at + 1)));
      const lengths = { right: all.length, short: all.length >> 1, long: 2 * all.length + 1, nonsense: "-1" };
      const memory = createBudget(8 * MAX.capturedBytes)("t");
      const recorder = createResponseRecorder(KEPT, memory);
      const headers = how === "none" ? {} : { "content-length": `${lengths[how as keyof typeof lengths]}` };
      recorder.head(new Response(null, { headers }));
      let at = 0;
      for (const size of pieces) {
        const piece = new Uint8Array(all.subarray(at, at + size));
        recorder.piece(piece);
        // The piece is gone as soon as it has passed.
        piece.fill(0);
        at += size;
      }
      const { response, response_truncated, resp_size } = recorder.whole();
      expect(Buffer.compare(response ?? Buffer.alloc(0), all.subarray(0, MAX.capturedBytes))).toBe(0);
      expect(response?.buffer.byteLength).toBe(response?.byteLength);
      expect([resp_size, response_truncated]).toEqual([all.length, all.length > MAX.capturedBytes]);
      expect(memory.take(7 * MAX.capturedBytes)).toBe(7 * MAX.capturedBytes);
    }),
    { numRuns: 60 },
  );
});

test("a tenant gets the memory that it asks for, up to what it may hold", () => {
  const share = createBudget(1000)("a");
  expect([share.take(500), share.take(500), share.take(1)]).toEqual([500, 375, 0]);
  share.giveBack(400);
  expect(share.take(1000)).toBe(400);
});

test("however much memory others have taken, the next tenant finds some, and all of it comes back", () => {
  const asks = fc.array(fc.tuple(fc.integer({ min: 0, max: 9 }), fc.integer({ min: 0, max: 2_000_000 })));
  fc.assert(
    fc.property(asks, (list) => {
      const budget = createBudget(1_000_000);
      const taken = list.map(([tenant, bytes]) => [tenant, budget(`${tenant}`).take(bytes)] as const);
      const sum = taken.reduce((all, [, bytes]) => all + bytes, 0);
      expect(sum).toBeLessThan(1_000_000);
      const late = budget("late");
      const found = late.take(1_000_000);
      expect(found).toBeGreaterThan(200);
      late.giveBack(found);
      for (const [tenant, bytes] of taken) budget(`${tenant}`).giveBack(bytes);
      expect(late.take(1_000_000)).toBe(875_000);
    }),
  );
});

const HOSTS = ["gate.example:8443", "127.0.0.1:8080"];

test.each([
  "/v1/agents/agt_1",
  "http://127.0.0.1:8080/%76%31/agents",
  "/%76%31/%61gents",
  "../../agents/agt_1",
  "stream",
  "//gate.example:8443/v1/agents",
  "http:/v1/agents",
  "\\\\gate.example:8443\\v1\\agents",
  "https://GATE.example:8443/prefix/v1/agents",
  "http://user@127.0.0.1:8080/v1/../v1/agents?a#b",
  "/\t/127.0.0.1:8080/v1/agents",
  // For a client that came by TLS these are paths of the same host.
  "https:/v1/agents",
  "https:../../agents/agt_1",
  "HTTPS:\\v1\\agents",
  "https:/%76%31/agents",
])("a Location of %s leads back to the gateway", (location) => {
  expect(leadsBack(location, HOSTS)).toBe(true);
});

test.each([
  "/elsewhere",
  "https://other.example/v1/agents",
  "http://127.0.0.1:8081/v1/agents",
  "https://gate.example:8443/docs",
  "http://",
])("a Location of %s does not lead back to the gateway", (location) => {
  expect(leadsBack(location, HOSTS)).toBe(false);
});

test("the standard port of a URL counts as left out", () => {
  expect(leadsBack("https://gate.example:443/v1/agents", ["gate.example"])).toBe(true);
  expect(leadsBack("https://gate.example/v1/agents", ["gate.example:443"])).toBe(true);
});

test.each([
  [null, "private"],
  ["no-cache, no-transform", "no-cache, no-transform, private"],
  ["public, max-age=60, S-MaxAge=600", "max-age=60, private"],
  ['Public ,,s-maxage = "5", must-revalidate', "must-revalidate, private"],
  ['private="a, public", x="b, s-maxage=1"', 'x="b, s-maxage=1", private'],
  ["publicity, x-public=1, private", "publicity, x-public=1, private"],
])("what %p says of shared caches is no more to an answer of one's own than %p", (given, expected) => {
  const response = new Response(null, { headers: given === null ? {} : { "cache-control": given } });
  expect(answerHeaders(response, {}, true).get("cache-control")).toBe(expected);
  expect(answerHeaders(response, {}, false).get("cache-control")).toBe(given);
});

test("no cache keeps a 402, whatever the upstream that gave it says", () => {
  for (const given of [{}, { "cache-control": "public, max-age=600" }] as Record<string, string>[]) {
    for (const isGet of [false, true]) {
      const response = new Response(null, { status: 402, headers: given });
      expect(answerHeaders(response, {}, isGet).get("cache-control")).toBe("no-store");
    }
  }
});

test("a header of quotes without an end takes no time", () => {
  const started = performance.now();
  for (const piece of ['"', '"\\', "\\", ',"'] as const) {
    const response = new Response(null, { headers: { "cache-control": piece.repeat(50_000) } });
    answerHeaders(response, {}, true);
  }
  expect(performance.now() - started).toBeLessThan(1000);
});
