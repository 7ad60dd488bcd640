import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { UnreadableAnswer, withoutTools } from "./tool-list.ts";

const bytes = (text: string) => new TextEncoder().encode(text);
const text = (value: Uint8Array) => new TextDecoder().decode(value);
const denying =
  (...names: string[]) =>
  (tool: string) =>
    names.includes(tool);
const answer = (...names: string[]) =>
  JSON.stringify({
    jsonrpc: "2.0",
    id: 1,
    result: { tools: names.map((name) => ({ name, big: 1 })), next: "c" },
  });

test("what is denied is gone, and the rest stays as it was written", () => {
  const given =
    '{ "result" : {"nextCursor":"x", "tools": [ {"name":"a","n":1e400} , {"name":"b"},\n{"name":"c"} ]}, "id":1 }';
  const left = (...names: string[]) => text(withoutTools(bytes(given), denying(...names)));
  expect(left("b")).toBe(
    '{ "result" : {"nextCursor":"x", "tools": [ {"name":"a","n":1e400},\n{"name":"c"} ]}, "id":1 }',
  );
  expect(left("a", "b", "c")).toBe('{ "result" : {"nextCursor":"x", "tools": [  ]}, "id":1 }');
  expect(left("a", "c")).toBe('{ "result" : {"nextCursor":"x", "tools": [ {"name":"b"} ]}, "id":1 }');
});

test("any of any tools", () => {
  const names = fc.uniqueArray(fc.string(), { maxLength: 8 });
  fc.assert(
    fc.property(names, fc.func(fc.boolean()), (all, isDenied) => {
      const left = withoutTools(bytes(answer(...all)), isDenied);
      expect(text(left)).toBe(answer(...all.filter((name) => !isDenied(name))));
    }),
  );
});

test("answers in a batch are all looked at", () => {
  const given = `[${answer("a", "b")}, ${answer("b")}, {"id":3,"result":{}}]`;
  expect(text(withoutTools(bytes(given), denying("b")))).toBe(
    `[${answer("a")}, ${answer()}, {"id":3,"result":{}}]`,
  );
});

describe("untouched is", () => {
  test.each([
    answer("a"),
    '{"id":1,"result":{"tools":{"name":"b"}}}',
    '{"id":1,"result":{"tools":[{"name":5},"b",null,{"title":"b"}]}}',
    '{"id":1,"error":{"code":1,"message":"b"}}',
    '{"method":"x","params":{"tools":[{"name":"b"}]}}',
    "not json b",
    " \n",
    "",
  ])("%s", (given) => {
    const whole = bytes(given);
    expect(withoutTools(whole, denying("b"))).toBe(whole);
  });
});

describe("unreadable is", () => {
  test.each([
    '{"result":{"tools":[{"name":"b"}',
    '{"result":{"tools":[{"name":"b","default":NaN}]}}',
    '{"result":{"tools":[]}} {"result":{"tools":[{"name":"b"}]}}',
    '[{"result":{"tools":[{"name":"b"}]}},]',
    '[] [{"result":{"tools":[{"name":"b"}]}}]',
    '{"result":{"tools":[]},"result":{"tools":[{"name":"b"}]}}',
    '{"result":{"tools":[{"name":"b"}],"tools":[]}}',
    '{"result":{"Tools":[{"name":"b"}]}}',
    `{"result":{"tools":[{"name":"b","deep":${"[".repeat(70)}${"]".repeat(70)}}]}}`,
    `{"result":{"tools":[${Array(10_001).fill("1")}]}}`,
  ])("%.60s", (given) => {
    expect(() => withoutTools(bytes(given), denying("b"))).toThrow(UnreadableAnswer);
  });
});
