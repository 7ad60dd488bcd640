// Builds all responses: the one table of Fault kinds and HTTP statuses, short responses, and large ones.
//
// A response stays in memory until its caller has read it, and a caller with thousands of connections may read nothing. So a
// response that does not fit into the kernel's send buffer is charged to its tenant's share from its first byte to its last,
// and is sent piece by piece. If there is no room for it, it is dropped, waits without memory, and is made again later.
//
// Measured on Bun 1.4.5: a stream is pulled when the socket has taken the last piece. It is cancelled as soon as the
// caller is gone (at once, if that was before the response), and for a HEAD. A caller that reads nothing counts as gone after
// the idle timeout of its connection. A stream has no length: a Content-Length that is given with it is left out.
import { Fault, type FaultKind } from "../core/fault.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairQueue, createFairShare, createLimiter, enter, type FairQueue } from "../kernel/share.ts";
import { inStoreTurns, inTurn } from "../kernel/turns.ts";
import { untilFirst } from "../kernel/wait.ts";

export const STATUS = {
  invalid_request: 400,
  unauthenticated: 401,
  payment_required: 402,
  denied: 403,
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

/** The response to bytes that are not an HTTP request, as it goes on the wire. */
export const MALFORMED_HTTP = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/** `nosniff` keeps browsers from rendering or running the JSON as something else. */
const JSON_HEADERS = { "content-type": "application/json", "x-content-type-options": "nosniff" } as const;

type ResponseHeaders = Readonly<Record<string, string>>;

/** A short JSON response; long ones use createLargeResponses. `application/json` has no charset (RFC 8259, section 11). */
export const json = (status: keyof typeof SUCCESS, value: unknown, headers?: ResponseHeaders): Response =>
  new Response(JSON.stringify(value), { status: SUCCESS[status], headers: { ...JSON_HEADERS, ...headers } });

/** A response of JSON that is text already, for the most frequent response. It adds its headers to `headers` in place. */
export function jsonText(status: keyof typeof SUCCESS, text: string, headers: Record<string, string>): Response {
  Object.assign(headers, JSON_HEADERS);
  return new Response(text, { status: SUCCESS[status], headers });
}

export const text = (body: string, type: string): Response => new Response(body, { headers: { "content-type": type } });

export const empty = (): Response => new Response(null, { status: SUCCESS.empty });

/** The response to a caller whose cached copy is current (RFC 9110, section 15.4.5). */
export const notModified = (headers: ResponseHeaders): Response => new Response(null, { status: 304, headers });

export function faultResponse(fault: Fault): Response {
  const headers = new Headers();
  if (fault.retryAfterSeconds !== undefined) headers.set("retry-after", String(fault.retryAfterSeconds));
  if (fault.allow !== undefined) headers.set("allow", fault.allow.join(", "));
  if (fault.kind === "unauthenticated") headers.set("www-authenticate", "Bearer");
  // A challenge, or the outcome of one payment, is meant for one caller at one time.
  if (fault.kind === "payment_required") headers.set("cache-control", "no-store");
  if (fault.closesConnection) headers.set("connection", "close");
  for (const [name, value] of Object.entries(fault.answer?.headers ?? {})) headers.set(name, value);
  const status = STATUS[fault.kind];
  if (fault.kind === "unauthenticated" || fault.kind === "internal") return new Response(null, { status, headers });
  const body = fault.answer?.body ?? { error: fault.message };
  if (typeof body === "string") return new Response(body, { status, headers });
  for (const [name, value] of Object.entries(JSON_HEADERS)) headers.set(name, value);
  return new Response(JSON.stringify(body), { status, headers });
}

/** A response up to this size is sent whole, with its length, and is not charged: it fits into the kernel's send buffer. */
export const SMALL_CHARACTERS = 16 * 1024;
export const PIECE_CHARACTERS = 64 * 1024;

type ResponsePiece = string | Uint8Array;

/** A response body whose pieces are made as the caller reads them. */
export interface ResponseParts {
  /** The memory that it needs while it is sent. */
  readonly weight: number;
  /** The part that has been made already. */
  readonly first?: string;
  readonly pieces: Generator<ResponsePiece, void> | AsyncGenerator<ResponsePiece, void>;
}

export interface LargeResponse {
  readonly tenant: string;
  /** The request, whose signal ends the wait for room. */
  readonly request: Pick<Request, "signal">;
  readonly status?: keyof typeof SUCCESS;
  readonly type?: string;
  /** Headers in addition to the content type. */
  readonly headers?: ResponseHeaders;
  /** The memory that the body will need, if it is known before it is made. */
  readonly weight?: number;
}

/** Makes the body: a text, or parts if it is not held as text. It may be called again. */
export type Make = () => Promise<string | ResponseParts>;

export type LargeResponses = ReturnType<typeof createLargeResponses>;

/** Large responses that share one memory budget: all those of a server, whose edge passes this to routes in their scope. */
export function createLargeResponses({ bytesMax = MAX.responseBytes, waitMsMax = MAX.responseWaitMs } = {}) {
  const share = createFairShare({ size: bytesMax, least: 0 });
  const queue = createFairQueue(share);
  /** Limits lists that are being begun: each may have read large items before its memory is charged. */
  const begun = createLimiter({ size: MAX.listsBegun, tooMany: "too many lists are being made" });

  /** The body; or its weight if there is no room for it, in which case the body is dropped. */
  async function tryMake(room: ResponseShare, make: Make): Promise<string | ReadableStream<Uint8Array> | number> {
    const made = await make();
    if (typeof made === "string" && made.length <= SMALL_CHARACTERS) return made;
    const parts = typeof made === "string" ? { weight: made.length, pieces: piecesOf(made) } : made;
    if (room.takeNow(parts.weight)) return streamed(parts, room);
    await parts.pieces.return();
    return parts.weight;
  }

  /** @throws Fault `unavailable` when the tenant's callers leave no room for long; what `make` throws */
  async function respond({ tenant, request, weight = 0, ...rest }: LargeResponse, make: Make): Promise<Response> {
    const { status = "ok", type = "application/json", headers } = rest;
    const room = shareFor(queue, tenant, request, waitMsMax);
    try {
      let body: Awaited<ReturnType<typeof tryMake>> = weight > SMALL_CHARACTERS ? weight : await tryMake(room, make);
      while (typeof body === "number") {
        await room.wait(body);
        body = await tryMake(room, make);
      }
      if (typeof body === "string") room.leave();
      const sent = { ...JSON_HEADERS, ...headers, "content-type": type };
      return new Response(body, { status: SUCCESS[status], headers: sent });
    } catch (error) {
      room.leave();
      throw error;
    }
  }

  return {
    respond,
    /** A response with the JSON of the value that `read` resolves with. */
    respondJson: (response: LargeResponse, read: () => Promise<unknown>): Promise<Response> =>
      respond(response, async () => JSON.stringify(await read())),
    /**
     * A response with a list of items, each as large as its author made it, a few of which are made in a turn of the event loop. A
     * long list is made only as fast as its caller reads it, so that slow readers fill no memory.
     */
    jsonList: <T>(response: LargeResponse, list: JsonList<T>): Promise<Response> =>
      respond(response, () => begun(response.tenant, () => beginningOf(response.tenant, list))),
    inUse: (): number => share.inUse,
  };
}

type ResponseShare = ReturnType<typeof shareFor>;

/** The part of its tenant's share that one response holds. */
function shareFor(queue: FairQueue, tenant: string, request: LargeResponse["request"], waitMsMax: number) {
  let held = 0;

  /** Changes the share to `weight` if there is room for it. */
  function takeNow(weight: number): boolean {
    const more = weight - held;
    if (more > 0 && !queue.takeNow(tenant, null, more)) return false;
    if (more < 0) queue.giveBack(tenant, null, -more);
    held = weight;
    return true;
  }

  return {
    tenant,
    takeNow,
    /** Waits until the share can be changed to `weight`. @throws Fault `unavailable` when that takes too long */
    async wait(weight: number): Promise<void> {
      if (takeNow(weight)) return;
      const wanted = { tenant, agent: null, amount: weight - held };
      try {
        await untilFirst([request.signal], async (end) => enter(queue, wanted, end), waitMsMax);
      } catch (cause) {
        const detail = { retryAfterSeconds: 1, cause };
        throw new Fault("unavailable", "too many responses are being read slowly", detail);
      }
      held = weight;
    },
    leave: (): void => void takeNow(0),
  };
}

/** Makes each piece in a turn of its own: a socket may take a long response at once, and thousands may begin together. */
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

/** Pieces of the text, none of which ends inside a surrogate pair. */
export function* piecesOf(text: string): Generator<string, void> {
  for (let at = 0; at < text.length; ) {
    const end = at + PIECE_CHARACTERS;
    const isSplit = end < text.length && (text.charCodeAt(end - 1) & 0xfc00) === 0xd800;
    const piece = text.slice(at, isSplit ? end - 1 : end);
    yield piece;
    at += piece.length;
  }
}

/** The memory of a long list while it is sent: one piece of text, and the batch of items that was read last. */
const LONG_WEIGHT = 512 * 1024;
/** How long items are read and serialised in one turn of the event loop. */
const TURN_MS = 2;

export interface JsonList<T> {
  readonly name: string;
  /** The items. Called again when the list is made again. */
  readonly rows: () => AsyncIterable<T>;
  readonly view: (row: T) => object;
  readonly rest?: Readonly<Record<string, unknown>>;
}

/** The whole text of a short list; the first piece and the others for a long one. */
async function beginningOf<T>(tenant: string, list: JsonList<T>): Promise<string | ResponseParts> {
  const pieces = listPieces(tenant, list);
  const first = (await pieces.next()).value ?? "";
  return first.length < SMALL_CHARACTERS ? first : { weight: LONG_WEIGHT, first, pieces };
}

/** The text of the list in pieces, of which only the last may be small. */
async function* listPieces<T>(tenant: string, list: JsonList<T>): AsyncGenerator<string, void> {
  const { name, rows, view, rest = {} } = list;
  const iterator = rows()[Symbol.asyncIterator]();
  let text = `{${JSON.stringify(name)}:[`;
  let separator = "";
  let enough = SMALL_CHARACTERS;
  let isDone = false;

  async function takeRows(): Promise<void> {
    const until = performance.now() + TURN_MS;
    while (text.length < enough && performance.now() < until) {
      const { done, value } = await iterator.next();
      isDone = done === true;
      if (isDone) return;
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
