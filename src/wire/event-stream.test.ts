import { expect, test } from "bun:test";
import fc from "fast-check";
import { isEventStream, Utf8Reader } from "./event-stream.ts";

const text = fc.string({ unit: "binary", maxLength: 12 }).map((value) => new TextEncoder().encode(value));
const BYTES = [0x00, 0x41, 0x7f, 0x80, 0xa0, 0xbf, 0xbb, 0xc0, 0xc2, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf4, 0xf5, 0xff];
const junk = fc.array(fc.constantFrom(...BYTES), { maxLength: 6 }).map((bytes) => Uint8Array.from(bytes));
const mark = fc.constant(Uint8Array.of(0xef, 0xbb, 0xbf));

test("a text is decoded as by a decoder of the web, however it is cut", () => {
  const parts = fc.array(fc.oneof(text, junk, mark), { maxLength: 6 });
  const cuts = fc.array(fc.integer({ min: 1, max: 7 }), { minLength: 1, maxLength: 5 });
  fc.assert(
    fc.property(parts, cuts, (all, lengths) => {
      const bytes = Uint8Array.from(all.flatMap((part) => [...part]));
      const reader = new Utf8Reader();
      const read: number[] = [];
      for (let at = 0, i = 0; at < bytes.length; i++) {
        const piece = bytes.slice(at, at + (lengths[i % lengths.length] ?? 1));
        read.push(...reader.read(piece));
        at += piece.length;
      }
      read.push(...reader.end());
      expect(read).toEqual([...new TextEncoder().encode(new TextDecoder().decode(bytes))]);
    }),
    { numRuns: 3000 },
  );
});

test("only event streams are read as such", () => {
  const typed = (type: string) => isEventStream(new Response("", { headers: { "content-type": type } }));
  expect(["text/event-stream", "Text/Event-Stream ; charset=utf-8"].every(typed)).toBe(true);
  expect(["application/json", "text/event-stream-x", "x text/event-stream"].some(typed)).toBe(false);
});
