import { afterEach, describe, expect, test } from "bun:test";
import { startUpstream, type Upstream } from "../../../../test/support/http/upstream.ts";
import { client, keep, LIST, stopKept, text } from "../../../../test/support/mcp/mcp-calls.ts";
import { ResponseMemory } from "../call.ts";

afterEach(stopKept);

describe("an event stream", () => {
  function streaming(chunks: readonly (string | Uint8Array)[], end = true): Upstream {
    return keep(
      startUpstream(() => {
        const encoder = new TextEncoder();
        const body = new ReadableStream({
          async start(controller) {
            for (const chunk of chunks) {
              controller.enqueue(typeof chunk === "string" ? encoder.encode(chunk) : chunk);
              await Bun.sleep(0);
            }
            if (end) controller.close();
          },
        });
        return new Response(body, { headers: { "content-type": "text/event-stream; charset=utf-8" } });
      }),
    );
  }
  const RESULT = '{"jsonrpc":"2.0","id":1,"result":{"t":"é€😀"}}';

  test("is closed as soon as the response has come", async () => {
    const closed = Promise.withResolvers<void>();
    const upstream = keep(
      startUpstream((request) => {
        request.signal.addEventListener("abort", () => closed.resolve());
        const body = new ReadableStream({
          start: (controller) => controller.enqueue(`data: ${RESULT}\n\ndata: more\n\n`),
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
      }),
    );
    const outcome = await client().send(upstream.url, LIST);
    expect(text(outcome)).toBe(RESULT);
    await closed.promise;
  });

  test("is still an answer when its last blank line is missing", async () => {
    expect(text(await client().send(streaming([`data: ${RESULT}\n`]).url, LIST))).toBe(RESULT);
  });

  test("ends the call as internal when it ends without the response", async () => {
    const other = 'data: {"jsonrpc":"2.0","id":2,"result":{}}\n\n';
    expect(await client().send(streaming([other]).url, LIST)).toMatchObject({
      status: "failed",
      error_class: "internal",
      upstream_status: 200,
      resp_size: other.length,
      response: null,
    });
  });

  test("ends the call when it never ends and never answers: as internal at the size limit, as timeout at the deadline", async () => {
    const noise = `data: ${"x".repeat(5000)}\n\n`;
    const big = streaming([noise, noise, noise], false);
    expect(await client({ max_response_bytes: 12_000 }).send(big.url, LIST)).toMatchObject({
      error_class: "internal",
      upstream_status: 200,
    });
    const silent = streaming([": hello\n\n"], false);
    expect(await client({ upstream_timeout_ms: 60 }).send(silent.url, LIST)).toMatchObject({
      error_class: "timeout",
      upstream_status: 200,
      resp_size: 9,
    });
  });

  test("is cut to the captured MiB like any answer", async () => {
    const long = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { t: "y".repeat(1_500_000) } });
    const outcome = await client().send(streaming([`data: ${long}\n\n`]).url, LIST);
    expect(outcome).toMatchObject({ status: "succeeded", response_truncated: true });
    expect(text(outcome)).toBe(long.slice(0, 1_048_576));
  });

  test("keeps no other call waiting when it never ends its event, however many there are", async () => {
    const memory = new ResponseMemory(4);
    const part = `"${"y".repeat(500_000)}",`;
    const allBegun = Promise.withResolvers<void>();
    let [begun, taken] = [0, 0];
    const endless = keep(
      startUpstream(() => {
        const parts = ['data: {"jsonrpc":"2.0","id":1,"result":[', part, part, part, part];
        if (++begun === 40) allBegun.resolve();
        const body = new ReadableStream({
          pull(controller) {
            const next = parts.shift();
            taken++;
            return next === undefined ? new Promise(() => {}) : controller.enqueue(next);
          },
        });
        return new Response(body, { headers: { "content-type": "text/event-stream" } });
      }),
    );
    const stop = new AbortController();
    const greedy = client({}, memory);
    const hung = Array.from({ length: 40 }, (_, i) =>
      greedy.send(endless.url, LIST, { tenant: "greedy", agent_id: `agt_${i % 9}` }, stop),
    );
    await allBegun.promise;
    // How much of them the kernel takes for who does not read on depends on the machine: until nothing more is taken.
    for (let before = -1; before !== taken; await Bun.sleep(100)) before = taken;
    const long = JSON.stringify({ jsonrpc: "2.0", id: 1, result: { t: "y".repeat(2_000_000) } });
    const other = await client({}, memory).send(streaming([`data: ${long}\n\n`]).url, LIST);
    expect(other).toMatchObject({ status: "succeeded", response_truncated: true });
    stop.abort("cancelled");
    expect(new Set((await Promise.all(hung)).map(({ status }) => status))).toEqual(new Set(["failed"]));
  });
});
