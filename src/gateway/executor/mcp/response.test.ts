import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { plainAnswer } from "../../../../test/support/chain/rpc-answer.ts";
import { CAPTURE_BYTES_MAX } from "../../../core/limits.ts";
import { AnswerReader } from "./response.ts";

const encoder = new TextEncoder();
const decoder = new TextDecoder();

interface Ids {
  readonly wireId?: string;
  readonly callerId?: string;
  readonly captureBytes?: number;
}

/** Reads a message that comes in pieces of these lengths, over and over. */
function read(message: Uint8Array, { wireId = "1", callerId = "1", captureBytes = 1e6 }: Ids, cuts = [1e9]) {
  const options = { wireId, callerId: encoder.encode(callerId), captureBytes };
  const reader = new AnswerReader({ ...options, isHashed: true, dropsOthers: false });
  for (let at = 0, i = 0; at < message.length; i++) {
    const piece = message.slice(at, at + (cuts[i % cuts.length] ?? 1));
    reader.push(piece);
    at += piece.length;
    // What is kept must not be the piece itself.
    piece.fill(0x21);
  }
  return reader;
}

function answerTo(text: string, wireId: string) {
  return read(encoder.encode(text), { wireId }).answer();
}

/** Texts that are nearly JSON-RPC messages, some of them broken, cut off, or not even JSON. */
function messages(): fc.Arbitrary<string> {
  const space = fc.constantFrom("", " ", "\n\t", "\r");
  const id = fc.constantFrom("1", '"a"', "2", "null", "1.0", "10e-1", '"\\u0061"', "true", '{"id":1}', "[1,2]", "");
  const value = fc.oneof(
    fc.json(),
    fc.constantFrom('{"code":-32602}', '{"code":1,"code":"-7"}', '{"data":{"code":3}}', '"\\q"', "01", "-", "1e+"),
    fc.constantFrom("[".repeat(63) + "]".repeat(63), "[".repeat(64) + "]".repeat(64), "tru", "nullx", '"\u0001"'),
    id,
  );
  const key = fc.oneof(
    fc.constantFrom("id", "error", "method", "result", "jsonrpc", "code", "Id", "\\u0069d", "e\\u0072ror"),
    fc.string({ maxLength: 8 }).map((text) => JSON.stringify(text).slice(1, -1)),
  );
  const member = fc
    .tuple(space, key, space, fc.oneof({ weight: 3, arbitrary: value }, { weight: 2, arbitrary: id }), space)
    .map(([a, name, b, text, c]) => `${a}"${name}"${b}:${b}${text}${c}`);
  const object = fc
    .tuple(space, fc.array(member, { maxLength: 6 }), fc.constantFrom("", " ", "x", "{}"))
    .map(([before, members, behind]) => `${before}{${members.join(",")}}${behind}`);
  const idFirst = member.map((text) => `{"id":1,${text},"id":"a"}`);
  const twoErrors = fc.tuple(value, member).map(([a, b]) => `{"id":1,"error":{"code":5},"error":${a},${b}}`);
  const whole = fc.oneof(object, object, idFirst, twoErrors, fc.json(), fc.string());
  return fc.oneof(
    whole,
    fc.tuple(whole, fc.nat(80)).map(([text, length]) => text.slice(0, length)),
  );
}

describe("a message of an MCP server", () => {
  test("reads the same piece by piece as whole", () => {
    const cuts = fc.array(fc.integer({ min: 1, max: 30 }), { minLength: 1, maxLength: 8 });
    const ids = fc.constantFrom("1", '"a"', "1.0", '"\\u0061"');
    const callers = fc.constantFrom("1", '"caller"', "7777777", '"a"');
    let answers = 0;
    fc.assert(
      fc.property(
        messages(),
        cuts,
        ids,
        callers,
        fc.constantFrom(4, 40, 4000),
        (text, lengths, wireId, callerId, captureBytes) => {
          const message = encoder.encode(text);
          const plain = plainAnswer(message, wireId, callerId);
          if (plain.code !== undefined) answers++;
          const reader = read(message, { wireId, callerId, captureBytes }, lengths);
          expect(reader.answer()?.code).toBe(plain.code as number);
          const { start, size, sha256 } = reader.body();
          expect([size, sha256]).toEqual([plain.body.length, plain.sha256]);
          expect(decoder.decode(start.subarray(0, captureBytes))).toBe(
            decoder.decode(plain.body.subarray(0, captureBytes)),
          );
        },
      ),
      { numRuns: 5000 },
    );
    expect(answers).toBeGreaterThan(300);
  });

  test("may be long, with its id at the very end, and only its start is kept", () => {
    const text = "y".repeat(5_000_000);
    const message = (id: string) => encoder.encode(`{"jsonrpc":"2.0","result":{"text":"${text}"},"id":${id}}`);
    const [wireId, callerId, captureBytes] = ["17", '"the caller\'s own"', CAPTURE_BYTES_MAX];
    const reader = read(message(wireId), { wireId, callerId, captureBytes }, [32_768]);
    const given = message(callerId);
    expect(reader.answer()).toEqual({ code: null });
    const { start, size, sha256 } = reader.body();
    expect([size, sha256]).toEqual([given.length, new Bun.CryptoHasher("sha256").update(given).digest("hex")]);
    expect(start.length).toBeLessThan(CAPTURE_BYTES_MAX + 8 * 1024);
    expect(Buffer.compare(start.subarray(0, CAPTURE_BYTES_MAX), given.subarray(0, CAPTURE_BYTES_MAX))).toBe(0);
  });

  test("is not kept when nobody wants it", () => {
    const options = { wireId: "1", callerId: encoder.encode("1"), isHashed: false };
    const uncaptured = new AnswerReader({ ...options, captureBytes: 0, dropsOthers: false });
    const request = new AnswerReader({ ...options, captureBytes: 1000, dropsOthers: true });
    for (const reader of [uncaptured, request]) {
      reader.push(encoder.encode('{"method":"notifications/progress","params":{"text":"'));
      expect(reader.keptAfter(1000)).toBe(0);
      reader.push(encoder.encode("y".repeat(1000)));
      expect(reader.body().start.length).toBe(0);
    }
  });
});

describe("the answer of an MCP server", () => {
  test("is not one of these", () => {
    expect(answerTo('{"jsonrpc":"2.0","method":"notifications/progress","params":{"id":1}}', "1")).toBeNull();
    expect(answerTo('{"jsonrpc":"2.0","id":1,"method":"ping"}', "1")).toBeNull();
    expect(answerTo('{"jsonrpc":"2.0","id":2,"result":{}}', "1")).toBeNull();
    expect(answerTo('{"jsonrpc":"2.0","id":"1","result":{}}', "1")).toBeNull();
    expect(answerTo('{"jsonrpc":"2.0","id":null,"result":{}}', "1")).toBeNull();
    for (const text of ["", "[]", "not json"]) expect(answerTo(text, "1")).toBeNull();
  });

  test("is found by an id that is equal as a value", () => {
    expect(answerTo('{"id":"\\u0061","result":{}}', '"a"')).not.toBeNull();
    expect(answerTo('{"id":12345678901234567000,"result":{}}', "12345678901234567890")).not.toBeNull();
  });

  test("tells the error code, also of an error that names no request", () => {
    expect(answerTo('{"id":1,"error":{"message":"","code":-32602}}', "1")?.code).toBe(-32602);
    expect(answerTo('{"id":null,"error":{"code":-32700}}', "1")?.code).toBe(-32700);
    expect(answerTo('{"id":1,"result":{}}', "1")?.code).toBeNull();
  });

  test("gets the caller's id where it breaks off behind the id, and a null id stays", () => {
    const cut = encoder.encode('{"jsonrpc":"2.0","id":7,"result":{"text":"aaaa');
    const { start } = read(cut, { wireId: "7", callerId: '"x"' }).body();
    expect(decoder.decode(start)).toBe('{"jsonrpc":"2.0","id":"x","result":{"text":"aaaa');
    const unread = encoder.encode('{"id":null,"error":{"code":-32700}}');
    expect(read(unread, { callerId: '"x"' }).body().start).toEqual(unread);
  });
});
