// The body of a call: one piece if it is small, parts otherwise. A large body is received, stored, handed to a worker and sent
// part by part, so that no single piece of work takes long. A task that must read all of it runs on another thread, to which
// the body's memory moves without a copy.
import { createHash } from "node:crypto";
import { joined } from "../core/bytes.ts";
import { Fault } from "../core/fault.ts";
import { AT_ONCE_BYTES, type ComputeTask, compute } from "../kernel/compute.ts";
import { atOnceOrInTurn } from "../kernel/turns.ts";

/**
 * The size of a part. To store one on SQLite takes 3 ms of the event loop with its commit (measured; 32 MiB at once take 114),
 * and 32 MiB in parts take 71 ms of CPU (83 with parts of half this size). To remove a body takes half as long.
 */
export const PART_BYTES = 512 * 1024;

type BodyParts = readonly Uint8Array[];
export type CallBody = Uint8Array | LargeBody;

/** Longer ones take turns where many come in one moment, since they would block the event loop together. */
const SMALL_BYTES = 1_024;

export class LargeBody {
  readonly byteLength: number;
  /** Null while another thread has the memory, and from then on if that thread dies. */
  #parts: readonly Uint8Array[] | null = null;
  whole: Uint8Array | null = null;
  /** In lower hex; null until the first use, by an idempotency key, a payment or a receipt. */
  sha256: string | null = null;

  /** @param parts each in memory that nothing else uses. Stored parts have PART_BYTES each, except the last of a body */
  constructor(parts: readonly Uint8Array[]) {
    this.byteLength = parts.reduce((sum, part) => sum + part.byteLength, 0);
    this.#keep(parts);
  }

  /** Views of `whole`, if there is one. @throws Fault `unavailable` while another thread has the memory */
  get parts(): readonly Uint8Array[] {
    if (this.#parts === null) throw new Fault("unavailable", "the body was lost", { retryAfterSeconds: 1 });
    return this.#parts;
  }

  /** Runs the task on another thread, which has the body's memory meanwhile. @throws as `compute` does; the body is lost then */
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

/** Its output holds what it found in the body, and the body itself, in parts or in one piece. */
export type BodyTask<T> = ComputeTask<BodyParts, { readonly result: T; readonly parts: BodyParts }>;

/** A task that needs random access to a body, so it joins the parts. The body is in one piece afterwards. */
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
 * Frees a piece, unless it is a view of a larger buffer. May be called again. The garbage collector would free it later: 16 calls
 * with 10 MiB in both directions hold half as much memory thanks to this (measured).
 */
export function freeMemory(piece: Uint8Array): void {
  const { buffer, byteLength } = piece;
  if (byteLength > 0 && buffer instanceof ArrayBuffer && buffer.byteLength === byteLength) buffer.transfer(0);
}

export function freeBody(body: CallBody): void {
  if (body instanceof Uint8Array) freeMemory(body);
  else body.free();
}

/** The parts of a body as they are stored; views, if the body is in one piece. */
export const bodyPartsOf = (body: CallBody): readonly Uint8Array[] =>
  body instanceof LargeBody ? body.parts : partsOf(body);

function partsOf(bytes: Uint8Array): readonly Uint8Array[] {
  if (bytes.byteLength <= PART_BYTES) return [bytes];
  const count = Math.ceil(bytes.byteLength / PART_BYTES);
  return Array.from({ length: count }, (_, n) => bytes.subarray(n * PART_BYTES, (n + 1) * PART_BYTES));
}

export function bodyOf(parts: readonly Uint8Array[]): CallBody {
  const [first, second] = parts;
  if (first === undefined) return new Uint8Array();
  // A view of a larger buffer can't be transferred to another thread.
  const isOwn = first.byteLength === first.buffer.byteLength;
  return second === undefined && (!isOwn || first.byteLength <= AT_ONCE_BYTES) ? first : new LargeBody(parts);
}

/** At most the first `bytes` of a body, without a copy. @param bytes a multiple of PART_BYTES */
export function startOf(body: CallBody, bytes: number): CallBody {
  if (body instanceof LargeBody) return bodyOf(body.parts.slice(0, bytes / PART_BYTES));
  return body.subarray(0, bytes);
}

/** What the task finds in a body, and the body in one piece. @throws as `compute` does */
export async function judged<T>(body: CallBody, task: BodyTask<T>, tenant: string): Promise<[T, Uint8Array]> {
  if (body instanceof LargeBody) return [await body.move(task, tenant), wholeOf(body)];
  const judge = () => task.run([body]).result;
  return [body.byteLength > SMALL_BYTES ? await atOnceOrInTurn(tenant, judge) : judge(), body];
}

/** A body in one piece. Parts are joined, which copies them, so an unjudged body should not be long. */
export const wholeOf = (body: CallBody): Uint8Array =>
  body instanceof LargeBody ? (body.whole ?? joined(body.parts)) : body;

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
