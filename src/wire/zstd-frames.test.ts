import { describe, expect, test } from "bun:test";
import zlib from "node:zlib";
import fc from "fast-check";
import { NotZstd, ZstdFrames } from "./zstd-frames.ts";

const { ZSTD_c_checksumFlag, ZSTD_c_contentSizeFlag, ZSTD_c_windowLog, ZSTD_e_end } = zlib.constants;

/** What is known of a body that comes in these chunks. */
function read(chunks: Iterable<Uint8Array>) {
  const frames = new ZstdFrames();
  const windows: number[] = [];
  const passed: Uint8Array[] = [];
  for (const chunk of chunks) {
    for (const part of frames.parts(chunk)) {
      if (part.kind === "frame") windows.push(part.windowBytes);
      else passed.push(part.bytes);
    }
  }
  return { windows, passed: new Uint8Array(Buffer.concat(passed)), isWhole: frames.isBetweenFrames };
}

function* split(bytes: Uint8Array, size: number) {
  for (let at = 0; at < bytes.length; at += size) yield bytes.subarray(at, at + size);
}

function skippable(length: number, magic = 0x184d2a50): Buffer {
  const frame = Buffer.alloc(8 + length, 7);
  frame.writeUInt32LE(magic, 0);
  frame.writeUInt32LE(length, 4);
  return frame;
}

/** A frame as a stream of unknown length is written. */
async function streamed(content: Uint8Array, params: Record<number, number>): Promise<Uint8Array<ArrayBuffer>> {
  const encoder = zlib.createZstdCompress({ params });
  encoder.write(content);
  encoder.end();
  return new Uint8Array(Buffer.concat(await encoder.toArray()));
}

/** One with this content size, which is its window, of one empty block. */
function singleSegment(fieldBytes: 1 | 2 | 4 | 8, size: bigint): Uint8Array<ArrayBuffer> {
  const flag = { 1: 0, 2: 1, 4: 2, 8: 3 }[fieldBytes];
  const field = Buffer.alloc(8);
  field.writeBigUInt64LE(size);
  return Uint8Array.from([0x28, 0xb5, 0x2f, 0xfd, (flag << 6) | 0x20, ...field.subarray(0, fieldBytes), 1, 0, 0]);
}

describe("the window of a zstd frame", () => {
  test("is told before any of its bytes", () => {
    const [first, second] = [...new ZstdFrames().parts(zlib.zstdCompressSync(Buffer.alloc(1000)))];
    expect(first).toEqual({ kind: "frame", windowBytes: 1000 });
    expect(second?.kind).toBe("bytes");
  });

  test.each([10, 17, 20, 23, 24, 27])("is read of a stream with a window log of %d", async (log) => {
    const body = await streamed(Buffer.alloc(1000, 1), { [ZSTD_c_windowLog]: log });
    expect(read([body])).toEqual({ windows: [2 ** log], passed: body, isWhole: true });
  });

  test("is the content of a single segment, in every length of that field", () => {
    for (const [bytes, size, window] of [
      [1, 200n, 200],
      [2, 0n, 256],
      [2, 65_535n, 65_791],
      [4, 0x8000_0000n, 0x8000_0000],
      [8, 0x1_0000_0001n, 0x1_0000_0001],
      [8, 0xffff_ffff_ffff_ffffn, 2 ** 64],
    ] as const) {
      const body = singleSegment(bytes, size);
      expect(read(split(body, 1))).toEqual({ windows: [window], passed: body, isWhole: true });
    }
  });

  test("is read with its eighths, and with a dictionary's ID before the content size", () => {
    const [magic, last] = [
      [0x28, 0xb5, 0x2f, 0xfd],
      [1, 0, 0],
    ];
    expect(read([Buffer.from([...magic, 0b0000_0000, (13 << 3) | 5, ...last])]).windows).toEqual([
      2 ** 23 + 5 * 2 ** 20,
    ]);
    expect(read([Buffer.from([...magic, 0b1010_0010, 9, 9, 0, 0, 1, 0, ...last])]).windows).toEqual([65_536]);
  });
});

describe("the zstd frames of a body", () => {
  const frame = fc.record({
    // Blocks that repeat, that do not compress, and that are compressed.
    content: fc.oneof(
      fc.uint8Array({ maxLength: 400 }),
      fc.nat({ max: 300_000 }).map((length) => new Uint8Array(length).fill(65)),
      fc.nat({ max: 40_000 }).map((length) => new Uint8Array(length).map((_, at) => (at * at) % 97)),
    ),
    checksum: fc.integer({ min: 0, max: 1 }),
    size: fc.integer({ min: 0, max: 1 }),
    log: fc.integer({ min: 10, max: 23 }),
    before: fc.option(fc.record({ length: fc.nat({ max: 100 }), kind: fc.nat({ max: 15 }) })),
  });

  test("are followed over all that zstd writes, however it is split", () => {
    fc.assert(
      fc.property(fc.array(frame, { maxLength: 5 }), fc.integer({ min: 1, max: 500 }), (list, size) => {
        const encoded = list.map(({ content, checksum, size, log }) =>
          zlib.zstdCompressSync(content, {
            params: {
              [ZSTD_c_checksumFlag]: checksum,
              [ZSTD_c_contentSizeFlag]: size,
              [ZSTD_c_windowLog]: log,
            },
          }),
        );
        const body = Buffer.concat(
          list.flatMap(({ before }, at) => [
            ...(before === null ? [] : [skippable(before.length, 0x184d2a50 + before.kind)]),
            encoded[at] ?? Buffer.alloc(0),
          ]),
        );
        const { windows, passed, isWhole } = read(split(body, size));
        expect(isWhole).toBe(true);
        expect(windows).toHaveLength(list.length);
        expect(Buffer.compare(passed, Buffer.concat(encoded))).toBe(0);
        for (const [at, { content, log }] of list.entries()) {
          expect(windows[at]).toBeLessThanOrEqual(Math.max(2 ** log, content.length, 1024));
        }
      }),
      { numRuns: 60 },
    );
  });

  test("are not over in the middle of one", () => {
    const whole = Buffer.concat([
      skippable(3),
      zlib.zstdCompressSync(Buffer.from("tollgate"), {
        finishFlush: ZSTD_e_end,
        params: { [ZSTD_c_checksumFlag]: 1 },
      }),
      skippable(0),
    ]);
    const ends = new Set([0, skippable(3).length, whole.length - skippable(0).length, whole.length]);
    for (let length = 0; length <= whole.length; length++) {
      expect([length, read(split(whole.subarray(0, length), 4)).isWhole]).toEqual([length, ends.has(length)]);
    }
  });

  test("are told from anything else, which is refused", () => {
    const frame = zlib.zstdCompressSync(Buffer.from("tollgate"));
    for (const bytes of [
      zlib.gzipSync("tollgate"),
      Buffer.concat([frame, Buffer.from("more")]),
      Buffer.concat([frame, Buffer.alloc(4)]),
      // A reserved bit, and a block of the reserved type.
      Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0b1000, 0, 1, 0, 0]),
      Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0b111, 0, 0]),
    ]) {
      expect(() => read([bytes])).toThrow(NotZstd);
    }
  });
});
