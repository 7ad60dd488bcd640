import { describe, expect, test } from "bun:test";
import { errorClassOf } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import { answered, failed, keep, lostCall, newTrace, noteHead } from "./job.ts";

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
    expect(failed(trace, "timeout", "deadline", 5)).toMatchObject({
      status: "failed",
      error_class: "timeout",
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
