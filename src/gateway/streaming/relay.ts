// The answer's body on its way to the caller, piece by piece as the caller takes it: nothing is read ahead, so a slow
// reader holds up the upstream and fills no memory. Measured on Bun 1.4.5: a stream that is pulled from waits for the
// socket to drain (59 MB after 600 MB to a reader that stops), while one of type "direct" does not; a stream that
// errors resets the connection, and the chunk that ends a body is never sent.
//
// Bun sends the end of the head only with the first bytes of the body (oven-sh/bun#33660). So an event stream
// that begins with silence opens with a comment, which event streams have for that; other answers wait. What has been
// taken from the stream is not sent before the event loop has turned, and a stream that errors earlier takes it along,
// the head too. So an answer that breaks off is held open for a moment first.
import { type Answer, isEncoded, Undecodable } from "../../http/client/answer.ts";
import { bodyChunks } from "../../http/client/body.ts";
import type { Chunks, DecodedFor } from "../../http/client/decode.ts";
import { OutboundError } from "../../http/client/outbound.ts";
import { freeMemory } from "../../wire/body.ts";
import type { ExchangeTimeouts } from "./exchange.ts";

/** How an answer ended that had a head: `broken` by the upstream or by the timeouts, `failed` by the gateway. */
export type Ended = "whole" | "broken" | "failed";

export interface RelayOptions {
  /** Of the body as it is before Content-Encoding. */
  readonly chunks: Chunks;
  readonly timeouts: ExchangeTimeouts;
  /** Whether nobody keeps a piece that has passed, so that its memory can be given back at once: Bun's server keeps none. */
  readonly arePiecesFree: boolean;
  /** Changes what passes; null for nothing. */
  readonly filter: ((chunks: Chunks) => Chunks) | null;
  /** After how much silence a comment is sent: at the start, and from then on. Null: no event stream, or no comment. */
  readonly comments: { readonly firstMs: number; readonly nextMs: number | null } | null;
  piece(bytes: Uint8Array): void;
  /** Called once. If the exchange was stopped, the timeouts' signal has the reason. A whole answer ends after this. */
  ended(how: Ended): Promise<void>;
}

/**
 * Between the break of an answer and its error, so that the bytes before it are written. One millisecond is enough,
 * except on a busy machine.
 */
const FLUSH_MS = 100;

const COMMENT = new TextEncoder().encode(":\n\n");

/** An encoded event stream that is silent for so long has its head answered anyway. */
const FIRST_WAIT_MS = 50;

export interface DecodedOptions {
  readonly timeouts: ExchangeTimeouts;
  readonly decodedFor: DecodedFor;
  readonly isEvents: boolean;
}

/**
 * The body of an answer, decoded. For an encoded body this waits for the first decoded bytes: until then the gateway
 * can still answer the caller with an error.
 *
 * @throws Undecodable; the reason of the signal
 */
export async function decodedChunks(
  response: Answer,
  { timeouts, decodedFor, isEvents }: DecodedOptions,
): Promise<Chunks> {
  const { signal } = timeouts;
  const chunks = bodyChunks(response, { maxBytes: Number.MAX_SAFE_INTEGER, signal, decodedFor });
  if (!isEncoded(response.headers)) return chunks;
  timeouts.waitFor("upstream");
  const first = nextOf(chunks);
  try {
    if (!isEvents || !(await isSilent(first, FIRST_WAIT_MS))) await first;
  } catch (error) {
    signal.throwIfAborted();
    if (error instanceof Undecodable) throw error;
  }
  return withFirst(first, chunks);
}

async function* withFirst(first: Promise<IteratorResult<Uint8Array, void>>, rest: Chunks): Chunks {
  const { done, value } = await first;
  if (done) return;
  yield value;
  yield* rest;
}

export function relayBody({
  chunks: decoded,
  arePiecesFree,
  timeouts,
  filter,
  comments,
  ...tell
}: RelayOptions): ReadableStream<Uint8Array> {
  const chunks = filter === null ? decoded : filter(decoded);
  let next: Promise<IteratorResult<Uint8Array, void>> | null = null;
  let silenceMs = comments?.firstMs ?? null;
  let passed: Uint8Array | null = null;
  let hasBegun = false;
  let isOver = false;

  async function over(how: Ended): Promise<void> {
    if (isOver) return;
    isOver = true;
    timeouts.end();
    await tell.ended(how);
  }

  /** Breaks the body off: never a clean end, and not before the bytes so far are on their way. */
  async function breakOff(controller: ReadableStreamDefaultController<Uint8Array>, how: Ended): Promise<void> {
    // Bun ends the head with the first bytes of the body, and a comment is allowed anywhere in an event stream.
    if (!hasBegun && comments !== null) controller.enqueue(COMMENT);
    hasBegun = true;
    await Promise.all([over(how), Bun.sleep(FLUSH_MS)]);
    controller.error(new Error("the answer broke off"));
  }

  /**
   * The server has written or copied a piece when it asks for the next. The collector would leave ten bodies of 10 MiB
   * lying about, and memory that is new to the process costs more than the copy into it.
   */
  function releasePassed(): void {
    if (passed !== null) freeMemory(passed);
    passed = null;
  }

  async function pull(controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> {
    releasePassed();
    if (next === null) timeouts.waitFor("upstream");
    next ??= nextOf(chunks);
    if (silenceMs !== null && (await isSilent(next, silenceMs))) {
      silenceMs = comments?.nextMs ?? null;
      hasBegun = true;
      controller.enqueue(COMMENT);
      return;
    }
    const { done, value } = await next;
    next = null;
    silenceMs = comments?.nextMs ?? null;
    if (done) {
      await over("whole");
      controller.close();
      return;
    }
    tell.piece(value);
    timeouts.waitFor("caller");
    hasBegun = true;
    controller.enqueue(value);
    if (arePiecesFree && filter === null) passed = value;
  }

  return new ReadableStream<Uint8Array>(
    {
      start(controller) {
        // Without a pull in progress nothing else would notice.
        timeouts.signal.addEventListener("abort", () => {
          // A whole answer that is being recorded still ends whole.
          if (!isOver) void breakOff(controller, "broken");
        });
      },
      async pull(controller) {
        try {
          await pull(controller);
        } catch (error) {
          await breakOff(controller, howOf(error));
        }
      },
      cancel() {
        // The caller has left, so there is nobody to tell.
        hasBegun = true;
        timeouts.stop("cancelled");
      },
    },
    { highWaterMark: 0 },
  );
}

function howOf(error: unknown): Ended {
  return error instanceof OutboundError ? "broken" : "failed";
}

function nextOf(chunks: Chunks): Promise<IteratorResult<Uint8Array, void>> {
  const next = chunks.next();
  // It may fail while nobody pulls. The timeouts report that.
  next.catch(() => {});
  return next;
}

/** Rejects as `next` does. One promise and one timer for each piece, where `Promise.race` makes several. */
function isSilent(next: Promise<unknown>, ms: number): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms, true);
    const came = () => {
      clearTimeout(timer);
      resolve(false);
    };
    next.then(came, (error) => {
      clearTimeout(timer);
      reject(error);
    });
  });
}
