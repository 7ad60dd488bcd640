// The messages between the scheduler, which owns the database, and the workers, which make the upstream calls: for each Job
// that goes in, exactly one Outcome comes back. Also how an outcome is made from what happened to the call, in its stored form.
// Messages cost by their number, not by their jobs, so each side sends at most one per turn of the event loop, with many jobs
// or outcomes: heads as one JSON text, all short bodies in one transferred buffer, long bodies transferred one by one. A
// structured clone takes twice the CPU of both threads (Bun 1.4.5: 5.3 µs instead of 2.8 for each of 30 jobs), except of heads
// with long texts, which JSON escapes slowly (60 KB full of quotes: 1 ms instead of 0.01).
import { joined } from "../../core/bytes.ts";
import type { Call } from "../../core/call.ts";
import type { LogFields } from "../../core/log.ts";
import { errorClassOf } from "../../core/states.ts";
import { MAX } from "../../kernel/limits.ts";
import { bodyOf, type CallBody, wholeOf } from "../../wire/body.ts";
import type { Ending } from "../invocations/service.ts";
import type { CallFailure } from "../upstream/failure.ts";
import { type CredentialHeader, newTrace, type Trace, traced } from "../upstream/headers.ts";

export interface Job {
  readonly id: string;
  readonly tenant: string;
  readonly agent_id: string;
  readonly call: Call;
  readonly credential: CredentialHeader | null;
  /** Jobs with the same key share an MCP session: agent, URL, credential and its version. Null for an http agent. */
  readonly session_key: string | null;
  /** When the claim was last known to hold, in epoch milliseconds, which all threads share; null if checked just now. */
  readonly claim_seen_at: number | null;
  readonly body: CallBody;
}

export interface Outcome extends Ending {
  /** For the log only: what went wrong, without any secret or body. */
  readonly detail: string | null;
  /** Nothing was sent: `claim_seen_at` was so long ago that the claim may be lost. */
  readonly is_stale?: boolean;
}

export interface WorkerSettings {
  readonly upstream_timeout_ms: number;
  readonly max_response_bytes: number;
  readonly allow_hosts: readonly string[];
  readonly deny_hosts: readonly string[];
  /** PEM of extra trusted roots. */
  readonly extra_ca: string | null;
  /** Pauses of a worker's event loop that are at least this long are logged. */
  readonly blocked_ms: number;
}

export type KeptBody = Pick<Ending, "response" | "response_truncated" | "resp_sha256">;

const NOT_STORED: KeptBody = { response: null, response_truncated: false, resp_sha256: null };

export function answered(trace: Trace, upstreamStatus: number, stored: KeptBody, now: number): Outcome {
  const errorClass = errorClassOf(upstreamStatus);
  return {
    status: errorClass === null ? "succeeded" : "failed",
    error_class: errorClass,
    error_detail: null,
    ...traced(trace, now),
    upstream_status: upstreamStatus,
    ...stored,
    detail: null,
  };
}

/** The outcome of a call without a whole response. The record keeps what is known so far, but no part of the body. */
export function failed(trace: Trace, { errorClass, errorDetail, detail }: CallFailure, now: number): Outcome {
  return {
    status: "failed",
    error_class: errorClass,
    error_detail: errorDetail,
    ...traced(trace, now),
    ...NOT_STORED,
    detail,
  };
}

/** The outcome of a call whose worker died or never got it, so that nothing is known. */
export const lostCall = (detail: string): Outcome =>
  failed(newTrace(), { errorClass: "internal", errorDetail: "process_ended", detail }, 0);

/** The outcome of a call that was ended before anything was sent. */
export const cancelledCall = (detail: string): Outcome =>
  failed(newTrace(), { errorClass: "cancelled", errorDetail: null, detail }, 0);

/** A whole response body, as the caller gets it. */
export interface WholeBody {
  /** The first bytes, at least as many as are captured. */
  readonly start: Uint8Array;
  readonly size: number;
  readonly sha256: string | null;
}

export function keep({ start, size, sha256: resp_sha256 }: WholeBody, capture: boolean): KeptBody {
  if (!capture) return { ...NOT_STORED, resp_sha256 };
  const response = start.length > MAX.capturedBytes ? start.slice(0, MAX.capturedBytes) : start;
  return { response, response_truncated: size > response.length, resp_sha256 };
}

/** Responses up to this length are short: they count as no memory of their worker. */
export const FREE_BYTES = 16 * 1024;

export interface WorkerStart {
  readonly kind: "start";
  readonly settings: WorkerSettings;
  /** How many workers share the memory for responses. */
  readonly workers: number;
}

export interface JobNews {
  readonly cancel: readonly string[];
  /** Jobs whose responses are recorded, or never will be: they no longer count as memory of the worker. */
  readonly recorded: readonly string[];
}

export type ToWorker =
  | WorkerStart
  | ({ readonly kind: "work"; readonly jobs: Batch<JobHead> } & JobNews)
  /** Asks the worker to close its MCP sessions, and then to answer `closed`. */
  | { readonly kind: "close" };

export interface Result {
  readonly id: string;
  readonly outcome: Outcome;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "done"; readonly results: Batch<ResultHead> }
  /** A line for the log, such as that the worker's event loop was blocked. */
  | { readonly kind: "log"; readonly level: "info" | "warn"; readonly event: string; readonly fields: LogFields }
  | { readonly kind: "closed" };

/** Whether a response counts as memory of its worker until it is recorded; short ones never do. */
export const isCounted = ({ response }: Outcome): boolean => (response?.byteLength ?? 0) > FREE_BYTES;

type JobHead = Omit<Job, "body">;
type ResultHead = Pick<Result, "id"> & { readonly outcome: Omit<Outcome, "response"> };

/** The length of the texts in a job's head whose length a tenant decides. */
export function charactersOf({ call: { url, headers }, credential }: JobHead): number {
  const passed = headers.reduce((sum, [name, value]) => sum + name.length + value.length, 0);
  return url.length + passed + (credential?.value.length ?? 0);
}

/** Whether cloning a job's head costs less than JSON. */
const isWordy = (head: JobHead) => charactersOf(head) > 1024;

/** @returns the buffers to transfer, too */
export function batchOfJobs(jobs: Iterable<Job>) {
  const items = Array.from(jobs, ({ body, ...head }) => ({ head, body }));
  return batchOf(items, isWordy);
}

export const jobsOf = (batch: Batch<JobHead>): Job[] =>
  itemsOf(batch).map(({ head, body }) => ({ ...head, body: body ?? new Uint8Array() }));

/** @returns the buffers to transfer, too */
export function batchOfResults(results: readonly Result[]) {
  const items = results.map(({ id, outcome: { response: body, ...outcome } }) => ({ head: { id, outcome }, body }));
  return batchOf(items, () => false);
}

export function resultsOf(batch: Batch<ResultHead>): Result[] {
  return itemsOf(batch).map(({ head: { id, outcome }, body: response }) => ({
    id,
    // A kept response is always in one piece.
    outcome: { ...outcome, response: response && wholeOf(response) },
  }));
}

export interface WithBody<Head> {
  /** Survives JSON, and a structured clone. */
  readonly head: Head;
  readonly body: CallBody | null;
}

export interface Batch<Head> {
  /** The heads as JSON, each with the length of its body, or null. */
  readonly text: string;
  /** The heads with long texts, which are cloned. */
  readonly wordy: readonly Entry<Head>[];
  readonly short: Uint8Array;
  /** The long bodies, each as its parts. */
  readonly long: readonly (readonly Uint8Array[])[];
}

type Entry<Head> = readonly [head: Head, bytes: number | null];

/** Packs items, those with long texts last. @returns `transfer`: the buffers that the sender of the batch loses */
export function batchOf<Head>(items: readonly WithBody<Head>[], isWordy: (head: Head) => boolean) {
  const plain = items.filter(({ head }) => !isWordy(head));
  const wordy = plain.length === items.length ? [] : items.filter(({ head }) => isWordy(head));
  const bodies = [...plain, ...wordy].flatMap(({ body }) => (body === null ? [] : [body]));
  const short = joined(bodies.filter((body) => body instanceof Uint8Array && !isLong(body.length)) as Uint8Array[]);
  const long = bodies.filter((body) => isLong(body.byteLength)).map(ownParts);
  const transfer = new Set([short, ...long.flat()].map(({ buffer }) => buffer as ArrayBuffer));
  const batch: Batch<Head> = { text: JSON.stringify(plain.map(entryOf)), wordy: wordy.map(entryOf), short, long };
  return { batch, transfer: [...transfer] };
}

export function itemsOf<Head>({ text, wordy, short, long }: Batch<Head>): WithBody<Head>[] {
  let at = 0;
  let longs = 0;
  return [...(JSON.parse(text) as Entry<Head>[]), ...wordy].map(([head, bytes]) => {
    if (bytes === null) return { head, body: null };
    if (isLong(bytes)) return { head, body: bodyOf(long[longs++] ?? []) };
    at += bytes;
    // Copied, so that a call that needs its body for long does not keep the bodies of the whole batch in memory.
    return { head, body: short.slice(at - bytes, at) };
  });
}

const entryOf = <Head>({ head, body }: WithBody<Head>): Entry<Head> => [head, body?.byteLength ?? null];

/** Whether transferring a body is cheaper than copying it. */
const isLong = (bytes: number) => bytes >= 64 * 1024;

/** The parts of a body, each in a buffer of its own. */
function ownParts(body: CallBody): readonly Uint8Array[] {
  if (body instanceof Uint8Array) return [detached(body)];
  return body.whole === null ? body.parts : [body.whole];
}

/** Transferring a view transfers its whole buffer, so a view on a larger buffer is copied. */
function detached(body: Uint8Array): Uint8Array {
  // `slice` of Buffer would give another view.
  return body.byteLength === body.buffer.byteLength ? body : Uint8Array.prototype.slice.call(body);
}
