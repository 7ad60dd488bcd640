import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { hasControls } from "../core/text.ts";
import { parseRpcMessages } from "./jsonrpc.ts";
import { echoProblem } from "./mcp-headers.ts";

const encode = (text: string) => new TextEncoder().encode(text);
const body = (method: string, params?: unknown) => ({ jsonrpc: "2.0", id: 1, method, params });
function problemOf(headers: Record<string, string>, message: unknown) {
  const bytes = encode(typeof message === "string" ? message : JSON.stringify(message));
  const parsed = parseRpcMessages(bytes);
  if (!parsed.ok) throw new Error(parsed.problem);
  const [only = null] = parsed.isBatch ? [] : parsed.messages;
  return echoProblem(new Headers(headers), bytes, only);
}
const headerOf = (headers: Record<string, string>, message: unknown) => problemOf(headers, message)?.header ?? null;

/** As a client writes a value (protocol 2026-07-28): plain where that is safe, else wrapped. */
function written(value: string): string {
  const isPlain = /^[\x20-\x7e]*$/.test(value) && value.trim() === value && !/^=\?base64\?.*\?=$/i.test(value);
  return isPlain ? value : `=?base64?${Buffer.from(value).toString("base64")}?=`;
}

const CALL = body("tools/call", {
  name: "search",
  arguments: { region: "eu", limit: 5, deep: { all: true } },
});

describe("headers of a call", () => {
  test.each<[object, unknown]>([
    [{}, CALL],
    [{ "mcp-session-id": "x", "mcp-protocol-version": "2026-07-28" }, CALL],
    [{ "Mcp-Method": "tools/call", "Mcp-Name": "search" }, CALL],
    [{ "mcp-method": "tools/call" }, CALL],
    [{ "mcp-name": written("sëarch") }, body("tools/call", { name: "sëarch" })],
    [{ "mcp-name": written(" a") }, body("prompts/get", { name: " a" })],
    [{ "mcp-name": written("=?base64?eA==?=") }, body("tools/call", { name: "=?base64?eA==?=" })],
    [{ "mcp-name": "a, b" }, body("tools/call", { name: "a, b" })],
    [{ "mcp-name": "p" }, body("prompts/get", { name: "p" })],
    [{ "mcp-name": "a:b" }, body("resources/read", { uri: "a:b" })],
    [{ "mcp-name": "a:b" }, body("resources/subscribe", { uri: "a:b" })],
    [{ "mcp-name": "t1" }, body("tasks/get", { taskId: "t1" })],
    [{ "mcp-method": "notifications/x" }, { jsonrpc: "2.0", method: "notifications/x" }],
    [{ "mcp-param-region": "eu", "mcp-param-limit": "5", "mcp-param-all": "true" }, CALL],
    [{ "mcp-param-limit": "5.0" }, CALL],
    [{ "mcp-param-where": "eu" }, CALL],
    [
      { "mcp-name": "search" },
      String.raw`{"jsonrpc":"2.0","id":1,"method":"tools\/call","params":{"n\u0061me":"\u0073earch"}}`,
    ],
  ])("pass when they say what the body says: %j", (headers, message) => {
    expect(problemOf(headers as Record<string, string>, message)).toBeNull();
  });
});

describe("headers of a call", () => {
  test.each<[object, unknown, string]>([
    [{ "mcp-method": "tools/list" }, CALL, "Mcp-Method"],
    [{ "mcp-method": "Tools/Call" }, CALL, "Mcp-Method"],
    [{ "mcp-method": "tools/call, tools/call" }, CALL, "Mcp-Method"],
    [{ "mcp-method": "ping" }, { jsonrpc: "2.0", id: 1, result: {} }, "Mcp-Method"],
    [{ "mcp-name": "dear" }, CALL, "Mcp-Name"],
    [{ "mcp-name": "" }, CALL, "Mcp-Name"],
    [{ "mcp-name": written("dear…") }, CALL, "Mcp-Name"],
    [{ "mcp-name": "search" }, body("tools/call"), "Mcp-Name"],
    [{ "mcp-name": "search" }, body("ping"), "Mcp-Name"],
    [{ "mcp-name": "a:b" }, body("tools/call", { uri: "a:b" }), "Mcp-Name"],
    [{ "mcp-name": "x" }, body("constructor", { name: "x" }), "Mcp-Name"],
    [
      { "mcp-name": "a" },
      '{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"a","uri":"a"}}',
      "Mcp-Name",
    ],
    [
      { "mcp-name": "a" },
      '{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"a","URI":"b"}}',
      "Mcp-Name",
    ],
    [{ "mcp-name": "sëarch" }, body("tools/call", { name: "sëarch" }), "Mcp-Name"],
    [{ "mcp-name": "=?base64?c2VhcmNo" }, CALL, "Mcp-Name"],
    [{ "mcp-name": "=?base64?c2VhcmNoZ?=" }, CALL, "Mcp-Name"],
    [{ "mcp-name": "=?BASE64?c2VhcmNo?=" }, CALL, "Mcp-Name"],
    [{ "mcp-name": "=?base64?/w==?=" }, CALL, "Mcp-Name"],
    [{ "mcp-param-region": "us" }, CALL, "Mcp-Param-region"],
    [{ "mcp-param_region": "us" }, CALL, "Mcp-Param_region"],
    [{ "mcp-param-region": "5" }, CALL, "Mcp-Param-region"],
    [{ "mcp-param-re-gion": "5" }, CALL, "Mcp-Param-re-gion"],
    [{ "mcp-param-where": "us" }, CALL, "Mcp-Param-where"],
    [{ "mcp-param-x": "null" }, body("tools/call", { name: "a", arguments: { y: null } }), "Mcp-Param-x"],
    [{ "mcp-param-x": "1" }, body("tools/call", { name: "a", arguments: { y: [1] } }), "Mcp-Param-x"],
    [{ "mcp-param-x": "1" }, body("prompts/get", { name: "a", arguments: { x: "1" } }), "Mcp-Param-x"],
    [{ "mcp-param-x": "1" }, body("tools/call", { name: "a" }), "Mcp-Param-x"],
    [
      { "mcp-param-x": "b" },
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"arguments":{"x":"a","x":"b"}}}',
      "Mcp-Param-x",
    ],
    [{ "mcp-param-x": "1" }, body("tools/call", { arguments: { x: "1", rest: "y".repeat(65_536) } }), "Mcp-Param-x"],
    [{ "mcp-method": "ping" }, [body("ping")], "Mcp-Method"],
    [{ "mcp-method": "tools/call", "mcp-name": "dear" }, CALL, "Mcp-Name"],
  ])("are refused when the body does not say the same: %j", (headers, message, header) => {
    expect(headerOf(headers as Record<string, string>, message)).toBe(header);
  });
});

const text = fc.string({ unit: "grapheme", maxLength: 20 }).filter((value) => value.isWellFormed());
const primitive = fc.oneof(text, fc.boolean(), fc.maxSafeInteger());
const token = fc.stringMatching(/^[A-Za-z][A-Za-z0-9]{0,9}$/);
const NAMED = [
  ["tools/call", "name"],
  ["prompts/get", "name"],
  ["resources/read", "uri"],
  ["tasks/cancel", "taskId"],
] as const;

test("the headers that a client writes of its own message pass, and nothing else in their place", () => {
  fc.assert(
    fc.property(fc.constantFrom(...NAMED), text, text, ([method, key], name, other) => {
      // Such a tool's name is refused before.
      fc.pre(method !== "tools/call" || (name === name.trim() && !hasControls(name)));
      const message = body(method, { [key]: name });
      const headers = { "mcp-method": method, "mcp-name": written(name) };
      expect(headerOf(headers, message)).toBeNull();
      const expected = other === name ? null : "Mcp-Name";
      expect(headerOf({ ...headers, "mcp-name": written(other) }, message)).toBe(expected);
    }),
  );
});

test("a header for an argument passes under its own name with its value alone, however deep it stands", () => {
  fc.assert(
    fc.property(token, primitive, primitive, fc.nat(3), (key, value, other, depth) => {
      let given: unknown = { [key]: value, beside: other };
      for (let level = 0; level < depth; level++) given = { inner: given };
      const message = body("tools/call", { name: "a", arguments: given });
      fc.pre(!["beside", "inner"].includes(key.toLowerCase()) && String(value) !== String(other));
      // Numbers are compared as numbers: 5.0 says 5.
      fc.pre(typeof value !== "number" || Number(other) !== value);
      expect(headerOf({ [`mcp-param-${key}`]: written(String(value)) }, message)).toBeNull();
      expect(headerOf({ [`mcp-param-${key}`]: written(String(other)) }, message)).not.toBeNull();
    }),
  );
});

test("a large body is not read again for its headers", () => {
  const bytes = encode(JSON.stringify(body("tools/call", { name: "a", arguments: { all: Array(4_000_000).fill(1) } })));
  const headers = new Headers({ "mcp-method": "tools/call", "mcp-name": "a" });
  /** The time for the headers, as a share of the time in which the body is read. */
  function share(): number {
    const began = performance.now();
    const parsed = parseRpcMessages(bytes);
    const parsedAt = performance.now();
    expect(parsed.ok).toBe(true);
    const [only = null] = parsed.ok ? parsed.messages : [];
    expect(echoProblem(headers, bytes, only)).toBeNull();
    return (performance.now() - parsedAt) / (parsedAt - began);
  }
  // More than one try: a collection of garbage or another process may hold up the second part.
  expect([1, 2, 3].some(() => share() < 0.5)).toBe(true);
});
