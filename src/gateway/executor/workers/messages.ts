// The messages between the pool and its workers. One message per turn of the event loop each way, since the cost is per
// message, not per job.
import type { LogFields } from "../../../core/log.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import { type Batch, batchOf, itemsOf } from "./batch.ts";
import type { LoanNews, LoanRequest } from "./decoder-loans.ts";
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
  /** Of the memory of decoders. */
  | { readonly kind: "loans"; readonly news: readonly LoanNews[] }
  /** Close the sessions, then say so. */
  | { readonly kind: "close" };

export interface Result {
  readonly id: string;
  readonly outcome: Outcome;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "done"; readonly results: Batch<ResultHead> }
  | { readonly kind: "loans"; readonly requests: readonly LoanRequest[] }
  /** Its event loop was blocked. */
  | { readonly kind: "blocked"; readonly event: string; readonly fields: LogFields }
  | { readonly kind: "closed" };

/** Whether a response counts as memory of its worker until it is recorded; short ones never do. */
export function isCounted({ response }: Outcome): boolean {
  return response !== null && response.byteLength > FREE_BYTES;
}

type JobHead = Omit<Job, "body">;
type ResultHead = Pick<Result, "id"> & { readonly outcome: Omit<Outcome, "response"> };

/** Of a job's head, where JSON costs less than a clone. */
const WORDY_CHARACTERS_MIN = 1024;

/** What a tenant chooses of a job's head. */
export function charactersOf({ call: { url, headers }, credential }: JobHead): number {
  const passed = headers.reduce((sum, [name, value]) => sum + name.length + value.length, 0);
  return url.length + passed + (credential?.value.length ?? 0);
}

function isWordy(head: JobHead): boolean {
  return charactersOf(head) > WORDY_CHARACTERS_MIN;
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
