// The messages between the pool and its workers. One message per turn of the event loop each way, since the cost is per
// message, not per job.
//
// A message brings many jobs or outcomes: their heads as one JSON text, the short bodies as one piece that is moved, the long
// bodies moved one by one. A structured clone of the same items takes twice the CPU of both threads (measured on Bun 1.4.5:
// 5.3 µs instead of 2.8 for each of 30 jobs). Long texts are cloned all the same: that takes a fraction of what JSON takes
// (60 KB full of quotes: 0.01 ms instead of 1).
import { joined } from "../../../core/bytes.ts";
import type { LogFields } from "../../../core/log.ts";
import { bodyOf, type CallBody } from "../../../wire/body.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import { FREE_BYTES } from "./response-memory.ts";

export interface WorkerStart {
  readonly kind: "start";
  readonly settings: WorkerSettings;
  /** Among how many workers the memory for answers is shared. */
  readonly workers: number;
}

/** News for a worker about its jobs. */
export interface News {
  readonly cancel: readonly string[];
  /** Their responses, which count as memory of the worker, are recorded, or never will be. */
  readonly recorded: readonly string[];
}

export type ToWorker =
  | WorkerStart
  | ({ readonly kind: "work"; readonly jobs: Batch<JobHead> } & News)
  /** Close the sessions, then say so. */
  | { readonly kind: "close" };

export interface Result {
  readonly id: string;
  readonly outcome: Outcome;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "done"; readonly results: Batch<ResultHead> }
  /** Its event loop was blocked. */
  | { readonly kind: "blocked"; readonly event: string; readonly fields: LogFields }
  | { readonly kind: "closed" };

/** Whether a response counts as memory of its worker until it is recorded; short ones never do. */
export function isCounted({ response }: Outcome): boolean {
  return response !== null && response.byteLength > FREE_BYTES;
}

type JobHead = Omit<Job, "body">;
type ResultHead = Pick<Result, "id"> & { readonly outcome: Omit<Outcome, "response"> };

/** What a tenant chooses of a job's head. */
export function charactersOf({ call: { url, headers }, credential }: JobHead): number {
  const passed = headers.reduce((sum, [name, value]) => sum + name.length + value.length, 0);
  return url.length + passed + (credential?.value.length ?? 0);
}

function isWordy(head: JobHead): boolean {
  // From here on a clone of a job's head costs less than JSON.
  return charactersOf(head) > 1024;
}

/** @returns the buffers to transfer, too */
export function batchOfJobs(jobs: Iterable<Job>) {
  return batchOf(
    Array.from(jobs, ({ body, ...head }) => ({ head, body })),
    isWordy,
  );
}

export function jobsOf(batch: Batch<JobHead>): Job[] {
  return itemsOf(batch).map(({ head, body }) => ({ ...head, body: body ?? new Uint8Array() }));
}

/** @returns the buffers to transfer, too */
export function batchOfResults(results: readonly Result[]) {
  return batchOf(
    results.map(({ id, outcome: { response: body, ...outcome } }) => ({ head: { id, outcome }, body })),
    () => false,
  );
}

export function resultsOf(batch: Batch<ResultHead>): Result[] {
  return itemsOf(batch).map(({ head: { id, outcome }, body: response }) => ({
    id,
    // What is kept of a response is in one piece.
    outcome: { ...outcome, response: response as Uint8Array | null },
  }));
}

export interface WithBody<Head> {
  /** Survives JSON, and a structured clone. */
  readonly head: Head;
  readonly body: CallBody | null;
}

/** Many items with heads of one sort. */
export interface Batch<Head> {
  /** The heads as JSON, each with the length of its body, or null. */
  readonly text: string;
  /** The heads with long texts, which are cloned. */
  readonly wordy: readonly Entry<Head>[];
  readonly short: Uint8Array;
  /** The long bodies, by their parts. */
  readonly long: readonly (readonly Uint8Array[])[];
}

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
  const short = joined(bodies.filter((body) => body instanceof Uint8Array && !isLong(body.length)) as Uint8Array[]);
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
  // From here on moving a body beats copying it.
  return bytes >= 64 * 1024;
}

/** The parts of a body in memory of their own. */
function ownParts(body: CallBody): readonly Uint8Array[] {
  if (body instanceof Uint8Array) return [detached(body)];
  return body.whole === null ? body.parts : [body.whole];
}

/** Moving a view moves its whole buffer, so a view on a larger buffer is copied. */
function detached(body: Uint8Array): Uint8Array {
  // Of a Buffer, its own `slice` would be another view.
  return body.byteLength === body.buffer.byteLength ? body : Uint8Array.prototype.slice.call(body);
}
