import { describe, expect, test } from "bun:test";
import { BATCH_MESSAGES_MAX } from "./limits.ts";
import { parseRpcMessages } from "./messages.ts";

const parse = (value: unknown) =>
  parseRpcMessages(new TextEncoder().encode(typeof value === "string" ? value : JSON.stringify(value)));
const rpc = (fields: object) => ({ jsonrpc: "2.0", ...fields });
const call = (name: unknown) => rpc({ id: 1, method: "tools/call", params: { name } });

describe("the connection", () => {
  test.each([
    rpc({ id: 1, method: "initialize", params: {} }),
    rpc({ id: "a", method: "ping" }),
    rpc({ id: 1, method: "tools/list" }),
    rpc({ id: 1, method: "resources/templates/list" }),
    rpc({ method: "notifications/cancelled", params: { requestId: 1 } }),
  ])("is %j", (message) => {
    expect(parse(message)).toEqual({
      ok: true,
      messages: [{ method: message["method" as keyof typeof message], tool: null, isCall: false }],
    });
  });

  test.each([rpc({ id: 1, result: {} }), rpc({ id: "x", error: { code: 1, message: "" } })])(
    "is the response %j",
    (message) => {
      expect(parse(message)).toEqual({ ok: true, messages: [{ method: null, tool: null, isCall: false }] });
    },
  );
});

describe("a call", () => {
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
  ])("is %j", (message, method, tool) => {
    expect(parse(message)).toEqual({ ok: true, messages: [{ method, tool, isCall: true }] });
  });

  test("has the name that every decoder reads", () => {
    expect(
      parse(String.raw`{"jsonrpc":"2.0","id":1,"method":"tools\/call","params":{"n\u0061me":"\u0078"}}`),
    ).toEqual({
      ok: true,
      messages: [{ method: "tools/call", tool: "x", isCall: true }],
    });
  });
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

  test("has an end", () => {
    expect(parse(Array(BATCH_MESSAGES_MAX).fill(call("a")))).toMatchObject({ ok: true });
    expect(parse(Array(BATCH_MESSAGES_MAX + 1).fill(call("a")))).toEqual({
      ok: false,
      problem: "a batch of more than 100 messages",
    });
  });
});

describe("refused is", () => {
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
    [
      "a name in other letters",
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","NAME":"b"}}',
    ],
    ["deep nesting", `{"jsonrpc":"2.0","id":1,"method":"x","params":${"[".repeat(70)}${"]".repeat(70)}}`],
  ])("%s", (_name, value) => {
    expect(parse(value)).toEqual({ ok: false, problem: expect.any(String) });
  });

  test("what is no UTF-8", () => {
    expect(parseRpcMessages(new Uint8Array([0x22, 0xff, 0x22])).ok).toBe(false);
  });
});
