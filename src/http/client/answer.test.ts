import { expect, test } from "bun:test";
import fc from "fast-check";
import { requestFields } from "./outbound.ts";
import { FieldHeaders } from "./response-parser.ts";

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

test("blanks within a value cost no more than its other characters, however many an upstream sends", () => {
  const value = `x${" ".repeat(60_000)}y`;
  const headers = new FieldHeaders(["content-type", ` ${value}\t`]);
  const before = process.cpuUsage();
  for (let time = 0; time < 10; time++) {
    expect(headers.get("content-type")).toBe(value);
    expect([...headers]).toEqual([["content-type", value]]);
  }
  // It takes a millisecond. A pattern that starts over at each blank took seconds for each time.
  expect(process.cpuUsage(before).user).toBeLessThan(1_000_000);
});

const SENT_NAMES = ["accept", "Accept", "cookie", "Host", "Content-Length", "x-a", "X-A", "x b", "", "é", "user-agent"];
const sentName = fc.oneof(fc.constantFrom(...SENT_NAMES), fc.string({ maxLength: 4 }));
const unit = fc.constantFrom("a", "B", " ", "\t", "\r", "\n", "\0", "\x01", "\x7f", ",", "é", "ÿ", "Ā", "€", "😀", ":");
const sentValue = fc.string({ unit, maxLength: 6 });
const pairs = fc.array(fc.tuple(sentName, sentValue), { maxLength: 6 });
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
  // It takes a millisecond. A pattern that starts over at each blank took seconds for each time.
  expect(process.cpuUsage(before).user).toBeLessThan(1_000_000);
});
