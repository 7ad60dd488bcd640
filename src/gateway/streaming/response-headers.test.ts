import { expect, test } from "bun:test";
import { answerHeaders, leadsBack } from "./response-headers.ts";

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
