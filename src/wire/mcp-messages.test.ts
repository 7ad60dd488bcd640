import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../concurrency/steps.ts";
import { BATCH_MESSAGES_MAX } from "../core/limits.ts";
import { parseRpcMessages } from "./mcp-messages.ts";

const parse = (value: unknown) =>
  atOnce(parseRpcMessages(new TextEncoder().encode(typeof value === "string" ? value : JSON.stringify(value))));
const rpc = (fields: object) => ({ jsonrpc: "2.0", ...fields });
const call = (name: unknown) => rpc({ id: 1, method: "tools/call", params: { name } });

describe("the connection of a client", () => {
  test.each([
    rpc({ id: 1, method: "initialize", params: {} }),
    rpc({ id: "a", method: "ping" }),
    rpc({ id: 1, method: "tools/list" }),
    rpc({ id: 1, method: "resources/templates/list" }),
    rpc({ method: "notifications/cancelled", params: { requestId: 1 } }),
  ])("is no call: %j", (message) => {
    const method = message["method" as keyof typeof message];
    expect(parse(message)).toMatchObject({ ok: true, messages: [{ method, tool: null, isCall: false }] });
  });

  test.each([rpc({ id: 1, result: {} }), rpc({ id: "x", error: { code: 1, message: "" } })])(
    "gets the response %j",
    (message) => {
      expect(parse(message)).toMatchObject({
        ok: true,
        messages: [{ method: null, tool: null, isCall: false }],
      });
    },
  );
});

describe("a call for a tool or a resource", () => {
  test.each<[object, string, string | null]>([
    [call("x"), "tools/call", "x"],
    [rpc({ id: 1, method: "tools/call" }), "tools/call", null],
    [rpc({ method: "tools/call", params: { name: "x" } }), "tools/call", "x"],
    [rpc({ method: "ping" }), "ping", null],
    [rpc({ method: "tools/list" }), "tools/list", null],
    [rpc({ id: 1, method: "notifications/x" }), "notifications/x", null],
    [rpc({ id: 1, method: "resources/read", params: { name: "x" } }), "resources/read", null],
    [rpc({ id: 1, method: "list" }), "list", null],
    [rpc({ id: 1, method: "Ping" }), "Ping", null],
  ])("is a message like %j", (message, method, tool) => {
    expect(parse(message)).toMatchObject({ ok: true, messages: [{ method, tool, isCall: true }] });
  });

  test("has the name that every decoder reads", () => {
    expect(
      parse(String.raw`{"jsonrpc":"2.0","id":1,"method":"tools\/call","params":{"n\u0061me":"\u0078"}}`),
    ).toMatchObject({
      ok: true,
      messages: [{ method: "tools/call", tool: "x", isCall: true }],
    });
  });
});

test("keys that only begin as a judged one are others", () => {
  const message = String.raw`{"jsonrpc":"2.0","id":1,"methods":1,"method\u0001":1,"method":"tools/call","params":{"name":"x","names":"y","meta":1,"name\\u0000":"z"}}`;
  expect(parse(message)).toMatchObject({ ok: true, messages: [{ method: "tools/call", tool: "x" }] });
});

describe("a batch", () => {
  test("is read message by message", () => {
    const parsed = parse([call("a"), rpc({ id: 2, method: "ping" }), rpc({ id: 3, result: 1 }), call("b")]);
    expect(parsed.ok && parsed.messages.map(({ tool, isCall }) => [tool, isCall])).toEqual([
      ["a", true],
      [null, false],
      [null, false],
      ["b", true],
    ]);
  });

  test("may have as many messages as allowed and no more", () => {
    expect(parse(Array(BATCH_MESSAGES_MAX).fill(call("a")))).toMatchObject({ ok: true });
    expect(parse(Array(BATCH_MESSAGES_MAX + 1).fill(call("a")))).toEqual({
      ok: false,
      problem: "a batch of more than 100 messages",
    });
  });
});

describe("a message that is refused", () => {
  test.each<[string, unknown]>([
    ["nothing", ""],
    ["no JSON", "{"],
    ["text behind it", `${JSON.stringify(call("x"))} x`],
    ["text behind a batch", `[${JSON.stringify(call("x"))}]]`],
    ["an unfinished batch", `[${JSON.stringify(call("x"))}`],
    ["an empty batch", []],
    ["null", null],
    ["a batch with something else in it", [call("x"), 1]],
    ["a batch in a batch", [[call("x")]]],
    ["another version", { ...call("x"), jsonrpc: "1.0" }],
    ["a null id", { ...call("x"), id: null }],
    ["no method and no result", rpc({ id: 1 })],
    ["a response without an id", rpc({ result: 1 })],
    ["a method beside a result", rpc({ id: 1, method: "ping", result: {} })],
    ["a method beside an error", rpc({ id: 1, method: "tools/call", params: { name: "x" }, error: {} })],
    ["an empty method", rpc({ id: 1, method: "" })],
    ["a number for a tool", call(1)],
    ["an array for params", rpc({ id: 1, method: "tools/call", params: ["x"] })],
    ["two methods", '{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}'],
    ["a method in other letters", '{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call"}'],
    ["two names", '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","name":"b"}}'],
    ["a name in other letters", '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","NAME":"b"}}'],
    ["a method that only looks like a call's", rpc({ id: 1, method: "Tools/Call", params: { name: "x" } })],
    ["a method with a blank behind it", rpc({ id: 1, method: "tools/call ", params: { name: "x" } })],
    ["a method that ends early for some", String.raw`{"jsonrpc":"2.0","id":1,"method":"ping","method\u0000":"x"}`],
    ["params that do", String.raw`{"jsonrpc":"2.0","id":1,"method":"tools/call","PARAMS\u0000x":{"name":"a"}}`],
    [
      "a name that does",
      String.raw`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","name\u0000longer":"b"}}`,
    ],
    [
      "arguments in other letters",
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","arguments":{},"Arguments":{"b":1}}}',
    ],
    [
      "arguments that stand there twice",
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"arguments":{},"arguments":{}}}',
    ],
    ["a _meta in other letters", '{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_META":{}}}'],
    [
      "two versions in one _meta",
      '{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"a","io.modelcontextprotocol/protocolversion":"b"}}}',
    ],
    ["a tool with a blank before it", call(" x")],
    ["a tool with a no-break space behind it", call("x\u00a0")],
    ["a tool with a byte order mark", call("x\ufeff")],
    ["a tool with U+0000", call("x\u0000y")],
    ["a tool with a line break", call("x\n")],
    ["a tool with a control character of Latin-1", call("x\u0085y")],
    [
      "a tool with half a character",
      String.raw`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"\ud800"}}`,
    ],
    ["deep nesting", `{"jsonrpc":"2.0","id":1,"method":"x","params":${"[".repeat(70)}${"]".repeat(70)}}`],
  ])("is %s", (_name, value) => {
    expect(parse(value)).toEqual({ ok: false, problem: expect.any(String) });
  });

  test("is no UTF-8", () => {
    expect(atOnce(parseRpcMessages(new Uint8Array([0x22, 0xff, 0x22]))).ok).toBe(false);
  });
});

/** A key as it may be spelled, on the wire, by whoever wants two decoders to read different things. */
const spelling = (key: string) =>
  fc
    .tuple(
      fc.array(fc.constantFrom("as it is", "as it is", "other case", "escaped"), {
        minLength: key.length,
        maxLength: key.length,
      }),
      fc.constantFrom("", "", "\\u0000", "\\u0000x", "x", "\\u0001"),
    )
    .map(([ways, end]) => {
      const written = [...key].map((letter, index) => {
        if (ways[index] === "other case") return letter.toUpperCase();
        return ways[index] === "escaped" ? `\\u00${letter.charCodeAt(0).toString(16)}` : letter;
      });
      return `"${written.join("")}${end}"`;
    });

/** What a decoder reads that folds case, ends keys at U+0000, and takes the first or the last of equal ones. */
function lenient(text: string, isFirst: boolean): { method?: unknown; params?: { name?: unknown } } {
  const readers = (_key: string, value: unknown) => {
    if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
    const entries = Object.entries(value).map(([key, inner]) => [key.split("\0")[0]?.toLowerCase(), inner] as const);
    return Object.fromEntries(isFirst ? entries.toReversed() : entries);
  };
  return JSON.parse(text, readers);
}

test("no lenient decoder reads another method or tool than the one that is judged", () => {
  const names = fc.constantFrom("cheap", "dear");
  const params = fc
    .array(fc.tuple(fc.constantFrom("name", "arguments", "other").chain(spelling), names), { maxLength: 3 })
    .map((members) => `{${members.map(([key, value]) => `${key}:"${value}"`).join()}}`);
  const member = fc.oneof(
    fc.tuple(spelling("method"), fc.constantFrom('"tools/call"', '"ping"')),
    fc.tuple(spelling("params"), params),
  );
  let accepted = 0;
  fc.assert(
    fc.property(fc.array(member, { minLength: 1, maxLength: 3 }), (members) => {
      const text = `{"jsonrpc":"2.0","id":1,${members.map(([key, value]) => `${key}:${value}`).join()}}`;
      const parsed = parse(text);
      if (!parsed.ok) return;
      accepted++;
      const [judged] = parsed.messages;
      for (const isFirst of [true, false]) {
        const read = lenient(text, isFirst);
        expect(read.method).toBe(judged?.method ?? undefined);
        if (read.method === "tools/call") expect(read.params?.name).toBe(judged?.tool ?? undefined);
      }
    }),
    { numRuns: 3000 },
  );
  expect(accepted).toBeGreaterThan(20);
});
