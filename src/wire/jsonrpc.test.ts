import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { MAX } from "../kernel/limits.ts";
import { isSessionless, parseRpcMessages, parseRpcRequest, splice } from "./jsonrpc.ts";

const encoder = new TextEncoder();
const decoder = new TextDecoder();

function judge(body: unknown): string {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const result = parseRpcRequest(encoder.encode(text));
  return result.ok ? "ok" : result.problem;
}

function accept(text: string) {
  const bytes = encoder.encode(text);
  const result = parseRpcRequest(bytes);
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
    expect(parseRpcRequest(bytes)).toEqual({ ok: false, problem: "not valid UTF-8" });
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
        const parsed = parseRpcRequest(body);
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

const parse = (value: unknown) =>
  parseRpcMessages(encoder.encode(typeof value === "string" ? value : JSON.stringify(value)));
const rpc = (fields: object) => ({ jsonrpc: "2.0", ...fields });
const toolCall = (name: unknown) => rpc({ id: 1, method: "tools/call", params: { name } });

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
    [toolCall("x"), "tools/call", "x"],
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
    const parsed = parse([toolCall("a"), rpc({ id: 2, method: "ping" }), rpc({ id: 3, result: 1 }), toolCall("b")]);
    expect(parsed.ok && parsed.messages.map(({ tool, isCall }) => [tool, isCall])).toEqual([
      ["a", true],
      [null, false],
      [null, false],
      ["b", true],
    ]);
  });

  test("may have as many messages as allowed and no more", () => {
    expect(parse(Array(MAX.batchMessages).fill(toolCall("a")))).toMatchObject({ ok: true });
    expect(parse(Array(MAX.batchMessages + 1).fill(toolCall("a")))).toEqual({
      ok: false,
      problem: "a batch of more than 100 messages",
    });
  });
});

describe("a message that is refused", () => {
  test.each<[string, unknown]>([
    ["nothing", ""],
    ["no JSON", "{"],
    ["text behind it", `${JSON.stringify(toolCall("x"))} x`],
    ["text behind a batch", `[${JSON.stringify(toolCall("x"))}]]`],
    ["an unfinished batch", `[${JSON.stringify(toolCall("x"))}`],
    ["an empty batch", []],
    ["null", null],
    ["a batch with something else in it", [toolCall("x"), 1]],
    ["a batch in a batch", [[toolCall("x")]]],
    ["another version", { ...toolCall("x"), jsonrpc: "1.0" }],
    ["a null id", { ...toolCall("x"), id: null }],
    ["no method and no result", rpc({ id: 1 })],
    ["a response without an id", rpc({ result: 1 })],
    ["a method beside a result", rpc({ id: 1, method: "ping", result: {} })],
    ["a method beside an error", rpc({ id: 1, method: "tools/call", params: { name: "x" }, error: {} })],
    ["an empty method", rpc({ id: 1, method: "" })],
    ["a number for a tool", toolCall(1)],
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
    ["a tool with a blank before it", toolCall(" x")],
    ["a tool with a no-break space behind it", toolCall("x\u00a0")],
    ["a tool with a byte order mark", toolCall("x\ufeff")],
    ["a tool with U+0000", toolCall("x\u0000y")],
    ["a tool with a line break", toolCall("x\n")],
    ["a tool with a control character of Latin-1", toolCall("x\u0085y")],
    [
      "a tool with half a character",
      String.raw`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"\ud800"}}`,
    ],
    ["deep nesting", `{"jsonrpc":"2.0","id":1,"method":"x","params":${"[".repeat(70)}${"]".repeat(70)}}`],
  ])("is %s", (_name, value) => {
    expect(parse(value)).toEqual({ ok: false, problem: expect.any(String) });
  });

  test("is no UTF-8", () => {
    expect(parseRpcMessages(new Uint8Array([0x22, 0xff, 0x22])).ok).toBe(false);
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
