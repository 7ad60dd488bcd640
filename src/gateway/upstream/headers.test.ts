import { describe, expect, test } from "bun:test";
import { passedToStream, waitSeconds } from "./headers.ts";

const wait = (...prefer: string[]) => {
  const headers = new Headers();
  for (const value of prefer) headers.append("prefer", value);
  return waitSeconds(headers);
};

describe("Prefer with a time to wait", () => {
  const cases: [prefer: string, seconds: number][] = [
    ["wait=10", 10],
    ["WAIT=10", 10],
    [" wait = 10 ", 10],
    ['wait="10"', 10],
    ["wait=10; foo=bar", 10],
    ["respond-async, wait=10", 10],
    ["respond-async,,wait=10,", 10],
    ["wait=0", 0],
    ["wait=007", 7],
    ["wait", 0],
    ["wait=", 0],
    ["wait=x", 0],
    ["wait=-1", 0],
    ["wait=1.5", 0],
    ['wait="1', 0],
    ["waiting=10", 0],
    ["await=10", 0],
    ["respond-async; wait=10", 0],
    ["", 0],
  ];
  test.each(cases)(`is read as in "%s"`, (prefer, seconds) => {
    expect(wait(prefer)).toBe(seconds);
  });

  test("is cut to the longest time, however long the number", () => {
    for (const seconds of ["60", "61", "999999999", "9999999999", "9".repeat(4000)])
      expect([seconds, wait(`wait=${seconds}`)]).toEqual([seconds, 60]);
  });

  test("is not read within a quoted string", () => {
    for (const prefer of [
      'foo="a, wait=2"',
      'foo=", wait=2, "',
      'foo="a\\", wait=2"',
      'foo="a, wait=2',
      'foo="a\\',
      'foo; bar=", wait=2"',
    ])
      expect([prefer, wait(prefer)]).toEqual([prefer, 0]);
    expect(wait('foo="a\\\\", wait=2')).toBe(2);
    expect(wait('foo="a, b", wait=2')).toBe(2);
  });

  test("counts by the first of several, over several header lines too", () => {
    expect(wait("wait=2, wait=30")).toBe(2);
    expect(wait("wait=x, wait=30")).toBe(0);
    expect(wait("respond-async", "wait=2", "wait=30")).toBe(2);
  });

  test("takes no time when the header is nothing but quotes and backslashes", () => {
    const started = performance.now();
    for (const piece of ['"', "\\", '"\\', '\\"', ",", "wait "]) wait(piece.repeat(20_000));
    expect(performance.now() - started).toBeLessThan(1000);
  });
});

const MCP = { protocol: "mcp", echoedMcpHeaders: true, pseudonym: "self", session: null, resumes: false } as const;

describe("the content type on the streaming path", () => {
  const types = [
    "application/json; charset=utf-7",
    'text/plain; x="; charset=utf-8"; charset="shift_jis"',
    "application/json",
  ];

  test.each(types)("is what an MCP message was read as, not what its caller says: %s", (type) => {
    const headers = new Headers({ "content-type": type, accept: "text/event-stream" });
    expect(new Map(passedToStream(headers, MCP)).get("content-type")).toBe("application/json");
    expect(new Map(passedToStream(headers, { ...MCP, protocol: "http" })).get("content-type")).toBe(type);
    expect(new Map(passedToStream(headers, MCP)).get("accept")).toBe("text/event-stream");
  });

  test("is not made up where there is none", () => {
    const headers = new Headers({ "last-event-id": "7", "mcp-session-id": "as it came" });
    expect(passedToStream(headers, { ...MCP, session: "s", resumes: true })).toEqual([
      ["mcp-session-id", "s"],
      ["last-event-id", "7"],
      ["via", "1.1 self"],
    ]);
    expect(passedToStream(headers, MCP)).toEqual([["via", "1.1 self"]]);
  });
});
