import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { plainAnswer, plainStreamAnswer } from "../../../../test/support/chain/rpc-answer.ts";
import { LOOPBACK } from "../../../../test/support/stores/jobs.ts";
import { hostRules } from "../../../core/host.ts";
import { createOutbound } from "../../../http/client/outbound.ts";
import { MAX } from "../../../kernel/limits.ts";
import { CallError } from "../../upstream/failure.ts";
import { newTrace } from "../../upstream/headers.ts";
import { ResponseMemory } from "../call.ts";
import { AnswerReader, readStreamAnswer } from "./response.ts";

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
      // A second error of which only the key has come does not count yet.
      { numRuns: 5000, examples: [['{"id":1,"error":{"code":5},"error"', [1], "1", "1", 4]] },
    );
    expect(answers).toBeGreaterThan(300);
  });

  test("may be long, with its id at the very end, and only its start is kept", () => {
    const text = "y".repeat(5_000_000);
    const message = (id: string) => encoder.encode(`{"jsonrpc":"2.0","result":{"text":"${text}"},"id":${id}}`);
    const [wireId, callerId, captureBytes] = ["17", '"the caller\'s own"', MAX.capturedBytes];
    const reader = read(message(wireId), { wireId, callerId, captureBytes }, [32_768]);
    const given = message(callerId);
    expect(reader.answer()).toEqual({ code: null });
    const { start, size, sha256 } = reader.body();
    expect([size, sha256]).toEqual([given.length, new Bun.CryptoHasher("sha256").update(given).digest("hex")]);
    expect(start.length).toBeLessThan(MAX.capturedBytes + 8 * 1024);
    expect(Buffer.compare(start.subarray(0, MAX.capturedBytes), given.subarray(0, MAX.capturedBytes))).toBe(0);
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

const RESULT = '{"jsonrpc":"2.0","id":1,"result":{"t":"é€😀"}}';

/** Everything that may come before the response: a BOM, comments, empty data, other types, other messages. */
const STREAM = [
  "\ufeff: hi",
  "",
  "id: 1",
  "retry: 5",
  "data: ",
  "",
  "event: message",
  'data: {"jsonrpc":"2.0","method":"notifications/é","params":{"id":1}}',
  "",
  "event: other",
  'data: {"jsonrpc":"2.0","id":1,"result":"of another type"}',
  "",
  'data: {"jsonrpc":"2.0","id":2,"result":"of another request"}',
  "",
  'data: {"jsonrpc":"2.0",',
  'data:"id":1,"result":{"t":"é€😀"}}',
  "",
  'data: {"jsonrpc":"2.0","id":1,"result":"too late"}',
  "",
  "",
];

function contextOf() {
  const { signal } = new AbortController();
  return {
    outbound: createOutbound({ rules: hostRules({ allow: [] }), extraCa: null }),
    settings: LOOPBACK,
    signal,
    hold: new ResponseMemory(1).hold("acme", "agt_1", signal),
    trace: newTrace(),
  };
}

/** The answer in a stream that comes in pieces of these lengths, over and over; null when it ends without one. */
async function readStream(stream: Uint8Array, lengths: readonly number[], callerId = "1") {
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (let at = 0, i = 0; at < stream.length; i++) {
        const length = lengths[i % lengths.length] ?? 1;
        controller.enqueue(stream.slice(at, at + length));
        at += length;
      }
      controller.close();
    },
  });
  const ids = { wireId: "1", callerId: encoder.encode(callerId) };
  const options = { ...ids, captureBytes: MAX.capturedBytes, isHashed: true, dropsOthers: true };
  try {
    return (await readStreamAnswer(contextOf(), new Response(body), options)).body();
  } catch (error) {
    if (error instanceof CallError) return null;
    throw error;
  }
}

const lineEnds = fc.constantFrom("\n", "\r\n", "\r");

test("the response is found however an event stream is cut into chunks, whatever its line ends", async () => {
  const cuts = fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 20 });
  await fc.assert(
    fc.asyncProperty(cuts, lineEnds, async (lengths, lineEnd) => {
      const found = await readStream(encoder.encode(STREAM.join(lineEnd)), lengths);
      expect(JSON.parse(decoder.decode(found?.start))).toEqual(JSON.parse(RESULT));
    }),
    { numRuns: 200, examples: [[[1], "\r\n"]] },
  );
});

/** Lines that mean something in an event stream, and such as nearly do. */
const line = fc.oneof(
  fc.constantFrom("", "", "", "data", "data:", "data: ", "data:  ", "event: message", "event", "event: other", ":"),
  fc.constantFrom("event: messages", "event:  message", "id: 1", "retry: 5", "Data: 1", " data: 1", "datas: 1"),
  fc.constantFrom('data: {"id":1,', 'data:"result":"é"}', 'data: {"id":1,"result":1}', 'data: {"id":2,"result":1}'),
  fc.constantFrom('data: {"result":[', 'data: 1],"id":', "data:1}", 'data: {"id":1,"method":"x"}', "data: \ufeff{}"),
  fc.string({ unit: "binary", maxLength: 12 }).map((text) => `data: {"id":1,"result":${JSON.stringify(text)}}`),
);

test("an event stream of any lines is read as another reader, of whole events, reads it", async () => {
  const cuts = fc.array(fc.integer({ min: 1, max: 60 }), { minLength: 1, maxLength: 6 });
  const lines = fc.array(fc.tuple(line, lineEnds), { maxLength: 14 });
  /** What is no UTF-8 is replaced. */
  const broken = fc.array(fc.tuple(fc.nat(200), fc.constantFrom(0xff, 0xc3, 0xe2, 0x80)), { maxLength: 2 });
  const last = fc.constantFrom("", "data: {", 'data: {"id":1,"result":2}');
  let answers = 0;
  await fc.assert(
    fc.asyncProperty(cuts, lines, last, broken, async (lengths, whole, rest, spoilt) => {
      const stream = encoder.encode(whole.flat().join("") + rest);
      for (const [at, byte] of spoilt) if (at < stream.length) stream[at] = byte;
      const plain = plainStreamAnswer(stream, "1", '"mine"');
      const found = await readStream(stream, lengths, '"mine"');
      if (plain !== null) answers++;
      expect(found?.sha256).toBe(plain?.sha256 as string);
      expect(found?.size).toBe(plain?.body.length as number);
      expect(found === null ? null : Buffer.from(found.start).toString()).toBe(
        plain === null ? null : Buffer.from(plain.body).toString(),
      );
    }),
    { numRuns: 2000 },
  );
  expect(answers).toBeGreaterThan(300);
});
