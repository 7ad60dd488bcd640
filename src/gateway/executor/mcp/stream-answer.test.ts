import { expect, test } from "bun:test";
import fc from "fast-check";
import { plainStreamAnswer } from "../../../../test/support/chain/rpc-answer.ts";
import { LOOPBACK } from "../../../../test/support/stores/jobs.ts";
import { hostRules } from "../../../core/host.ts";
import { CAPTURE_BYTES_MAX } from "../../../core/limits.ts";
import { NOBODY } from "../../../http/client/decode.ts";
import { createOutbound } from "../../../http/client/outbound.ts";
import { CallError } from "../../upstream/failure.ts";
import { newTrace } from "../outcome.ts";
import { createResponseMemory } from "../workers/response-memory.ts";
import { isEventStream, readStreamAnswer } from "./stream-answer.ts";

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
    hold: createResponseMemory(1).hold("acme", "agt_1", signal),
    trace: newTrace(),
    decodedFor: NOBODY,
  };
}

/** The answer in a stream that comes in pieces of these lengths, over and over; null when it ends without one. */
async function read(stream: Uint8Array, lengths: readonly number[], callerId = "1") {
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
  const ids = { wireId: "1", callerId: new TextEncoder().encode(callerId) };
  const options = { ...ids, captureBytes: CAPTURE_BYTES_MAX, isHashed: true, dropsOthers: true };
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
      const found = await read(new TextEncoder().encode(STREAM.join(lineEnd)), lengths);
      expect(JSON.parse(new TextDecoder().decode(found?.start))).toEqual(JSON.parse(RESULT));
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
      const stream = new TextEncoder().encode(whole.flat().join("") + rest);
      for (const [at, byte] of spoilt) if (at < stream.length) stream[at] = byte;
      const plain = plainStreamAnswer(stream, "1", '"mine"');
      const found = await read(stream, lengths, '"mine"');
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

test("only event streams are read as such", () => {
  const typed = (type: string) => isEventStream(new Response("", { headers: { "content-type": type } }));
  expect(["text/event-stream", "Text/Event-Stream ; charset=utf-8"].every(typed)).toBe(true);
  expect(["application/json", "text/event-stream-x", "x text/event-stream"].some(typed)).toBe(false);
});
