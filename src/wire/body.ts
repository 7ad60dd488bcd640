// The body of a call: one piece while it is small, parts otherwise. A large one is gathered, stored, handed to a worker
// and sent part by part, so that no piece of work takes all of it. What has to look at all of it is done on another thread,
// to which its memory moves without a copy.

import { createHash } from "node:crypto";
import { joined } from "../core/bytes.ts";
import { Fault } from "../core/fault.ts";
import { AT_ONCE_BYTES, type ComputeTask, compute } from "../kernel/compute.ts";
import { inTurn } from "../kernel/turns.ts";

/**
 * Of a part, and the most that is in one piece. On SQLite to store one takes 3 ms of the event loop with its commit
 * (measured; 32 MiB at once 114), and 32 MiB take 71 ms of CPU, with half of this 83; to remove them, half the time.
 */
export const PART_BYTES = 512 * 1024;

export type CallBody = Uint8Array | LargeBody;

/** A body up to this size is judged at once. Many longer ones at once would be too much for one turn. */
const SMALL_BYTES = 16_384;

export class LargeBody {
  readonly byteLength: number;
  /** Null while another thread has the memory, and from then on if that thread dies. */
  #parts: readonly Uint8Array[] | null = null;
  whole: Uint8Array | null = null;
  /** In lower hex. Hashed once, when idempotency key, payment or receipt asks for it first. */
  sha256: string | null = null;

  /**
   * @param parts in their order; in memory of their own. Those that are stored are of PART_BYTES each, but for the last of a
   *   body
   */
  constructor(parts: readonly Uint8Array[]) {
    this.byteLength = parts.reduce((sum, part) => sum + part.byteLength, 0);
    this.#keep(parts);
  }

  /** Views of the whole, once somebody has asked for that. @throws Fault `unavailable` while another thread has the memory */
  get parts(): readonly Uint8Array[] {
    if (this.#parts === null) throw new Fault("unavailable", "the body was lost", { retryAfterSeconds: 1 });
    return this.#parts;
  }

  /** Does the task on another thread, to which the body moves for so long. @throws as `compute` does; then the body is lost */
  async move<T>(task: BodyTask<T>, tenant: string): Promise<T> {
    const moved = this.whole === null ? this.parts : [this.whole];
    [this.#parts, this.whole] = [null, null];
    const { result, parts } = await compute(task, moved, { tenant, bytes: this.byteLength, moved });
    this.#keep(parts);
    return result;
  }

  #keep(parts: readonly Uint8Array[]): void {
    const [first, second] = parts;
    this.whole = second === undefined ? (first ?? null) : null;
    this.#parts = this.whole === null ? parts : partsOf(this.whole);
  }

  free(): void {
    for (const piece of this.whole === null ? (this.#parts ?? []) : [this.whole]) freeMemory(piece);
  }
}

/** What is found in a body, and the body as it is afterwards: in parts, or whole. */
export type BodyTask<T> = ComputeTask<
  readonly Uint8Array[],
  { readonly result: T; readonly parts: readonly Uint8Array[] }
>;

/** For what reads here and there in a body, which is in one piece afterwards. */
export function wholeBodyTask<T>(name: string, judge: (bytes: Uint8Array) => T): BodyTask<T> {
  return {
    name,
    run(parts) {
      const [only = new Uint8Array(), second] = parts;
      const whole = second === undefined ? only : joined(parts);
      if (second !== undefined) for (const part of parts) freeMemory(part);
      return { result: judge(whole), parts: [whole] };
    },
    moved: ({ parts }) => parts,
  };
}

/**
 * Gives back the memory of a piece that nobody needs any more, unless it is part of something larger. May be called again.
 * The garbage collector would be late, and memory that is new to the process costs more than a copy into it: with this, 16
 * calls with 10 MiB both ways hold half as much.
 */
export function freeMemory(piece: Uint8Array): void {
  const { buffer, byteLength } = piece;
  if (byteLength > 0 && buffer instanceof ArrayBuffer && buffer.byteLength === byteLength) buffer.transfer(0);
}

export function freeBody(body: CallBody): void {
  if (body instanceof Uint8Array) freeMemory(body);
  else body.free();
}

/** The parts of a body as they are stored; of one in a single piece, views of it. */
export function bodyPartsOf(body: CallBody): readonly Uint8Array[] {
  return body instanceof LargeBody ? body.parts : partsOf(body);
}

function partsOf(bytes: Uint8Array): readonly Uint8Array[] {
  if (bytes.byteLength <= PART_BYTES) return [bytes];
  const count = Math.ceil(bytes.byteLength / PART_BYTES);
  return Array.from({ length: count }, (_, n) => bytes.subarray(n * PART_BYTES, (n + 1) * PART_BYTES));
}

export function bodyOf(parts: readonly Uint8Array[]): CallBody {
  const [first, second] = parts;
  if (first === undefined) return new Uint8Array();
  // A view can't move.
  const isOwn = first.byteLength === first.buffer.byteLength;
  return second === undefined && (!isOwn || first.byteLength <= AT_ONCE_BYTES) ? first : new LargeBody(parts);
}

/** No more than its first `bytes`, which are whole parts; it shares the memory of the body. */
export function startOf(body: CallBody, bytes: number): CallBody {
  if (body instanceof LargeBody) return bodyOf(body.parts.slice(0, bytes / PART_BYTES));
  return body.subarray(0, bytes);
}

/** What the task finds in a body, and all of that in one piece. @throws as `compute` does */
export async function judged<T>(body: CallBody, task: BodyTask<T>, tenant: string): Promise<[T, Uint8Array]> {
  if (body instanceof LargeBody) return [await body.move(task, tenant), wholeOf(body)];
  const judge = () => task.run([body]).result;
  return [body.byteLength > SMALL_BYTES ? await inTurn(tenant, judge) : judge(), body];
}

/** All of a body in one piece. It is copied if nobody has judged it yet, so it should not be long. */
export function wholeOf(body: CallBody): Uint8Array {
  return body instanceof LargeBody ? (body.whole ?? joined(body.parts)) : body;
}

export const SHA256: BodyTask<string> = {
  name: "sha256",
  run(parts) {
    const hash = createHash("sha256");
    for (const part of parts) hash.update(part);
    return { result: hash.digest("hex"), parts };
  },
  moved: ({ parts }) => parts,
};

/** The SHA-256 of a body, in lower hex. Its bytes must not change afterwards. */
export async function hashOf(body: CallBody, tenant: string): Promise<string> {
  if (!(body instanceof LargeBody)) return SHA256.run([body]).result;
  body.sha256 ??= await body.move(SHA256, tenant);
  return body.sha256;
}
