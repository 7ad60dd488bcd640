// One message between threads for many items with a body: the heads as one JSON text, the short bodies as one piece
// that is moved, the long bodies moved one by one. A structured clone of the same items takes twice the CPU of both
// threads (measured on Bun 1.4.5: 5.3 µs instead of 2.8 for each of 30 jobs). Long texts are cloned all the
// same: that takes a fraction of what JSON takes (60 KB full of quotes: 0.01 ms instead of 1).

import { bodyOf, type CallBody } from "../../../wire/body.ts";

export interface WithBody<Head> {
  /** Survives JSON, and a structured clone. */
  readonly head: Head;
  readonly body: CallBody | null;
}

/** Of one sort of heads. */
export interface Batch<Head> {
  /** Of the heads, each with the length of its body, or null. */
  readonly text: string;
  /** The same for heads with long texts. */
  readonly wordy: readonly Entry<Head>[];
  readonly short: Uint8Array;
  /** By their parts. */
  readonly long: readonly (readonly Uint8Array[])[];
}

/** From here on moving a body beats copying it. */
const LONG_BYTES_MIN = 64 * 1024;

type Entry<Head> = readonly [head: Head, bytes: number | null];

/**
 * Items whose heads have long texts come last.
 *
 * @returns `transfer`: what is unusable to the sender from when the batch is posted
 */
export function batchOf<Head>(
  items: readonly WithBody<Head>[],
  isWordy: (head: Head) => boolean,
): { batch: Batch<Head>; transfer: ArrayBuffer[] } {
  const plain = items.filter(({ head }) => !isWordy(head));
  const wordy = plain.length === items.length ? [] : items.filter(({ head }) => isWordy(head));
  const bodies = [...plain, ...wordy].flatMap(({ body }) => (body === null ? [] : [body]));
  const short = join(bodies.filter((body) => body instanceof Uint8Array && !isLong(body.length)) as Uint8Array[]);
  const long = bodies.filter((body) => isLong(body.byteLength)).map(ownParts);
  const transfer = new Set([short, ...long.flat()].map(({ buffer }) => buffer as ArrayBuffer));
  const batch = { text: JSON.stringify(plain.map(entryOf)), wordy: wordy.map(entryOf), short, long };
  return { batch, transfer: [...transfer] };
}

export function itemsOf<Head>({ text, wordy, short, long }: Batch<Head>): WithBody<Head>[] {
  let at = 0;
  let longs = 0;
  return [...(JSON.parse(text) as Entry<Head>[]), ...wordy].map(([head, bytes]) => {
    if (bytes === null) return { head, body: null };
    if (isLong(bytes)) return { head, body: bodyOf(long[longs++] ?? []) };
    at += bytes;
    // Copied, so that a call that needs its body for long does not keep the bodies of all others in memory.
    return { head, body: short.slice(at - bytes, at) };
  });
}

function entryOf<Head>({ head, body }: WithBody<Head>): Entry<Head> {
  return [head, body === null ? null : body.byteLength];
}

function isLong(bytes: number): boolean {
  return bytes >= LONG_BYTES_MIN;
}

function join(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** In memory of their own. */
function ownParts(body: CallBody): readonly Uint8Array[] {
  if (body instanceof Uint8Array) return [detached(body)];
  return body.whole === null ? body.parts : [body.whole];
}

/** Moving a view moves its whole buffer, so a view on a larger buffer is copied. */
function detached(body: Uint8Array): Uint8Array {
  // Of a Buffer, its own `slice` would be another view.
  return body.byteLength === body.buffer.byteLength ? body : Uint8Array.prototype.slice.call(body);
}
