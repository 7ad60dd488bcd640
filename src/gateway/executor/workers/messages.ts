// What the pool and its workers say to each other. One message per turn each way: the cost of a message is per
// message, not per job.
import type { LogFields } from "../../../core/log.ts";
import type { Job, Outcome, WorkerSettings } from "../job.ts";
import type { LoanNews, LoanRequests } from "./decoder-loans.ts";
import { FREE_BYTES } from "./response-memory.ts";

export interface WorkerStart {
  readonly kind: "start";
  readonly settings: WorkerSettings;
  /** Among how many workers the memory for answers is shared. */
  readonly workers: number;
}

/** What a worker is told of jobs that it has. */
export interface News {
  readonly cancel: readonly string[];
  /** Their long responses are recorded, or never will be. */
  readonly recorded: readonly string[];
}

export type ToWorker =
  | WorkerStart
  | ({ readonly kind: "work"; readonly jobs: readonly Job[] } & News)
  /** Of the memory of decoders. */
  | { readonly kind: "loans"; readonly news: LoanNews }
  /** Close the sessions, then say so. */
  | { readonly kind: "close" };

export interface Result {
  readonly id: string;
  readonly outcome: Outcome;
}

export type FromWorker =
  | { readonly kind: "ready" }
  | { readonly kind: "done"; readonly results: readonly Result[] }
  | { readonly kind: "loans"; readonly requests: LoanRequests }
  /** Its event loop was held. */
  | { readonly kind: "blocked"; readonly event: string; readonly fields: LogFields }
  | { readonly kind: "closed" };

/** Whether a response counts as memory of its worker until it is recorded; short ones never do. */
export function isCounted({ response }: Outcome): boolean {
  return response !== null && response.byteLength > FREE_BYTES;
}

/** From here on moving a buffer beats copying it. */
const TRANSFER_BYTES_MIN = 64 * 1024;

/** A body as it can be posted: a view on a larger buffer would take all of that with it. */
export function detached(body: Uint8Array): Uint8Array {
  return body.byteLength === body.buffer.byteLength ? body : body.slice();
}

/** The buffers worth moving, each once. They are unusable to the sender afterwards. */
export function transferable(bodies: Iterable<Uint8Array | null>): ArrayBuffer[] {
  const buffers = new Set<ArrayBuffer>();
  for (const body of bodies) {
    if (body === null || body.byteLength < TRANSFER_BYTES_MIN) continue;
    if (body.buffer instanceof ArrayBuffer) buffers.add(body.buffer);
  }
  return [...buffers];
}
