import { describe, expect, test } from "bun:test";
import zlib from "node:zlib";
import {
  decodedBody,
  encoded,
  failure,
  HUGE,
  hanging,
  LIMITS,
  MIB,
  TEXT,
  zstdStream,
} from "../../../test/support/http/encoded-body.ts";
import { type DecodedFor, readBody, Undecodable } from "./body.ts";

describe("the memory of decoders", () => {
  /** Memory of which `free` bytes are left, and what was asked for. */
  function memoryOf(free: number) {
    const asked: number[] = [];
    const state = { asked, held: 0, most: 0, evict: () => {} };
    const decodedFor: DecodedFor = {
      tenant: "acme",
      async decoderMemory(bytes, signal, evict) {
        asked.push(bytes);
        state.evict = evict;
        if (state.held + bytes > free) {
          await new Promise<void>((_, reject) => {
            signal.addEventListener("abort", () => reject(signal.reason));
          });
        }
        state.held += bytes;
        state.most = Math.max(state.most, state.held);
        return () => {
          state.held -= bytes;
        };
      },
    };
    return { state, decodedFor };
  }
  const brotli = (window: number) =>
    zlib.brotliCompressSync(TEXT, { params: { [zlib.constants.BROTLI_PARAM_LGWIN]: window } });
  test("is asked for at the most that its coding may take, and given back at its end", async () => {
    for (const [encoding, data, least, most] of [
      ["gzip", zlib.gzipSync(TEXT), 32 * 1024, 256 * 1024],
      ["br", brotli(24), 16 * MIB, 21 * MIB],
      ["br", brotli(16), 65_536, 5 * MIB],
      ["zstd", await zstdStream(23), 8 * MIB, 9 * MIB],
      ["zstd", await zstdStream(10), 8 * MIB, 9 * MIB],
      ["zstd", Buffer.concat([await zstdStream(20), await zstdStream(22)]), 8 * MIB, 9 * MIB],
      // At once, though the inner one has not been seen.
      ["zstd, br", brotli(24), 24 * MIB, 30 * MIB],
    ] as const) {
      const { state, decodedFor } = memoryOf(64 * MIB);
      await readBody(encoded(data, encoding, 3), { ...LIMITS, decodedFor }).catch(() => {});
      expect([encoding, state.asked.length, state.held]).toEqual([encoding, 1, 0]);
      expect(state.asked[0]).toBeWithin(least, most);
    }
  });

  test("is waited for before anything is decoded, and the wait ends with the body", async () => {
    const { state, decodedFor } = memoryOf(0);
    const stop = new AbortController();
    const reading = failure(
      readBody(encoded(await zstdStream(23), "zstd"), { ...LIMITS, decodedFor, signal: stop.signal }),
    );
    while (state.asked.length === 0) await new Promise((resolve) => setImmediate(resolve));
    stop.abort("enough");
    expect(await reading).toBe("enough");
    const reader = decodedBody(encoded(await zstdStream(23), "zstd"), { ...LIMITS, decodedFor }).getReader();
    const pending = reader.read();
    while (state.asked.length === 1) await new Promise((resolve) => setImmediate(resolve));
    await reader.cancel();
    expect((await pending).done).toBe(true);
  });

  test("is given back when nobody reads on", async () => {
    for (const [encoding, data] of [
      ["gzip", zlib.gzipSync(new Uint8Array(MIB))],
      ["br", zlib.brotliCompressSync(new Uint8Array(MIB))],
      ["zstd", await zstdStream(23)],
    ] as const) {
      const { state, decodedFor } = memoryOf(64 * MIB);
      const stop = new AbortController();
      const reader = decodedBody(encoded(data, encoding), {
        ...HUGE,
        decodedFor,
        signal: stop.signal,
      }).getReader();
      await reader.read();
      expect(state.held).toBeGreaterThan(0);
      stop.abort("enough");
      expect([encoding, state.held]).toEqual([encoding, 0]);
    }
  });

  test("is given back as soon as others need it: the body ends there, and says so", async () => {
    const whole = await zstdStream(23);
    for (const isRead of [true, false]) {
      const { state, decodedFor } = memoryOf(64 * MIB);
      const upstream = hanging(whole, "zstd");
      const options = { ...HUGE, decodedFor };
      const reader = decodedBody(upstream.response, options).getReader();
      await reader.read();
      const next = isRead ? failure(reader.read()) : null;
      expect(state.held).toBeGreaterThan(8 * MIB);
      state.evict();
      expect([state.held, upstream.state.cancelled]).toEqual([0, 1]);
      expect(await (next ?? failure(reader.read()))).toBeInstanceOf(Undecodable);
      const polled = hanging(whole, "zstd");
      const reading = failure(readBody(polled.response, options));
      while (state.held === 0) await new Promise((resolve) => setImmediate(resolve));
      state.evict();
      expect(await reading).toBeInstanceOf(Undecodable);
      expect([state.held, polled.state.cancelled]).toEqual([0, 1]);
    }
  });
});
