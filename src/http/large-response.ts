// Answers that callers are taking. An answer is held in memory until its caller takes it, and a caller that has asked on
// thousands of connections may take nothing. So an answer that is too large for the kernel to take at once holds a part of
// its tenant's share from its first byte to its last, and is sent piece by piece. If there is no room for it, it is
// dropped, waits without holding anything, and is made again when there is.
//
// Measured on Bun 1.4.5: a stream is pulled when the socket has taken the last piece. It is cancelled as soon as the
// caller is gone (at once, if that was before the answer), and for a HEAD. A caller that takes nothing for as long as a
// connection may be silent is gone. A stream has no length: a length that is given with it is left out.
//
// One per thread, since the share bounds the memory of all routes together.
import { createFairQueue, enter, type FairQueue } from "../concurrency/fair-queue.ts";
import { createFairShare } from "../concurrency/fair-share.ts";
import { doneInTurns } from "../concurrency/turns.ts";
import { Fault } from "../core/fault.ts";
import { ANSWER_BYTES_MAX, ANSWER_WAIT_MS_MAX } from "../core/limits.ts";
import { JSON_HEADERS, SUCCESS } from "./answers.ts";

/** An answer up to this size is sent whole, with its length, and is not counted: the kernel's buffer takes it. */
export const SMALL_CHARACTERS = 16 * 1024;
export const PIECE_CHARACTERS = 64 * 1024;

type ResponsePiece = string | Uint8Array;

/** What is sent, made as it is taken. */
export interface ResponseParts {
  /** The memory that it holds meanwhile. */
  readonly weight: number;
  /** The part that is made already. */
  readonly first?: string;
  readonly pieces: Generator<ResponsePiece, void> | AsyncGenerator<ResponsePiece, void>;
}

export interface LargeResponse {
  /** Whose share it counts to. */
  readonly tenant: string;
  /** Whose signal ends the wait. */
  readonly request: Pick<Request, "signal">;
  readonly status?: keyof typeof SUCCESS;
  readonly type?: string;
  /** Beside its type. */
  readonly headers?: Readonly<Record<string, string>>;
  /** What is known of its weight before it is made. */
  readonly weight?: number;
}

/** Makes JSON or another text; or parts, if it is held in another form than text. */
export type Make = () => Promise<string | ResponseParts>;

/**
 * An answer of what `make` makes, which is called again if there was no room for it.
 *
 * @throws Fault `unavailable` when the tenant's callers leave no room for long; what `make` throws
 */
export type RespondLarge = (answer: LargeResponse, make: Make) => Promise<Response>;

export interface LargeResponsesOptions {
  readonly bytesMax: number;
  readonly waitMsMax: number;
}

export function createLargeResponses({ bytesMax, waitMsMax }: LargeResponsesOptions): RespondLarge {
  const queue = createFairQueue(createFairShare({ size: bytesMax, least: 0 }));

  /** What is sent; or its weight, if there is no room for it. What was made is dropped then. */
  async function tried(room: ResponseShare, make: Make): Promise<string | ReadableStream<Uint8Array> | number> {
    const made = await make();
    if (typeof made === "string" && made.length <= SMALL_CHARACTERS) return made;
    const parts = typeof made === "string" ? { weight: made.length, pieces: piecesOf(made) } : made;
    if (room.takeNow(parts.weight)) return streamed(parts, room);
    await parts.pieces.return();
    return parts.weight;
  }

  return async ({ tenant, request, weight = 0, ...answer }, make) => {
    const { status = "ok", type = "application/json", headers } = answer;
    const room = new ResponseShare(queue, tenant, () =>
      AbortSignal.any([request.signal, AbortSignal.timeout(waitMsMax)]),
    );
    try {
      let body: Awaited<ReturnType<typeof tried>> = weight > SMALL_CHARACTERS ? weight : await tried(room, make);
      while (typeof body === "number") {
        await room.wait(body);
        body = await tried(room, make);
      }
      if (typeof body === "string") room.leave();
      return new Response(body, {
        status: SUCCESS[status],
        headers: { ...JSON_HEADERS, ...headers, "content-type": type },
      });
    } catch (error) {
      room.leave();
      throw error;
    }
  };
}

export const respondLarge = createLargeResponses({
  bytesMax: ANSWER_BYTES_MAX,
  waitMsMax: ANSWER_WAIT_MS_MAX,
});

/** An answer that is the JSON of what `look` finds. */
export function respondJson(answer: LargeResponse, look: () => Promise<unknown>): Promise<Response> {
  return respondLarge(answer, async () => JSON.stringify(await look()));
}

/** The part of the share that one answer holds. */
class ResponseShare {
  readonly tenant: string;
  readonly #queue: FairQueue;
  readonly #patience: () => AbortSignal;
  #held = 0;

  /** @param patience begins with a wait, which its signal ends */
  constructor(queue: FairQueue, tenant: string, patience: () => AbortSignal) {
    this.#queue = queue;
    this.tenant = tenant;
    this.#patience = patience;
  }

  /** Holds so much from now on, if there is room for it. */
  takeNow(weight: number): boolean {
    const more = weight - this.#held;
    if (more > 0 && !this.#queue.takeNow(this.tenant, null, more)) return false;
    if (more < 0) this.#queue.giveBack(this.tenant, null, -more);
    this.#held = weight;
    return true;
  }

  /** Holds so much when this resolves. @throws Fault `unavailable` */
  async wait(weight: number): Promise<void> {
    if (this.takeNow(weight)) return;
    const wanted = { tenant: this.tenant, agent: null, amount: weight - this.#held };
    try {
      await enter(this.#queue, wanted, this.#patience());
    } catch (cause) {
      const tooMany = "too many answers are being taken slowly";
      throw new Fault("unavailable", tooMany, { retryAfterSeconds: 1, cause });
    }
    this.#held = weight;
  }

  leave(): void {
    this.takeNow(0);
  }
}

/** Sends each piece in its turn: a socket may take all of a long answer at once, and thousands may begin together. */
function streamed({ first, pieces }: ResponseParts, room: ResponseShare): ReadableStream<Uint8Array> {
  return new ReadableStream<Uint8Array>(
    {
      start(controller) {
        if (first !== undefined) controller.enqueue(Buffer.from(first));
      },
      async pull(controller) {
        try {
          await doneInTurns(() => false, room.tenant);
          const { done, value } = await pieces.next();
          if (!done) return controller.enqueue(Buffer.from(value));
          room.leave();
          controller.close();
        } catch (error) {
          room.leave();
          throw error;
        }
      },
      async cancel() {
        room.leave();
        await pieces.return();
      },
    },
    { highWaterMark: 0 },
  );
}

export function* piecesOfBytes(bytes: Uint8Array): Generator<Uint8Array, void> {
  for (let at = 0; at < bytes.length; at += PIECE_CHARACTERS) yield bytes.subarray(at, at + PIECE_CHARACTERS);
}

/** None of them ends in the middle of a character. */
export function* piecesOf(text: string): Generator<string, void> {
  for (let at = 0; at < text.length; ) {
    const end = at + PIECE_CHARACTERS;
    const isSplit = end < text.length && (text.charCodeAt(end - 1) & 0xfc00) === 0xd800;
    const piece = text.slice(at, isSplit ? end - 1 : end);
    yield piece;
    at += piece.length;
  }
}
