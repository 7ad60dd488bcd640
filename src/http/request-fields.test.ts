import { expect, test } from "bun:test";
import fc from "fast-check";
import { requestFields } from "./request-fields.ts";

const NAMES = ["accept", "Accept", "cookie", "Host", "Content-Length", "x-a", "X-A", "x b", "", "é", "user-agent"];
const name = fc.oneof(fc.constantFrom(...NAMES), fc.string({ maxLength: 4 }));
const unit = fc.constantFrom("a", "B", " ", "\t", "\r", "\n", "\0", "\x01", "\x7f", ",", "é", "ÿ", "Ā", "€", "😀", ":");
const value = fc.string({ unit, maxLength: 6 });
const pairs = fc.array(fc.tuple(name, value), { maxLength: 6 });
const OWNED = /^(host|connection|keep-alive|content-length|transfer-encoding|te|trailer|upgrade|expect)$/i;

/** What the runtime would send of them. */
function oracle(given: [string, string][]): string[] | "refused" {
  try {
    const headers = new Headers();
    for (const [name, value] of given) if (!OWNED.test(name)) headers.append(name, value);
    if (!headers.has("accept")) headers.set("accept", "*/*");
    if (!headers.has("user-agent")) headers.set("user-agent", "tollgate");
    if (!headers.has("accept-encoding")) headers.set("accept-encoding", "identity");
    return [...headers].map(([name, value]) => `${name}: ${value}`).sort();
  } catch {
    return "refused";
  }
}

function sent(given: [string, string][]): string[] | "refused" {
  try {
    return requestFields(given).split("\r\n").slice(0, -1).sort();
  } catch {
    return "refused";
  }
}

test("the fields of a request are those that the runtime's Headers would give, and what they refuse is refused", () => {
  fc.assert(
    fc.property(pairs, (given) => {
      expect(sent(given)).toEqual(oracle(given));
    }),
    { numRuns: 3000 },
  );
});

test("blanks within a value cost no more than its other characters, however many are in a secret", () => {
  const value = `x${" ".repeat(60_000)}y`;
  const before = process.cpuUsage();
  for (let time = 0; time < 10; time++) expect(requestFields([["x-api-key", `${value} `]])).toContain(`: ${value}\r\n`);
  // It takes a millisecond. A pattern that begins anew at each blank took seconds for each time.
  expect(process.cpuUsage(before).user).toBeLessThan(1_000_000);
});
