import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { errorClassOf } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import { bodyPartsOf, type CallBody, LargeBody, PART_BYTES, wholeOf } from "../../wire/body.ts";
import { newTrace, noteHead } from "../upstream/headers.ts";
import { answered, batchOf, failed, itemsOf, keep, lostCall, type WithBody } from "./job.ts";

const HASH = "ab".repeat(32);

describe("an answered call", () => {
  test("succeeds below 400 and fails by class above", () => {
    const classes = [200, 202, 204, 301, 304, 399, 400, 404, 499, 500, 503, 599].map(errorClassOf);
    expect(classes.slice(0, 6)).toEqual([null, null, null, null, null, null]);
    expect(classes.slice(6, 9)).toEqual(["upstream_4xx", "upstream_4xx", "upstream_4xx"]);
    expect(classes.slice(9)).toEqual(["upstream_5xx", "upstream_5xx", "upstream_5xx"]);
  });

  test("tells status, whole size, type and time", () => {
    const trace = newTrace();
    trace.dialled_at = 100;
    noteHead(trace, new Response("", { status: 418, headers: { "content-type": "text/x; a=b" } }));
    trace.resp_size = 7;
    const stored = keep({ start: new Uint8Array(), size: 7, sha256: HASH }, false);
    expect(answered(trace, 418, stored, 112.4)).toEqual({
      status: "failed",
      error_class: "upstream_4xx",
      error_detail: null,
      upstream_status: 418,
      latency_ms: 12,
      resp_size: 7,
      resp_sha256: HASH,
      response: null,
      response_truncated: false,
      response_content_type: "text/x; a=b",
      detail: null,
    });
  });
});

describe("a call without a whole answer", () => {
  test("keeps what was known", () => {
    const trace = newTrace();
    trace.dialled_at = 1;
    noteHead(trace, new Response("", { status: 200 }));
    const failure = { errorClass: "timeout", errorDetail: "deadline", detail: "late" } as const;
    expect(failed(trace, failure, 5)).toMatchObject({
      status: "failed",
      error_class: "timeout",
      error_detail: "deadline",
      detail: "late",
      upstream_status: 200,
      latency_ms: 4,
      resp_sha256: null,
      response: null,
    });
  });

  test("has no numbers when nothing was dialled", () => {
    expect(lostCall("gone")).toMatchObject({
      status: "failed",
      error_class: "internal",
      error_detail: "process_ended",
      upstream_status: null,
      latency_ms: null,
      resp_size: null,
      detail: "gone",
    });
  });
});

describe("the captured start of a body", () => {
  test("is the whole body up to the limit", () => {
    const body = new Uint8Array(MAX.capturedBytes);
    expect(keep({ start: body, size: body.length, sha256: HASH }, true)).toEqual({
      response: body,
      response_truncated: false,
      resp_sha256: HASH,
    });
  });

  test("is cut at the limit, and says so", () => {
    const start = new Uint8Array(MAX.capturedBytes + 32);
    const stored = keep({ start, size: 5_000_000, sha256: null }, true);
    expect(stored.response?.length).toBe(MAX.capturedBytes);
    expect(stored.response_truncated).toBe(true);
  });
});

const LONG = 64 * 1024;

const partOf = (size: number) => new Uint8Array(size < 8 ? PART_BYTES : size).fill(size);
const bytesOf = (body: CallBody | null) => (body === null ? null : Buffer.concat(bodyPartsOf(body)));

const anyBody = fc.oneof(
  fc.constant(null),
  fc.uint8Array({ maxLength: 40 }),
  fc.constantFrom(LONG - 1, LONG, LONG + 1).map((length) => new Uint8Array(length).fill(7)),
  // A view on a larger buffer.
  fc.constantFrom(3, LONG).map((length) => new Uint8Array(2 * LONG).fill(9).subarray(5, 5 + length)),
  fc.constantFrom(1, LONG, PART_BYTES).map((last) => new LargeBody([3, 4, last].map(partOf))),
  fc.constantFrom(LONG, PART_BYTES).map((last) => new LargeBody([partOf(5 + last)])),
);

const anyItem: fc.Arbitrary<WithBody<{ id: string; size: number | null }>> = fc.record({
  head: fc.record({ id: fc.string({ unit: "binary" }), size: fc.option(fc.integer()) }),
  body: anyBody,
});

test("messages that are posted in a batch arrive as they were, those with long texts last, and take nothing else along", () => {
  fc.assert(
    fc.property(fc.array(anyItem, { maxLength: 12 }), (items) => {
      const copies = items
        .toSorted((a, b) => Number(a.head.size === null) - Number(b.head.size === null))
        .map(({ head, body }) => ({ head, body: bytesOf(body) }));
      const { batch, transfer } = batchOf(items, ({ size }) => size === null);
      const arrived = itemsOf(structuredClone(batch, { transfer }));
      expect(arrived.map(({ head, body }) => ({ head, body: bytesOf(body) }))).toEqual(copies);
      for (const part of arrived.flatMap(({ body }) =>
        body instanceof LargeBody && body.whole === null
          ? body.parts
          : [body === null ? new Uint8Array() : wholeOf(body)],
      )) {
        expect(part.buffer.byteLength).toBe(part.byteLength);
      }
    }),
  );
});
