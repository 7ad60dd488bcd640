import { describe, expect, test } from "bun:test";
import zlib from "node:zlib";
import fc from "fast-check";
import {
  decodedBody,
  ENCODERS,
  encoded,
  expectLost,
  failure,
  HUGE,
  hanging,
  LIMITS,
  MIB,
  TEXT,
  zstdStream,
} from "../../../test/support/http/encoded-body.ts";
import { BodyTooLarge, readBody, Undecodable } from "./body.ts";

describe("a body that is decoded", () => {
  for (const [name, encode] of ENCODERS) {
    test(`has sizes and bytes as before its encoding: ${name}`, async () => {
      for (const pieceBytes of [1, 7, TEXT.length]) {
        const body = await readBody(encoded(encode(TEXT), name.toUpperCase(), pieceBytes), LIMITS);
        expect(body.size).toBe(TEXT.length);
        expect(Buffer.compare(body.captured, TEXT)).toBe(0);
        expect(body.tooLarge).toBe(false);
      }
    });

    test(`is lost, not short, when it breaks off or is corrupt: ${name}`, async () => {
      const whole = encode(TEXT);
      const cut = whole.subarray(0, whole.length - 10);
      expectLost(await failure(readBody(encoded(cut, name), LIMITS)));
      const corrupt = Uint8Array.from(whole, (value, index) => (index > 4 ? value ^ 0xff : value));
      expectLost(await failure(readBody(encoded(corrupt, name), LIMITS)));
    });

    test(`is empty when nothing at all came: ${name}`, async () => {
      expect((await readBody(encoded(new Uint8Array(0), name), LIMITS)).size).toBe(0);
      expect((await readBody(new Response(null, { headers: { "content-encoding": name } }), LIMITS)).size).toBe(0);
    });
  }

  test("is decoded from the last of its encodings on", async () => {
    const data = zlib.brotliCompressSync(zlib.gzipSync(TEXT));
    const body = await readBody(encoded(data, "gzip, identity, br"), LIMITS);
    expect(Buffer.compare(body.captured, TEXT)).toBe(0);
  });

  test("is decoded from what it was encoded with for its transfer, or lost when that is not known", async () => {
    const sent = async (codings: string, bytes: Uint8Array, extra: Record<string, string> = {}) => {
      const headers = { "transfer-encoding": codings, ...extra };
      return readBody(new Response(Buffer.from(bytes), { headers }), LIMITS);
    };
    for (const codings of ["gzip, chunked", "GZIP,chunked ", "x-gzip , Chunked"]) {
      expect(Buffer.compare((await sent(codings, zlib.gzipSync(TEXT))).captured, TEXT)).toBe(0);
    }
    const twice = zlib.gzipSync(zlib.brotliCompressSync(TEXT));
    expect(Buffer.compare((await sent("gzip, chunked", twice, { "content-encoding": "br" })).captured, TEXT)).toBe(0);
    expect(Buffer.compare((await sent("chunked", TEXT)).captured, TEXT)).toBe(0);
    expect(await failure(sent("frob, chunked", TEXT))).toBeInstanceOf(Undecodable);
    // Its frames end where nobody knows, so they would be taken for the body.
    for (const codings of ["chunked, gzip", "chunked, chunked", "chunked,", "gzip, chunked, "]) {
      expect(await failure(sent(codings, TEXT))).toBeInstanceOf(Undecodable);
    }
    // A list as long as a head may be is not searched.
    const long = `gzip,${" ".repeat(15_000)}x, chunked`;
    expect(await failure(sent(long, TEXT))).toBeInstanceOf(Undecodable);
  });

  test("stays as it is in an unknown encoding", async () => {
    const data = zlib.gzipSync(TEXT);
    for (const encoding of ["compress", "gzip, snappy", "snappy, gzip", "gzip, gzip, gzip, snappy"]) {
      const body = await readBody(encoded(data, encoding), LIMITS);
      expect([encoding, Buffer.compare(body.captured, data)]).toEqual([encoding, 0]);
    }
    expect((await readBody(encoded(data, "identity"), LIMITS)).size).toBe(data.length);
  });

  describe("of several zstd frames", () => {
    const { ZSTD_c_checksumFlag, ZSTD_c_contentSizeFlag, ZSTD_c_windowLog } = zlib.constants;
    const flag = fc.integer({ min: 0, max: 1 });
    const encodedFrame = (content: fc.Arbitrary<Uint8Array>) =>
      fc.record({ content, checksum: flag, size: flag, log: fc.integer({ min: 10, max: 23 }) }).map((made) => ({
        content: made.content,
        bytes: zlib.zstdCompressSync(made.content, {
          params: {
            [ZSTD_c_checksumFlag]: made.checksum,
            [ZSTD_c_contentSizeFlag]: made.size,
            [ZSTD_c_windowLog]: made.log,
          },
        }),
      }));
    const skippable = fc.record({ length: fc.nat({ max: 100 }), kind: fc.nat({ max: 15 }) }).map(({ length, kind }) => {
      const bytes = Buffer.alloc(8 + length, 7);
      bytes.writeUInt32LE(0x184d2a50 + kind, 0);
      bytes.writeUInt32LE(length, 4);
      return { content: new Uint8Array(), bytes };
    });
    const same = (most: number) => fc.nat({ max: most }).map((length) => new Uint8Array(length).fill(65));
    const mixed = (most: number) =>
      fc.nat({ max: most }).map((length) => new Uint8Array(length).map((_, at) => (at * at) % 97));
    const joined = (all: readonly Uint8Array[]) => new Uint8Array(Buffer.concat(all));

    test("is what they hold one after the other, however it is split", async () => {
      const content = fc.oneof(fc.uint8Array({ maxLength: 400 }), same(200_000), mixed(40_000));
      const frame = fc.oneof(encodedFrame(content), skippable);
      await fc.assert(
        fc.asyncProperty(fc.array(frame, { maxLength: 5 }), fc.integer({ min: 1, max: 500 }), async (frames, size) => {
          const body = await readBody(encoded(joined(frames.map(({ bytes }) => bytes)), "zstd", size), LIMITS);
          expect(Buffer.compare(body.captured, joined(frames.map(({ content }) => content)))).toBe(0);
        }),
        { numRuns: 60 },
      );
    });

    test("is lost when it breaks off within one of them, and whole at the end of each", async () => {
      const content = fc.oneof(fc.uint8Array({ maxLength: 40 }), same(300), mixed(300));
      const frame = fc.oneof(encodedFrame(content), skippable);
      await fc.assert(
        fc.asyncProperty(fc.array(frame, { minLength: 1, maxLength: 3 }), async (frames) => {
          const whole = joined(frames.map(({ bytes }) => bytes));
          const ends = new Set(frames.map((_, at) => joined(frames.slice(0, at + 1).map(({ bytes }) => bytes)).length));
          for (let length = 1; length <= whole.length; length++) {
            const reading = readBody(encoded(whole.subarray(0, length), "zstd"), LIMITS);
            if (ends.has(length)) expect((await reading).tooLarge).toBe(false);
            else expectLost(await failure(reading));
          }
        }),
        { numRuns: 40 },
      );
    });

    test("is lost when something else follows them, or a bit is set that is reserved", async () => {
      const whole = zlib.zstdCompressSync(TEXT);
      for (const bytes of [
        Buffer.concat([whole, Buffer.from("m")]),
        Buffer.concat([whole, Buffer.from("more")]),
        Buffer.concat([whole, Buffer.alloc(4)]),
        Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0b1000, 0, 1, 0, 0]),
        Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0b111, 0, 0]),
      ]) {
        expectLost(await failure(readBody(encoded(bytes, "zstd"), LIMITS)));
      }
    });
  });

  test("is one of several gzip members", async () => {
    const data = Buffer.concat([zlib.gzipSync("one "), zlib.gzipSync("two")]);
    expect(Buffer.from((await readBody(encoded(data, "gzip"), LIMITS)).captured).toString()).toBe("one two");
  });
});

describe("the limits of a body", () => {
  test("keep only the first bytes, and count the whole", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const data = encoding === undefined ? TEXT : zlib.gzipSync(TEXT);
      const body = await readBody(encoded(data, encoding, 1000), { maxBytes: MIB, captureBytes: 10 });
      expect(body).toMatchObject({ size: TEXT.length, tooLarge: false });
      expect(Buffer.from(body.captured).toString()).toBe("tollgate t");
    }
  });

  test("take a body of exactly their size whole, and not one byte more", async () => {
    const exact = { maxBytes: TEXT.length, captureBytes: TEXT.length };
    expect(await readBody(encoded(TEXT), exact)).toMatchObject({ size: TEXT.length, tooLarge: false });
    const less = { maxBytes: TEXT.length - 1, captureBytes: TEXT.length - 1 };
    const over = await readBody(encoded(TEXT), less);
    expect(over).toMatchObject({ tooLarge: true });
    expect(over.captured.length).toBe(TEXT.length - 1);
  });

  test("are the same for a small body with its length", async () => {
    const small = () => new Response("0123456789", { headers: { "content-length": "10" } });
    expect((await readBody(small(), LIMITS)).size).toBe(10);
    expect((await readBody(small(), { maxBytes: 10, captureBytes: 4 })).captured.length).toBe(4);
    expect(await readBody(small(), { maxBytes: 9, captureBytes: 4 })).toMatchObject({ tooLarge: true });
    const none = await readBody(small(), { maxBytes: 99, captureBytes: 0 });
    expect(none).toMatchObject({ size: 10, captured: new Uint8Array(), tooLarge: false });
  });

  test("close the connection at once, even while more is awaited", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const start = encoding === undefined ? TEXT : zlib.gzipSync(TEXT).subarray(0, -1);
      const { response, state } = hanging(start, encoding);
      const body = await readBody(response, { maxBytes: 100, captureBytes: 5 });
      expect(body.tooLarge).toBe(true);
      expect(state.cancelled).toBe(1);
    }
  });

  test("stop a body that unpacks to gigabytes in bounded memory", async () => {
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
      expect(body).toMatchObject({ tooLarge: true });
      expect([name, process.memoryUsage.rss() - before < 24 * MIB]).toEqual([name, true]);
    }
  });
});

describe("an encoding that is not taken", () => {
  const refused = async (data: Uint8Array, encoding: string, problem: RegExp, pieceBytes?: number) => {
    for (const read of [
      () => readBody(encoded(data, encoding, pieceBytes), LIMITS),
      () => new Response(decodedBody(encoded(data, encoding, pieceBytes), LIMITS)).bytes(),
    ]) {
      const error = await failure(read());
      expect(error).toBeInstanceOf(Undecodable);
      expect((error as Error).message).toMatch(problem);
    }
  };

  test("is a third one, zstd within zstd, or a very long list", async () => {
    const data = zlib.gzipSync(TEXT);
    await refused(data, "gzip, gzip, gzip", /more than 2 encodings/);
    await refused(data, "zstd, identity, zstd", /zstd within zstd/);
    await refused(data, Array(60).fill("gzip").join(), /a very long list/);
    const none = new Response(null, { headers: { "content-encoding": "gzip, gzip, gzip" } });
    expect((await readBody(none, LIMITS)).size).toBe(0);
  });

  test("is a zstd window above 8 MiB, in whichever frame, however it is split, and within another", async () => {
    const [small, allowed, large] = [await zstdStream(20), await zstdStream(23), await zstdStream(24)];
    expect((await readBody(encoded(allowed, "zstd"), LIMITS)).size).toBe(TEXT.length);
    for (const pieceBytes of [1, 5, 10_000]) {
      // A window of 8 MiB and an eighth, of unknown content.
      await refused(
        Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0, (13 << 3) | 1, 1, 0, 0]),
        "zstd",
        /a zstd window/,
        pieceBytes,
      );
      await refused(large, "zstd", /a zstd window/, pieceBytes);
      await refused(Buffer.concat([small, large]), "zstd", /a zstd window/, pieceBytes);
      await refused(zlib.gzipSync(large), "zstd, gzip", /a zstd window/, pieceBytes);
    }
  });

  test("is a zstd content above 8 MiB in a single segment, which is its window", async () => {
    const single = zlib.zstdCompressSync(new Uint8Array(9 * MIB), {
      params: { [zlib.constants.ZSTD_c_windowLog]: 24 },
    });
    await refused(single, "zstd", /a zstd window/);
  });

  test("is a large window of brotli", async () => {
    const { BROTLI_PARAM_LARGE_WINDOW, BROTLI_PARAM_LGWIN, BROTLI_PARAM_QUALITY } = zlib.constants;
    const large = zlib.brotliCompressSync(TEXT, {
      params: { [BROTLI_PARAM_LARGE_WINDOW]: 1, [BROTLI_PARAM_LGWIN]: 28, [BROTLI_PARAM_QUALITY]: 5 },
    });
    await refused(large, "br", /a large window of brotli/);
  });
});

describe("a small body that unpacks to a huge one between two encodings", () => {
  /** In the outer layer, as brotli. */
  const outer = (bytes: Uint8Array) =>
    zlib.brotliCompressSync(bytes, { params: { [zlib.constants.BROTLI_PARAM_QUALITY]: 3 } });

  /** Skippable frames of zstd, which are nothing when decoded. */
  function skipped(bytes: number): Buffer {
    const frame = Buffer.alloc(MIB / 4);
    frame.writeUInt32LE(0x184d2a50, 0);
    frame.writeUInt32LE(frame.length - 8, 4);
    return Buffer.concat(Array.from({ length: bytes / frame.length }, () => frame));
  }

  /** Stored blocks of gzip without content. */
  function emptyBlocks(bytes: number): Buffer {
    const header = zlib.gzipSync("").subarray(0, 10);
    const block = Buffer.from([0, 0, 0, 0xff, 0xff]);
    return Buffer.concat([header, Buffer.alloc(bytes, block)]);
  }

  test("is stopped soon when it yields nothing in the end", async () => {
    for (const [encoding, bytes] of [
      ["zstd, br", skipped(16 * MIB)],
      ["gzip, br", emptyBlocks(16 * MIB)],
    ] as const) {
      const bomb = outer(bytes);
      expect(bomb.length).toBeLessThan(1000);
      for (const work of [
        () => readBody(encoded(bomb, encoding), HUGE),
        () => new Response(decodedBody(encoded(bomb, encoding), HUGE)).bytes(),
      ]) {
        const error = await failure(work());
        expect(error).toBeInstanceOf(Undecodable);
        expect((error as Error).message).toMatch(/input for its output/);
      }
    }
    const little = Buffer.concat([skipped(MIB / 2), zlib.zstdCompressSync(TEXT)]);
    expect((await readBody(encoded(outer(little), "zstd, br"), LIMITS)).size).toBe(TEXT.length);
  });

  test("is stopped at the limit, whatever it comes to in the end", async () => {
    const bomb = outer(zlib.gzipSync(new Uint8Array(64 * MIB), { level: 0 }));
    const body = await readBody(encoded(bomb, "gzip, br"), { maxBytes: 4 * MIB, captureBytes: 10 });
    expect(body).toMatchObject({ tooLarge: true });
    const stream = decodedBody(encoded(bomb, "gzip, br"), { maxBytes: 4 * MIB });
    expect(await failure(new Response(stream).bytes())).toBeInstanceOf(BodyTooLarge);
  });

  test("lets timers and signals through while it is unpacked", async () => {
    const bomb = zlib.gzipSync(zlib.gzipSync(new Uint8Array(256 * MIB)));
    for (const work of [
      (signal: AbortSignal) => readBody(encoded(bomb, "gzip, gzip"), { ...HUGE, signal }),
      (signal: AbortSignal) => new Response(decodedBody(encoded(bomb, "gzip, gzip"), { ...HUGE, signal })).bytes(),
    ]) {
      expect(await failure(work(AbortSignal.timeout(20)))).toMatchObject({ name: "TimeoutError" });
    }
  });
});

describe("a signal to stop", () => {
  test("ends a hanging read with its reason and closes the connection", async () => {
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

  test("ends a read before it begins when it was given before", async () => {
    const { response, state } = hanging(TEXT);
    expect(await failure(readBody(response, { ...LIMITS, signal: AbortSignal.abort("early") }))).toBe("early");
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
      const reader = decodedBody(response, LIMITS).getReader();
      expect([encoding, Buffer.from((await reader.read()).value!).toString()]).toEqual([encoding, "event: one\n\n"]);
      await reader.cancel();
      expect(state.cancelled).toBe(1);
    }
  });

  test("closes the connection when it is cancelled while a chunk is awaited", async () => {
    for (const encoding of [undefined, "gzip"]) {
      const { response, state } = hanging(encoding ? zlib.gzipSync("x").subarray(0, 5) : TEXT, encoding);
      const reader = decodedBody(response, LIMITS).getReader();
      if (encoding === undefined) await reader.read();
      const pending = reader.read();
      await reader.cancel();
      expect((await pending).done).toBe(true);
      expect(state.cancelled).toBe(1);
    }
  });

  test("ends like the body, with an error when that breaks off", async () => {
    expect(
      await new Response(decodedBody(encoded(zlib.zstdCompressSync(TEXT), "zstd", 50), LIMITS)).text(),
    ).toHaveLength(TEXT.length);
    const cut = encoded(zlib.gzipSync(TEXT).subarray(0, 40), "gzip");
    expectLost(await failure(Bun.readableStreamToBytes(decodedBody(cut, LIMITS)) as Promise<Uint8Array>));
    expect(await new Response(decodedBody(new Response(null), LIMITS)).text()).toBe("");
  });
});
