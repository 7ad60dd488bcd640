// Encoded bodies of answers, and how reading them fails.
import { expect } from "bun:test";
import zlib from "node:zlib";
import { bodyChunks } from "../../../src/http/client/body.ts";
import { OutboundError } from "../../../src/http/client/exchange.ts";

export const MIB = 1024 * 1024;
export const LIMITS = { maxBytes: 8 * MIB, captureBytes: MIB };
export const HUGE = { maxBytes: 1024 * MIB, captureBytes: 10 };
export const TEXT = new TextEncoder().encode("tollgate ".repeat(5000));

type Encoder = (data: Uint8Array) => Uint8Array;

export const ENCODERS: Array<[name: string, encode: Encoder]> = [
  ["gzip", (data) => zlib.gzipSync(data)],
  ["x-gzip", (data) => zlib.gzipSync(data)],
  ["deflate", (data) => zlib.deflateSync(data)],
  ["deflate", (data) => zlib.deflateRawSync(data)],
  ["br", (data) => zlib.brotliCompressSync(data)],
  ["zstd", (data) => zlib.zstdCompressSync(data)],
];

/** A response as `decompress: false` gives it. */
export function encoded(data: Uint8Array, encoding?: string, pieceBytes = data.length): Response {
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

/** Of unknown length, so that its window is as large as this says. */
export async function zstdStream(windowLog: number): Promise<Uint8Array> {
  const encoder = zlib.createZstdCompress({ params: { [zlib.constants.ZSTD_c_windowLog]: windowLog } });
  encoder.write(TEXT);
  encoder.end();
  return Buffer.concat(await encoder.toArray());
}

/** The decoded body as a stream; to cancel it leaves the body. */
export function decodedBody(...[response, options]: Parameters<typeof bodyChunks>): ReadableStream<Uint8Array> {
  const chunks = bodyChunks(response, options);
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { done, value } = await chunks.next();
        if (done) controller.close();
        else controller.enqueue(value);
      },
      cancel: () => void chunks.return?.(),
    },
    { highWaterMark: 0 },
  );
}

export async function failure(work: Promise<unknown>): Promise<unknown> {
  return work.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: unknown) => error,
  );
}

export function expectLost(error: unknown): void {
  expect(error).toBeInstanceOf(OutboundError);
  expect(error).toMatchObject({ kind: "lost" });
}

/** A body of which one chunk has come and no more will; `cancelled` counts the closings. */
export function hanging(first: Uint8Array, encoding?: string) {
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
