import { describe, expect, test } from "bun:test";
import zlib from "node:zlib";
import { BodyTooLarge, decodedBody, readBody } from "./body.ts";
import { OutboundError } from "./outbound.ts";

const MIB = 1024 * 1024;
const LIMITS = { maxBytes: 8 * MIB, captureBytes: MIB };
const HUGE = { maxBytes: 1024 * MIB, captureBytes: 10 };
const TEXT = new TextEncoder().encode("tollgate ".repeat(5000));

type Encoder = (data: Uint8Array) => Uint8Array;

const ENCODERS: Array<[name: string, encode: Encoder]> = [
  ["gzip", (data) => zlib.gzipSync(data)],
  ["x-gzip", (data) => zlib.gzipSync(data)],
  ["deflate", (data) => zlib.deflateSync(data)],
  ["deflate", (data) => zlib.deflateRawSync(data)],
  ["br", (data) => zlib.brotliCompressSync(data)],
  ["zstd", (data) => zlib.zstdCompressSync(data)],
];

/** A response as `decompress: false` gives it. */
function encoded(data: Uint8Array, encoding?: string, pieceBytes = data.length): Response {
  let at = 0;
  const body = new ReadableStream<Uint8Array>({
    pull(controller) {
      if (at >= data.length) return controller.close();
      controller.enqueue(data.slice(at, at + pieceBytes));
      at += pieceBytes;
    },
  });
  return new Response(body, encoding === undefined ? {} : { headers: { "content-encoding": encoding } });
}

async function failure(work: Promise<unknown>): Promise<unknown> {
  return work.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: unknown) => error,
  );
}

function expectLost(error: unknown): void {
  expect(error).toBeInstanceOf(OutboundError);
  expect(error).toMatchObject({ kind: "lost" });
}

/** A body of which one chunk has come and no more will; `cancelled` counts the closings. */
function hanging(first: Uint8Array, encoding?: string) {
  const state = { cancelled: 0 };
  const body = new ReadableStream<Uint8Array>({
    start: (controller) => controller.enqueue(first),
    cancel: () => {
      state.cancelled++;
    },
  });
  const headers = new Headers(encoding === undefined ? {} : { "content-encoding": encoding });
  return { response: new Response(body, { headers }), state };
}

describe("decoding", () => {
  for (const [name, encode] of ENCODERS) {
    test(`${name}: sizes and bytes are those before the encoding`, async () => {
      for (const pieceBytes of [1, 7, TEXT.length]) {
        const body = await readBody(encoded(encode(TEXT), name.toUpperCase(), pieceBytes), LIMITS);
        expect(body.size).toBe(TEXT.length);
        expect(Buffer.compare(body.captured, TEXT)).toBe(0);
        expect(body.truncated || body.tooLarge).toBe(false);
      }
    });

    test(`${name}: a body that breaks off or is corrupt is lost, not short`, async () => {
      const whole = encode(TEXT);
      const cut = whole.subarray(0, whole.length - 10);
      expectLost(await failure(readBody(encoded(cut, name), LIMITS)));
      const corrupt = Uint8Array.from(whole, (value, index) => (index > 4 ? value ^ 0xff : value));
      expectLost(await failure(readBody(encoded(corrupt, name), LIMITS)));
    });

    test(`${name}: nothing at all is an empty body`, async () => {
      expect((await readBody(encoded(new Uint8Array(0), name), LIMITS)).size).toBe(0);
      expect(
        (await readBody(new Response(null, { headers: { "content-encoding": name } }), LIMITS)).size,
      ).toBe(0);
    });
  }

  test("stacked encodings are undone from the last one", async () => {
    const data = zlib.brotliCompressSync(zlib.gzipSync(TEXT));
    const body = await readBody(encoded(data, "gzip, identity, br"), LIMITS);
    expect(Buffer.compare(body.captured, TEXT)).toBe(0);
  });

  test("an unknown encoding leaves the body as it is, and so does a pile of them", async () => {
    const data = zlib.gzipSync(TEXT);
    for (const encoding of ["compress", "gzip, snappy", "snappy, gzip", Array(5).fill("gzip").join()]) {
      const body = await readBody(encoded(data, encoding), LIMITS);
      expect([encoding, Buffer.compare(body.captured, data)]).toEqual([encoding, 0]);
    }
    expect((await readBody(encoded(data, "identity"), LIMITS)).size).toBe(data.length);
  });

  test("several gzip members are one body", async () => {
    const data = Buffer.concat([zlib.gzipSync("one "), zlib.gzipSync("two")]);
    expect(Buffer.from((await readBody(encoded(data, "gzip"), LIMITS)).captured).toString()).toBe("one two");
  });
});

describe("bounds", () => {
  test("only the first bytes are kept, and the whole is counted", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const data = encoding === undefined ? TEXT : zlib.gzipSync(TEXT);
      const body = await readBody(encoded(data, encoding, 1000), { maxBytes: MIB, captureBytes: 10 });
      expect(body).toMatchObject({ size: TEXT.length, truncated: true, tooLarge: false });
      expect(Buffer.from(body.captured).toString()).toBe("tollgate t");
    }
  });

  test("a body of exactly the limits is whole, one byte more is not", async () => {
    const exact = { maxBytes: TEXT.length, captureBytes: TEXT.length };
    expect(await readBody(encoded(TEXT), exact)).toMatchObject({ truncated: false, tooLarge: false });
    const less = { maxBytes: TEXT.length - 1, captureBytes: TEXT.length - 1 };
    const over = await readBody(encoded(TEXT), less);
    expect(over).toMatchObject({ truncated: true, tooLarge: true });
    expect(over.captured.length).toBe(TEXT.length - 1);
  });

  test("a small body with its length keeps to the same bounds", async () => {
    const small = () => new Response("0123456789", { headers: { "content-length": "10" } });
    expect((await readBody(small(), LIMITS)).size).toBe(10);
    expect((await readBody(small(), { maxBytes: 10, captureBytes: 4 })).captured.length).toBe(4);
    expect(await readBody(small(), { maxBytes: 9, captureBytes: 4 })).toMatchObject({ tooLarge: true });
    expect(await readBody(small(), { maxBytes: 99, captureBytes: 0 })).toMatchObject({
      size: 10,
      truncated: true,
    });
  });

  test("beyond the limit the connection is closed at once, even while more is awaited", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const start = encoding === undefined ? TEXT : zlib.gzipSync(TEXT).subarray(0, -1);
      const { response, state } = hanging(start, encoding);
      const body = await readBody(response, { maxBytes: 100, captureBytes: 5 });
      expect(body.tooLarge).toBe(true);
      expect(state.cancelled).toBe(1);
    }
  });

  test("a body that unpacks to gigabytes is stopped in bounded memory", async () => {
    const zeros = Buffer.alloc(64 * MIB);
    const bombs: Array<[string, Uint8Array]> = [
      ["gzip", zlib.gzipSync(zeros)],
      ["br", zlib.brotliCompressSync(zeros, { params: { [zlib.constants.BROTLI_PARAM_QUALITY]: 5 } })],
      ["zstd", zlib.zstdCompressSync(zeros)],
      ["gzip, gzip", zlib.gzipSync(zlib.gzipSync(zeros))],
    ];
    zeros.fill(0, 0, 1);
    for (const [name, bomb] of bombs) {
      Bun.gc(true);
      const before = process.memoryUsage.rss();
      const body = await readBody(encoded(bomb, name), { maxBytes: 2 * MIB, captureBytes: 100 });
      expect(body).toMatchObject({ tooLarge: true, truncated: true });
      expect([name, process.memoryUsage.rss() - before < 24 * MIB]).toEqual([name, true]);
    }
  });
});

/** Skippable frames of zstd, which are nothing when decoded, in two layers of brotli. */
function hiddenBomb(bytes: number): Uint8Array {
  const frame = Buffer.alloc(MIB);
  frame.writeUInt32LE(0x184d2a50, 0);
  frame.writeUInt32LE(MIB - 8, 4);
  const quick = { params: { [zlib.constants.BROTLI_PARAM_QUALITY]: 3 } };
  const frames = Buffer.concat(Array.from({ length: bytes / MIB }, () => frame));
  return zlib.brotliCompressSync(zlib.brotliCompressSync(frames, quick));
}

describe("a bomb between two layers", () => {
  test("is stopped at the limit, though nothing of it ever comes out", async () => {
    const bomb = hiddenBomb(64 * MIB);
    expect(bomb.length).toBeLessThan(1000);
    const body = await readBody(encoded(bomb, "zstd, br, br"), { maxBytes: 4 * MIB, captureBytes: 10 });
    expect(body).toMatchObject({ size: 0, truncated: true, tooLarge: true });
    const stream = decodedBody(encoded(bomb, "zstd, br, br"), 4 * MIB);
    expect(await failure(new Response(stream).bytes())).toBeInstanceOf(BodyTooLarge);
    const fits = await readBody(encoded(bomb, "zstd, br, br"), { maxBytes: 64 * MIB, captureBytes: 10 });
    expect(fits).toMatchObject({ size: 0, truncated: false, tooLarge: false });
  });

  test("lets timers and signals through while it is unpacked", async () => {
    const bomb = hiddenBomb(256 * MIB);
    for (const work of [
      (signal: AbortSignal) => readBody(encoded(bomb, "zstd, br, br"), { ...HUGE, signal }),
      (signal: AbortSignal) =>
        decodedBody(encoded(bomb, "zstd, br, br"), HUGE.maxBytes, signal).getReader().read(),
    ]) {
      expect(await failure(work(AbortSignal.timeout(20)))).toMatchObject({ name: "TimeoutError" });
    }
  });
});

describe("signals", () => {
  test("an abort ends a hanging read with its reason and closes the connection", async () => {
    for (const encoding of [undefined, "gzip", "gzip, br"]) {
      const start = encoding === undefined ? TEXT : zlib.gzipSync(TEXT).subarray(0, 20);
      const { response, state } = hanging(start, encoding);
      const stop = new AbortController();
      const work = failure(readBody(response, { ...LIMITS, signal: stop.signal }));
      queueMicrotask(() => stop.abort("enough"));
      expect(await work).toBe("enough");
      expect(state.cancelled).toBe(1);
    }
  });

  test("a signal that is already aborted ends it before reading", async () => {
    const { response, state } = hanging(TEXT);
    expect(await failure(readBody(response, { ...LIMITS, signal: AbortSignal.abort("early") }))).toBe(
      "early",
    );
    expect(state.cancelled).toBe(1);
  });
});

describe("the decoded stream", () => {
  test("gives what came without waiting for more", async () => {
    const { Z_SYNC_FLUSH, BROTLI_OPERATION_FLUSH, ZSTD_e_flush } = zlib.constants;
    const starts: Array<[string, Uint8Array]> = [
      ["gzip", zlib.gzipSync("event: one\n\n", { finishFlush: Z_SYNC_FLUSH })],
      ["deflate", zlib.deflateSync("event: one\n\n", { finishFlush: Z_SYNC_FLUSH })],
      ["br", zlib.brotliCompressSync("event: one\n\n", { finishFlush: BROTLI_OPERATION_FLUSH })],
      ["zstd", zlib.zstdCompressSync("event: one\n\n", { finishFlush: ZSTD_e_flush })],
    ];
    for (const [encoding, start] of starts) {
      const { response, state } = hanging(start, encoding);
      const reader = decodedBody(response, LIMITS.maxBytes).getReader();
      expect([encoding, Buffer.from((await reader.read()).value!).toString()]).toEqual([
        encoding,
        "event: one\n\n",
      ]);
      await reader.cancel();
      expect(state.cancelled).toBe(1);
    }
  });

  test("closes the connection when it is cancelled while a chunk is awaited", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const { response, state } = hanging(encoding ? zlib.gzipSync("x").subarray(0, 5) : TEXT, encoding);
      const reader = decodedBody(response, LIMITS.maxBytes).getReader();
      if (encoding === undefined) await reader.read();
      const pending = reader.read();
      await reader.cancel();
      expect((await pending).done).toBe(true);
      expect(state.cancelled).toBe(1);
    }
  });

  test("ends like the body, with an error when that breaks off", async () => {
    expect(
      await new Response(
        decodedBody(encoded(zlib.zstdCompressSync(TEXT), "zstd", 50), LIMITS.maxBytes),
      ).text(),
    ).toHaveLength(TEXT.length);
    const cut = encoded(zlib.gzipSync(TEXT).subarray(0, 40), "gzip");
    expectLost(
      await failure(Bun.readableStreamToBytes(decodedBody(cut, LIMITS.maxBytes)) as Promise<Uint8Array>),
    );
    expect(await new Response(decodedBody(new Response(null), LIMITS.maxBytes)).text()).toBe("");
  });
});
