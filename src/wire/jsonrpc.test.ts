import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { atOnce } from "../concurrency/steps.ts";
import { isSessionless, parseRpcRequest, splice } from "./jsonrpc.ts";

const encoder = new TextEncoder();
const decoder = new TextDecoder();

function judge(body: unknown): string {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const result = atOnce(parseRpcRequest(encoder.encode(text)));
  return result.ok ? "ok" : result.problem;
}

function accept(text: string) {
  const bytes = encoder.encode(text);
  const result = atOnce(parseRpcRequest(bytes));
  if (!result.ok) throw new Error(result.problem);
  return { ...result, id: decoder.decode(bytes.subarray(result.id.start, result.id.end)) };
}

const METHOD = expect.stringMatching(/^method: must be a non-empty string/);
const NAME = expect.stringMatching(/^params\.name: must be a string/);
const valid = { jsonrpc: "2.0", id: 1, method: "tools/list" };
const call = { ...valid, method: "tools/call", params: { name: "echo", arguments: { name: 5 } } };

describe("a JSON-RPC request", () => {
  test("may be with and without params", () => {
    expect(judge(valid)).toBe("ok");
    expect(judge({ ...valid, params: {} })).toBe("ok");
    expect(judge({ ...valid, params: [] })).toBe("ok");
  });

  test("may have IDs as they are written: strings, big and negative numbers, fractions", () => {
    for (const id of ['"a\\u00e9\\""', "123456789012345678901234567890", "-1", "1.5", "0", '""']) {
      expect(accept(`{"jsonrpc":"2.0", "id" : ${id} ,"method":"ping"}`).id).toBe(id);
    }
  });

  test("may have extra members, and equal keys where nobody judges them", () => {
    expect(
      judge(
        '{"jsonrpc":"2.0","id":1,"method":"tools/call","x":1,"x":2,"params":{"name":"a","arguments":{"b":1,"b":2}}}',
      ),
    ).toBe("ok");
  });

  test("is read with the tool of a tools/call, and of nothing else", () => {
    expect(accept(JSON.stringify(call)).tool).toBe("echo");
    expect(accept(JSON.stringify({ ...call, method: "prompts/get" })).tool).toBeNull();
    expect(accept(JSON.stringify({ ...call, params: {} })).tool).toBeNull();
    expect(
      accept('{"jsonrpc":"2.0","id":1,"\\u006dethod":"tools\\/call","params":{"n\\u0061me":"\\u0065cho"}}').tool,
    ).toBe("echo");
  });

  test("is read with the protocol version that the params name", () => {
    const _meta = { "io.modelcontextprotocol/protocolVersion": "2026-07-28" };
    expect(accept(JSON.stringify({ ...valid, params: { _meta } })).protocolVersion).toBe("2026-07-28");
    expect(accept(JSON.stringify({ ...call, params: { ...call.params, _meta } })).protocolVersion).toBe("2026-07-28");
    expect(accept(JSON.stringify({ ...valid, params: { _meta: { progressToken: 1 } } })).protocolVersion).toBeNull();
  });
});

describe("a bad JSON-RPC request", () => {
  const cases: Array<[string, unknown, string]> = [
    ["an empty body", "", "must be a JSON-RPC request object"],
    ["another value", "null", "must be a JSON-RPC request object"],
    ["a batch", [valid], "must be one JSON-RPC request, not a batch"],
    ["what is no JSON", '{"jsonrpc":"2.0",}', "not valid JSON"],
    ["text after the request", `${JSON.stringify(valid)}{}`, "not valid JSON"],
    ["a byte order mark", `\ufeff${JSON.stringify(valid)}`, "must be a JSON-RPC request object"],
    ["another version", { ...valid, jsonrpc: "1.0" }, 'jsonrpc: must be "2.0"'],
    ["a version that is a number", { ...valid, jsonrpc: 2 }, 'jsonrpc: must be "2.0"'],
    ["a missing version", { id: 1, method: "a" }, 'jsonrpc: must be "2.0"'],
    [
      "a notification",
      { jsonrpc: "2.0", method: "notifications/initialized" },
      "id: required, a notification has no result",
    ],
    ["a null id", { ...valid, id: null }, "id: must be a string or a number"],
    ["an object as id", { ...valid, id: {} }, "id: must be a string or a number"],
    ["a boolean id", { ...valid, id: true }, "id: must be a string or a number"],
    ["an endless id", { ...valid, id: "x".repeat(2000) }, "id: must be a string or a number"],
    ["a response", { jsonrpc: "2.0", id: 1, result: {} }, METHOD],
    ["an empty method", { ...valid, method: "" }, METHOD],
    ["a method that is no string", { ...valid, method: 1 }, METHOD],
    ["a method that can't be stored", { ...valid, method: "a\u0000b" }, METHOD],
    ["a method with half a character", '{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', METHOD],
    ["null params", { ...valid, params: null }, "params: must be an object or an array"],
    ["params that are a string", { ...valid, params: "a" }, "params: must be an object or an array"],
    ["a tools/call by position", { ...call, params: ["echo"] }, "params: must be an object"],
    ["a tool that is no string", { ...call, params: { name: 5 } }, NAME],
    ["two ids", '{"jsonrpc":"2.0","id":1,"method":"a","id":2}', "id: given twice"],
    ["two methods, one escaped", '{"jsonrpc":"2.0","id":1,"method":"a","\\u006dethod":"b"}', "method: given twice"],
    ["two params", '{"jsonrpc":"2.0","id":1,"method":"a","params":{},"params":{}}', "params: given twice"],
    [
      "a method in another case",
      '{"jsonrpc":"2.0","id":1,"method":"a","Method":"b"}',
      "method: must be spelled exactly like this",
    ],
    [
      "params with a long s",
      '{"jsonrpc":"2.0","id":1,"method":"a","paramſ":{}}',
      "params: must be spelled exactly like this",
    ],
    [
      "two tools",
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","name":"b"}}',
      "params.name: given twice",
    ],
    [
      "a tool in another case",
      '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"Name":"a"}}',
      "params.name: must be spelled exactly like this",
    ],
    [
      "deep nesting",
      `{"jsonrpc":"2.0","id":1,"method":"a","params":${"[".repeat(100)}${"]".repeat(100)}}`,
      "nested too deeply",
    ],
  ];
  for (const [what, body, problem] of cases) {
    test(`is refused: ${what}`, () => expect(judge(body)).toEqual(problem));
  }

  test("is refused for invalid UTF-8", () => {
    const bytes = encoder.encode('{"jsonrpc":"2.0","id":1,"method":"aXb"}');
    bytes[bytes.indexOf(0x58)] = 0xff;
    expect(atOnce(parseRpcRequest(bytes))).toEqual({ ok: false, problem: "not valid UTF-8" });
  });
});

describe("the id of a request on the wire", () => {
  test("is exchanged without touching another byte", () => {
    const ids = fc.oneof(
      fc.string().map((s) => JSON.stringify(s)),
      fc.bigInt().map(String),
    );
    const params = fc.dictionary(fc.string(), fc.jsonValue()).map((value) => JSON.stringify(value, null, 1));
    fc.assert(
      fc.property(ids, params, (id, text) => {
        const request = (as: string) => `{ "params":${text},\n"method":"a", "id" : ${as},"jsonrpc":"2.0" } `;
        const body = encoder.encode(request(id));
        const parsed = atOnce(parseRpcRequest(body));
        if (!parsed.ok) return expect(parsed.problem).toMatch(/^(id: must|nested)/);
        const wire = splice(body, parsed.id, encoder.encode("42"));
        expect(decoder.decode(wire)).toBe(request("42"));
      }),
    );
  });
});

test("protocol versions from 2026-07-28 on have no sessions", () => {
  expect(["2026-07-28", "2027-01-01"].every(isSessionless)).toBe(true);
  expect([null, "", "2025-11-25", "DRAFT-2027", "9", "draft"].some(isSessionless)).toBe(false);
});
