import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { withoutTools as cut, type DeniedTools, findTools, UnreadableAnswer } from "./tool-list.ts";

function withoutTools(text: Uint8Array, isDenied: DeniedTools) {
  const found = findTools(text);
  if (typeof found === "string") throw new UnreadableAnswer(found);
  const tools = found.flatMap((list) => list.tools);
  const denied = new Set(tools.filter(({ name }) => name !== null && isDenied(name)));
  return Buffer.concat(cut(text, found, denied, isDenied.listIsPrivate === true));
}

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

test("denied tools are gone from a list, and the rest stays as it was written", () => {
  const given =
    '{ "result" : {"nextCursor":"x", "tools": [ {"name":"a","n":1e400} , {"name":"b"},\n{"name":"c"} ]}, "id":1 }';
  const left = (...names: string[]) => text(withoutTools(bytes(given), denying(...names)));
  expect(left("b")).toBe(
    '{ "result" : {"nextCursor":"x", "tools": [ {"name":"a","n":1e400},\n{"name":"c"} ]}, "id":1 }',
  );
  expect(left("a", "b", "c")).toBe('{ "result" : {"nextCursor":"x", "tools": [  ]}, "id":1 }');
  expect(left("a", "c")).toBe('{ "result" : {"nextCursor":"x", "tools": [ {"name":"b"} ]}, "id":1 }');
});

test("a list that is made private says so once, whatever it said, and is otherwise as it would be", () => {
  const scopes = fc.constantFrom({}, { cacheScope: "public" }, { cacheScope: "private" }, { cacheScope: 5 });
  const names = fc.uniqueArray(fc.string(), { maxLength: 8 });
  fc.assert(
    fc.property(names, scopes, fc.func(fc.boolean()), (all, scope, isDenied) => {
      const tools = all.map((name) => ({ name }));
      const list = (kept: object[], said: object) => ({
        jsonrpc: "2.0",
        id: 1,
        result: { ttlMs: 1, tools: kept, ...said },
      });
      const priv = Object.assign((tool: string) => isDenied(tool), { listIsPrivate: true });
      const left = text(withoutTools(bytes(JSON.stringify(list(tools, scope))), priv));
      const kept = tools.filter(({ name }) => !isDenied(name));
      expect(JSON.parse(left)).toEqual(list(kept, { cacheScope: "private" }));
      expect(left.split("cacheScope").length).toBe(2);
    }),
  );
  const other = bytes(JSON.stringify({ jsonrpc: "2.0", id: 1, result: { resources: [] } }));
  const priv = Object.assign(() => true, { listIsPrivate: true });
  expect(text(withoutTools(other, priv))).toBe(text(other));
});

test("of any tools any can be denied", () => {
  const names = fc.uniqueArray(fc.string(), { maxLength: 8 });
  fc.assert(
    fc.property(names, fc.func(fc.boolean()), (all, isDenied) => {
      const left = withoutTools(bytes(answer(...all)), isDenied);
      expect(text(left)).toBe(answer(...all.filter((name) => !isDenied(name))));
    }),
  );
});

test("the answers in a batch are all looked at", () => {
  const given = `[${answer("a", "b")}, ${answer("b")}, {"id":3,"result":{}}]`;
  expect(text(withoutTools(bytes(given), denying("b")))).toBe(`[${answer("a")}, ${answer()}, {"id":3,"result":{}}]`);
});

/** A list as it may be written: what stands before, in and behind each tool, and how the tool is called. */
const space = fc.constantFrom("", " ", "\n", " \t ");
const NAMES = ["a", "bé", "c d", "\ud83d\ude00", '"', "\\", "\n"];
const named = fc.constantFrom(...NAMES).chain((name) => {
  const escaped = [...name].map((_, at) => `\\u${name.charCodeAt(at).toString(16).padStart(4, "0")}`).join("");
  const forms = [JSON.stringify(name), name.length === 1 ? `"${escaped}"` : JSON.stringify(name)];
  const members = fc.constantFrom(
    (form: string) => `{"name":${form}}`,
    (form: string) => `{ "x":[{"name":"a"}], "name" :${form},"y":{"name":"a"} }`,
    (form: string) => `{"n\\u0061me":${form},"names":"a","big":1e400}`,
  );
  return fc.tuple(fc.constantFrom(...forms), members).map(([form, write]) => ({ name, text: write(form) }));
});
const unnamed = fc
  .constantFrom("1", "null", '"a"', '["a"]', '[{"name":"a"}]', "{}", '{"name":1}', '{"name":["a"]}')
  .map((text) => ({ name: null, text }));
const tools = fc.array(
  fc.tuple(space, fc.oneof({ weight: 4, arbitrary: named }, { weight: 1, arbitrary: unnamed }), space),
  { maxLength: 6 },
);
type Tools = typeof tools extends fc.Arbitrary<infer T> ? T : never;

/** By the plain rule: a tool that goes takes the comma in front along, or the one behind when none before it stays. */
function write(list: Tools, isDenied: (name: string) => boolean): string {
  let text = "";
  let keptOne = false;
  let skipSpace = false;
  for (const [at, [before, { name, text: tool }, after]] of list.entries()) {
    const comma = at === 0 ? "" : ",";
    const goes = name !== null && isDenied(name);
    if (goes && keptOne) {
      // What stood behind the last tool up to the comma goes with the comma.
      text = text.slice(0, text.length - (list[at - 1]?.[2].length ?? 0)) + after;
    } else if (goes) {
      if (!skipSpace) text += before;
      skipSpace = true;
      if (at === list.length - 1) text += after;
    } else {
      text += skipSpace ? tool + after : comma + before + tool + after;
      skipSpace = false;
      keptOne = true;
    }
  }
  return text;
}

test("the filter leaves of any list what the plain rule leaves", () => {
  const denied = fc.uniqueArray(fc.constantFrom(...NAMES));
  const seen = new Set<boolean>();
  fc.assert(
    fc.property(fc.array(tools, { minLength: 1, maxLength: 3 }), denied, (lists, names) => {
      const answers = (isDenied: (name: string) => boolean) => {
        const all = lists.map((list) => `{"id":1, "r\\u0065sult" : {"tools":[${write(list, isDenied)}] ,"z":0}}`);
        return all.length === 1 ? ` ${all[0]}\n` : ` [${all.join(" ,")}] `;
      };
      const isDenied = denying(...names);
      const [whole, left] = [answers(() => false), answers(isDenied)];
      seen.add(whole === left);
      expect(text(withoutTools(bytes(whole), isDenied))).toBe(left);
    }),
    { numRuns: 2_000 },
  );
  expect(seen.size).toBe(2);
});

test("a tool's name is judged by as much of it as a rule can name, however it is written", () => {
  const asked: string[] = [];
  const isDenied = (tool: string) => asked.push(tool) > 0 && tool.startsWith("x\u0001");
  const name = `x\u0001${"yé\ud83d\ude00".repeat(50_000)}`;
  const units = Array.from(name, (_, at) => name.charCodeAt(at));
  const escaped = units.map((unit) => `\\u${unit.toString(16).padStart(4, "0")}`).join("");
  for (const written of [JSON.stringify(name), `"${escaped.slice(0, 6 * 200_000)}"`]) {
    const given = `{"result":{"tools":[{"name":${written}},1]}}`;
    expect(text(withoutTools(bytes(given), isDenied))).toBe('{"result":{"tools":[1]}}');
  }
  expect(asked).toEqual(Array(2).fill(name.slice(0, 2049)));
});

test("tools are counted over all answers of a batch", () => {
  const batch = (count: number) => bytes(`[${Array(2).fill(`{"result":{"tools":[${Array(count).fill("1")}]}}`)}]`);
  expect(withoutTools(batch(5_000), denying("b")).length).toBe(batch(5_000).length);
  expect(() => withoutTools(batch(5_001), denying("b"))).toThrow(UnreadableAnswer);
  const answers = (count: number) => bytes(`[${Array(count).fill("{}")}]`);
  expect(withoutTools(answers(1_000), denying("b")).length).toBe(3_001);
  expect(() => withoutTools(answers(1_001), denying("b"))).toThrow(UnreadableAnswer);
});

describe("a text without denied tools", () => {
  test.each([
    answer("a"),
    '{"id":1,"result":{"tools":{"name":"b"}}}',
    '{"id":1,"result":{"tools":[{"name":5},"b",null,{"title":"b"}]}}',
    '{"id":1,"error":{"code":1,"message":"b"}}',
    '{"method":"x","params":{"tools":[{"name":"b"}]}}',
    "not json b",
    " \n",
    "",
  ])("is left untouched: %s", (given) => {
    const whole = bytes(given);
    expect(text(withoutTools(whole, denying("b")))).toBe(given);
  });
});

describe("a text that cannot be read", () => {
  test.each([
    '{"result":{"tools":[{"name":"b"}',
    '{"result":{"tools":[{"name":"b","default":NaN}]}}',
    '{"result":{"tools":[]}} {"result":{"tools":[{"name":"b"}]}}',
    '[{"result":{"tools":[{"name":"b"}]}},]',
    '[] [{"result":{"tools":[{"name":"b"}]}}]',
    '{"result":{"tools":[]},"result":{"tools":[{"name":"b"}]}}',
    '{"result":{"tools":[{"name":"b"}],"tools":[]}}',
    '{"result":{"Tools":[{"name":"b"}]}}',
    '{"result":{"tools":[{"name":"a","name":"b"}]}}',
    '{"result":{"tools":[{"name":"b","n\\u0061me":"a"}]}}',
    '{"result":{"tools":[{"name":"a"},{"name":null,"name":"b"}]}}',
    '{"result":{"tools":[{"name":"a","Name":"b"}]}}',
    '{"result":{"tools":[{"Name":"b"}]}}',
    '[{"result":{"tools":[{"name":"a"}]}},{"result":{"tools":[{"NAME":"b"}]}}]',
    `{"result":{"tools":[{"name":"b","deep":${"[".repeat(70)}${"]".repeat(70)}}]}}`,
    `{"result":{"tools":[${Array(10_001).fill("1")}]}}`,
  ])("is told as such: %.60s", (given) => {
    expect(() => withoutTools(bytes(given), denying("b"))).toThrow(UnreadableAnswer);
  });
});
