// Reads the response of an MCP server piece by piece. Its body is one message, or an event stream, which is read up to the
// response to our request and then closed; the progress, notifications and requests before that are dropped. AnswerReader says
// whether a message is the response, and gives its captured start, length and SHA-256, all with the caller's id in place of
// the id on the wire. Only the captured start is kept, however long the message is.
import { createHash, type Hash } from "node:crypto";
import { BodyTooLarge, bodyChunks, type Chunks } from "../../../http/client/body.ts";
import type { Answer } from "../../../http/client/exchange.ts";
import { inTurn } from "../../../kernel/turns.ts";
import { EventStreamReader, Utf8Reader } from "../../../wire/event-stream.ts";
import { followedKeys, JsonFollower, type Member, type MemberHandler } from "../../../wire/json-follower.ts";
import { ID_TEXT_BYTES_MAX, isSameId, splice } from "../../../wire/jsonrpc.ts";
import { CallError } from "../../upstream/failure.ts";
import { type CallContext, tooLarge } from "../call.ts";
import type { WholeBody } from "../job.ts";

export interface AnswerOptions {
  /** The JSON-RPC id as it was sent, and as the caller gave it; JSON text both. */
  readonly wireId: string;
  readonly callerId: Uint8Array;
  /** How many bytes of the message's start to keep; may be 0. */
  readonly captureBytes: number;
  readonly isHashed: boolean;
  /** Whether to drop messages that turn out to be requests or notifications. */
  readonly dropsOthers: boolean;
}

export interface RpcAnswer {
  /** The error code; null for a result. */
  readonly code: number | null;
}

/** Buffers grow to these sizes and then to `keptMax`, so that the memory in use is the memory that is counted. */
const BUFFER_STEPS = [1024, 16 * 1024, 256 * 1024];

const FOLLOWED = {
  top: followedKeys("id", "method", "error"),
  outerKey: "error",
  inner: followedKeys("code"),
  textBytesMax: ID_TEXT_BYTES_MAX,
};

const NOTHING = new Uint8Array();

const decoder = new TextDecoder();

/** Hashes a text with its id replaced, in one pass. If the text has several ids, the last one counts. */
class ReplacedIdHash {
  /** The hash with the id as it came. */
  readonly #plain = createHash("sha256");
  /** The hash of the text before the id that is being read. */
  #before: Hash | null = null;
  /** The hash with the last id replaced. That id's member may still turn out to be malformed. */
  #candidate: Hash | null = null;
  /** The hash with the last id replaced whose member was whole. */
  #replaced: Hash | null = null;

  update(bytes: Uint8Array): void {
    for (const hash of [this.#plain, this.#candidate, this.#replaced]) hash?.update(bytes);
  }

  idBegins(): void {
    this.#candidate = null;
    this.#before = this.#plain.copy();
  }

  /** @param replacement null where the id stays */
  idEnds(replacement: Uint8Array | null): void {
    this.#candidate = replacement === null ? null : (this.#before?.update(replacement) ?? null);
    this.#before = null;
  }

  idCounts(): void {
    [this.#replaced, this.#candidate] = [this.#candidate, null];
  }

  of(isAnswer: boolean): string {
    return ((isAnswer ? this.#replaced : null) ?? this.#plain).digest("hex");
  }
}

export class AnswerReader implements MemberHandler {
  readonly #options: AnswerOptions;
  #keptMax: number;
  readonly #hash: ReplacedIdHash | null;
  readonly #follower: JsonFollower;
  #kept: Uint8Array = NOTHING;
  #keptBytes = 0;
  #size = 0;
  #piece: Uint8Array = NOTHING;
  #hashedBytes = 0;
  #id: Member | null = null;
  #isRequest = false;
  #isError = false;
  #code = Number.NaN;

  constructor(options: AnswerOptions) {
    const { captureBytes, isHashed } = options;
    this.#options = options;
    // The id on the wire may be longer than the caller's.
    this.#keptMax = captureBytes === 0 ? 0 : captureBytes + ID_TEXT_BYTES_MAX;
    this.#hash = isHashed ? new ReplacedIdHash() : null;
    this.#follower = new JsonFollower(FOLLOWED, this);
  }

  /** How many bytes will be kept after `bytes` more. */
  keptAfter(bytes: number): number {
    return Math.min(this.#keptBytes + bytes, this.#keptMax);
  }

  /** @param bytes may be overwritten after this call */
  push(bytes: Uint8Array): void {
    this.#piece = bytes;
    if (!this.#follower.isOver) this.#follower.feed(bytes);
    this.#hashUpTo(this.#size + bytes.length);
    this.#piece = NOTHING;
    this.#size += bytes.length;
    this.#keep(bytes);
  }

  /**
   * What the message says about our request; null for notifications, requests and responses to other requests. An error with a
   * null id counts as ours, since the server could not read the id. A message that breaks off is judged as far as it came.
   */
  answer(): RpcAnswer | null {
    const text = this.#id?.text ?? null;
    if (text === null || this.#isRequest) return null;
    if (!isSameId(text, this.#options.wireId, this.#isError)) return null;
    return { code: this.#isError ? this.#code : null };
  }

  /** The message so far, as the caller gets it: with the id replaced if this is the response. */
  body(): WholeBody {
    const id = this.answer() === null ? null : this.#id;
    const replacement = id === null ? null : this.#replacementOf(id);
    const kept = this.#kept.subarray(0, this.#keptBytes);
    const sha256 = this.#hash?.of(id !== null) ?? null;
    if (id === null || replacement === null) return { start: kept, size: this.#size, sha256 };
    const size = this.#size + replacement.length - (id.end - id.start);
    return { start: id.end <= kept.length ? splice(kept, id, replacement) : kept, size, sha256 };
  }

  #keep(bytes: Uint8Array): void {
    const part = bytes.subarray(0, this.#keptMax - this.#keptBytes);
    if (part.length === 0) return;
    const size = this.#keptBytes + part.length;
    if (size > this.#kept.length) {
      const step = BUFFER_STEPS.find((each) => each >= size) ?? this.#keptMax;
      const larger = new Uint8Array(Math.min(step, this.#keptMax));
      larger.set(this.#kept.subarray(0, this.#keptBytes));
      this.#kept = larger;
    }
    this.#kept.set(part, this.#keptBytes);
    this.#keptBytes = size;
  }

  #hashUpTo(size: number): void {
    if (this.#hash === null) return;
    this.#hash.update(this.#piece.subarray(this.#hashedBytes - this.#size, size - this.#size));
    this.#hashedBytes = size;
  }

  comes(key: string): void {
    if (key === "error") this.#code = Number.NaN;
  }

  begins(key: string, at: number): void {
    if (key !== "id" || this.#hash === null) return;
    this.#hashUpTo(at);
    this.#hash.idBegins();
  }

  ends(member: Member): void {
    if (member.path[0] !== "id" || this.#hash === null) return;
    this.#hashUpTo(member.end);
    this.#hash.idEnds(this.#replacementOf(member));
  }

  whole(member: Member): void {
    const [key, inner] = member.path;
    if (inner !== undefined) this.#code = Number(member.text ?? Number.NaN);
    else if (key === "error") this.#isError = true;
    else if (key === "method") {
      this.#isRequest = true;
      if (this.#options.dropsOthers) [this.#kept, this.#keptBytes, this.#keptMax] = [NOTHING, 0, 0];
    } else {
      this.#id = member;
      this.#hash?.idCounts();
    }
  }

  /** The replacement for this id if it is the one that we sent; null if it stays. */
  #replacementOf({ text }: Member): Uint8Array | null {
    const { wireId, callerId } = this.#options;
    if (text === null || text === "null" || text === decoder.decode(callerId)) return null;
    return isSameId(text, wireId, false) ? callerId : null;
  }
}

/** Bytes that are read without a pause, which takes a millisecond or two at most. */
const SLICE_BYTES = 8 * 1024;

/** The bytes with which the JSON text of an object can begin: a brace, or white space. */
const OBJECT_STARTS = new Set(new TextEncoder().encode("{ \n\r\t"));

/** Reads a body that is one message, whether that is the response or not. */
export async function readMessage(context: CallContext, response: Answer, options: AnswerOptions) {
  const { settings, trace, hold } = context;
  const message = new AnswerReader(options);
  let size = 0;
  for await (const piece of piecesOf(context, response)) {
    size += piece.length;
    if (size > settings.max_response_bytes) {
      trace.resp_size = size;
      throw tooLarge(settings);
    }
    await inSlices(piece, hold.tenant, async (slice) => {
      await hold.grow(message.keptAfter(slice.length));
      return () => message.push(slice);
    });
  }
  trace.resp_size = size;
  return message;
}

/**
 * Reads an event stream up to the response to our request.
 * @throws CallError `internal` when the stream ends without the response or is too large
 * @throws OutboundError when the connection is lost
 */
export async function readStreamAnswer(context: CallContext, response: Answer, options: AnswerOptions) {
  const { settings, trace, hold } = context;
  // An event stream is always UTF-8: invalid bytes are replaced.
  const utf8 = new Utf8Reader();
  let message: AnswerReader | null = null;
  let isOther = false;
  let answer: AnswerReader | null = null;
  const events = new EventStreamReader({
    data(bytes) {
      if (answer !== null || isOther) return;
      // Skips events that can't be messages.
      isOther = message === null && !OBJECT_STARTS.has(bytes[0] ?? 0);
      if (isOther) return;
      message ??= new AnswerReader(options);
      message.push(bytes);
    },
    end(isMessage) {
      if (isMessage && answer === null && message?.answer()) answer = message;
      message = null;
      isOther = false;
    },
  });
  const found = () => answer;
  let size = 0;
  for await (const piece of piecesOf(context, response)) {
    size += piece.length;
    trace.resp_size = size;
    if (size > settings.max_response_bytes) throw tooLarge(settings);
    await inSlices(piece, hold.tenant, async (slice) => {
      const text = utf8.read(slice);
      await hold.grow(message?.keptAfter(text.length) ?? Math.min(text.length, options.captureBytes));
      return () => events.feed(text);
    });
    const early = found();
    if (early !== null) return early;
  }
  events.feed(utf8.end());
  events.finish();
  const last = found();
  if (last === null) {
    const detail = "the event stream ended without the response";
    throw new CallError("internal", detail, { errorDetail: "no_answer_in_stream" });
  }
  return last;
}

/** The pieces of the decoded body. Leaving the loop early closes the connection. */
async function* piecesOf({ settings, hold }: CallContext, response: Answer): Chunks {
  try {
    yield* bodyChunks(response, { maxBytes: settings.max_response_bytes, decodedFor: hold });
  } catch (error) {
    throw error instanceof BodyTooLarge ? tooLarge(settings) : error;
  }
}

/** @param ready resolves, as soon as a slice may be handled, with the function that handles it */
async function inSlices(piece: Uint8Array, tenant: string, ready: (slice: Uint8Array) => Promise<() => void>) {
  // Until then a piece is read without waiting for a turn, which is enough for most. After that each slice takes a turn.
  const until = performance.now() + 0.5;
  for (let at = 0; at < piece.length; at += SLICE_BYTES) {
    const work = await ready(piece.subarray(at, at + SLICE_BYTES));
    if (performance.now() < until) work();
    else await inTurn(tenant, work);
  }
}
