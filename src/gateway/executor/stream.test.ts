import { expect, test } from "bun:test";
import fc from "fast-check";
import { LOOPBACK } from "../../../test/support/jobs.ts";
import { hostRules } from "../../core/host.ts";
import { NOBODY } from "../../edge/decode.ts";
import { createOutbound } from "../../edge/outbound.ts";
import { createMemory } from "./memory.ts";
import { newTrace } from "./outcome.ts";
import { isEventStream, readStreamAnswer } from "./stream.ts";

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

async function read(chunks: readonly Uint8Array[]) {
  const { signal } = new AbortController();
  const context = {
    outbound: createOutbound({ rules: hostRules({ allow: [] }), extraCa: null }),
    settings: LOOPBACK,
    signal,
    hold: createMemory(1, LOOPBACK.max_response_bytes).hold("acme", "agt_1", signal),
    trace: newTrace(),
    decodedFor: NOBODY,
  };
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
  const { message } = await readStreamAnswer(context, new Response(body), "1");
  return JSON.parse(new TextDecoder().decode(message)) as unknown;
}

test("the response is found however the stream is cut into chunks, whatever its line ends", async () => {
  const cuts = fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 20 });
  await fc.assert(
    fc.asyncProperty(cuts, fc.constantFrom("\n", "\r\n", "\r"), async (lengths, lineEnd) => {
      const bytes = new TextEncoder().encode(STREAM.join(lineEnd));
      const chunks: Uint8Array[] = [];
      for (let at = 0; at < bytes.length; ) {
        const length = lengths[chunks.length % lengths.length] ?? 1;
        chunks.push(bytes.slice(at, at + length));
        at += length;
      }
      expect(await read(chunks)).toEqual(JSON.parse(RESULT));
    }),
    { numRuns: 200, examples: [[[1], "\r\n"]] },
  );
});

test("only event streams are read as such", () => {
  const typed = (type: string) => isEventStream(new Response("", { headers: { "content-type": type } }));
  expect(["text/event-stream", "Text/Event-Stream ; charset=utf-8"].every(typed)).toBe(true);
  expect(["application/json", "text/event-stream-x", "x text/event-stream"].some(typed)).toBe(false);
});
