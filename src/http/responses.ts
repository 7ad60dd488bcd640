// What the service answers with: the one table of kinds of faults and HTTP statuses, short responses, and large ones.
//
// A response is held in memory until its caller takes it, and a caller that has asked on thousands of connections may take
// nothing. So a response that is too large for the kernel to take at once holds a part of its tenant's share from its
// first byte to its last, and is sent piece by piece. If there is no room for it, it is dropped, waits without holding
// anything, and is made again when there is.
//
// Measured on Bun 1.4.5: a stream is pulled when the socket has taken the last piece. It is cancelled as soon as the
// caller is gone (at once, if that was before the response), and for a HEAD. A caller that takes nothing for as long as a
// connection may be silent is gone. A stream has no length: a length that is given with it is left out.

import { Fault, type FaultKind } from "../core/fault.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairQueue, createFairShare, createLimiter, enter, type FairQueue } from "../kernel/share.ts";
import { inStoreTurns, inTurn } from "../kernel/turns.ts";

/** The one table of kinds and statuses. */
export const STATUS = {
  invalid_request: 400,
  unauthenticated: 401,
  payment_required: 402,
  denied: 403,
  /** The token lacks what the route takes. */
  forbidden: 403,
  not_found: 404,
  method_not_allowed: 405,
  conflict: 409,
  payload_too_large: 413,
  agent_not_invocable: 422,
  rate_limited: 429,
  /** Waiting does not help, so there is no `Retry-After`. */
  over_limit: 429,
  internal: 500,
  bad_gateway: 502,
  unavailable: 503,
  gateway_timeout: 504,
} as const satisfies Record<FaultKind, number>;

/** Success statuses, named so that routes need no numbers. */
export const SUCCESS = { ok: 200, created: 201, accepted: 202, empty: 204 } as const;

/** The whole answer to bytes that are no HTTP request, where no parser of ours gives one. */
export const MALFORMED_HTTP = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/** No browser may take the JSON for something that it shows or runs. */
const JSON_HEADERS = { "content-type": "application/json", "x-content-type-options": "nosniff" } as const;

type Headers_ = Readonly<Record<string, string>>;

/**
 * A short JSON response; createLargeResponses sends what may be long. `application/json` has no charset parameter (RFC
 * 8259, section 11).
 */
export function json(status: keyof typeof SUCCESS, value: unknown, headers?: Headers_): Response {
  return new Response(JSON.stringify(value), {
    status: SUCCESS[status],
    headers: { ...JSON_HEADERS, ...headers },
  });
}

/** A response of JSON that is text already, for the response that is given most. */
export function jsonText(status: keyof typeof SUCCESS, text: string, headers: Record<string, string>): Response {
  Object.assign(headers, JSON_HEADERS);
  return new Response(text, { status: SUCCESS[status], headers });
}

export function text(body: string, type: string): Response {
  return new Response(body, { headers: { "content-type": type } });
}

export function empty(): Response {
  return new Response(null, { status: SUCCESS.empty });
}

/** For a caller whose copy is still good (RFC 9110, section 15.4.5). */
export function notModified(headers: Headers_): Response {
  return new Response(null, { status: 304, headers });
}

export function faultResponse(fault: Fault): Response {
  const headers = new Headers();
  if (fault.retryAfterSeconds !== undefined) headers.set("retry-after", String(fault.retryAfterSeconds));
  if (fault.allow !== undefined) headers.set("allow", fault.allow.join(", "));
  if (fault.kind === "unauthenticated") headers.set("www-authenticate", "Bearer");
  // A challenge, or what became of one payment, is for one caller at one time.
  if (fault.kind === "payment_required") headers.set("cache-control", "no-store");
  if (fault.closesConnection) headers.set("connection", "close");
  for (const [name, value] of Object.entries(fault.answer?.headers ?? {})) headers.set(name, value);
  const status = STATUS[fault.kind];
  if (fault.kind === "unauthenticated" || fault.kind === "internal") return new Response(null, { status, headers });
  for (const [name, value] of Object.entries(JSON_HEADERS)) headers.set(name, value);
  return new Response(JSON.stringify(fault.answer?.body ?? { error: fault.message }), { status, headers });
}

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

export type LargeResponses = ReturnType<typeof createLargeResponses>;

/** The large responses that share one budget: all of a server, whose edge hands them to routes in the scope of a request. */
export function createLargeResponses({ bytesMax = MAX.responseBytes, waitMsMax = MAX.responseWaitMs } = {}) {
  const share = createFairShare({ size: bytesMax, least: 0 });
  const queue = createFairQueue(share);
  /** Lists in the making: each may have read large items before its memory is counted. */
  const begun = createLimiter({ size: MAX.listsBegun, tooMany: "too many lists are being made" });

  /** What is sent; or its weight, if there is no room for it. What was made is dropped then. */
  async function tried(room: ResponseShare, make: Make): Promise<string | ReadableStream<Uint8Array> | number> {
    const made = await make();
    if (typeof made === "string" && made.length <= SMALL_CHARACTERS) return made;
    const parts = typeof made === "string" ? { weight: made.length, pieces: piecesOf(made) } : made;
    if (room.takeNow(parts.weight)) return streamed(parts, room);
    await parts.pieces.return();
    return parts.weight;
  }

  /**
   * An answer of what `make` makes, which is called again if there was no room for it.
   *
   * @throws Fault `unavailable` when the tenant's callers leave no room for long; what `make` throws
   */
  async function respond({ tenant, request, weight = 0, ...answer }: LargeResponse, make: Make): Promise<Response> {
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
  }

  return {
    respond,
    /** An answer that is the JSON of what `look` finds. */
    respondJson: (answer: LargeResponse, look: () => Promise<unknown>): Promise<Response> =>
      respond(answer, async () => JSON.stringify(await look())),
    /**
     * A response that holds a list of items, which may be as large as callers made them. A few items are made at a time,
     * with turns of the event loop in between. A short list is sent whole; a long one is made only as fast as its caller
     * takes it, so that slow readers fill no memory.
     */
    jsonList: <T>(answer: LargeResponse, list: JsonList<T>): Promise<Response> =>
      respond(answer, () => begun(answer.tenant, () => beginningOf(answer.tenant, list))),
    /** Bytes of them now. */
    inUse: (): number => share.inUse,
  };
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
          await inTurn(room.tenant, () => {});
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

/** The memory of a long list while it is sent: a piece, and the items that were read with the last one in it. */
const LONG_WEIGHT = 512 * 1024;
/** How long items are read and made into text in one turn. */
const TURN_MS = 2;

export interface JsonList<T> {
  /** The key of the list. */
  readonly name: string;
  /** The items, one by one. It is called again when the list is made again. */
  readonly rows: () => AsyncIterable<T>;
  /** A row as it is shown. */
  readonly view: (row: T) => object;
  /** What stands beside the list. */
  readonly rest?: Readonly<Record<string, unknown>>;
}

/** Whole when it is short. */
async function beginningOf<T>(tenant: string, list: JsonList<T>): Promise<string | ResponseParts> {
  const pieces = listPieces(tenant, list);
  const first = (await pieces.next()).value ?? "";
  if (first.length >= SMALL_CHARACTERS) return { weight: LONG_WEIGHT, first, pieces };
  return first;
}

/** None but the last one is small. */
async function* listPieces<T>(
  tenant: string,
  { name, rows, view, rest = {} }: JsonList<T>,
): AsyncGenerator<string, void> {
  const iterator = rows()[Symbol.asyncIterator]();
  let text = `{${JSON.stringify(name)}:[`;
  let separator = "";
  let enough = SMALL_CHARACTERS;
  let isDone = false;

  async function takeRows(): Promise<void> {
    const until = performance.now() + TURN_MS;
    while (text.length < enough && performance.now() < until) {
      const { done, value } = await iterator.next();
      if (done) {
        isDone = true;
        return;
      }
      text += separator + JSON.stringify(view(value));
      separator = ",";
    }
  }

  try {
    while (!isDone) {
      await inStoreTurns(tenant, takeRows);
      if (text.length < enough) continue;
      yield text;
      text = "";
      enough = PIECE_CHARACTERS;
    }
    const last = JSON.stringify(rest);
    yield `${text}]${last === "{}" ? "" : ","}${last.slice(1)}`;
  } finally {
    await iterator.return?.();
  }
}
