// The body of an MCP server's answer: one message, or an event stream that is read until the one response that was
// asked for, and then closed. Progress, notifications and requests of the server come before it and are passed over.

import { inOneStep } from "../../../concurrency/steps.ts";
import type { Answer } from "../../../http/client/answer.ts";
import { bodyChunks } from "../../../http/client/body.ts";
import { BodyTooLarge, type Chunks } from "../../../http/client/decode.ts";
import { EventStreamReader } from "../../../wire/event-stream.ts";
import { Utf8Reader } from "../../../wire/utf8.ts";
import { CallError } from "../../upstream/failure.ts";
import { type CallContext, tooLarge } from "../call.ts";
import { type AnswerOptions, AnswerReader } from "./response.ts";

/** Bytes read in one go, which takes a millisecond or two at most. */
const SLICE_BYTES = 8 * 1024;
/** For so long an answer is read without waiting for a turn, which is enough for most. After that it takes turns. */
const AT_ONCE_MS = 0.5;

/** How the text of an object begins: a brace, or white space. */
const NEARLY_OBJECT = new Set(new TextEncoder().encode("{ \n\r\t"));

export function isEventStream(response: Answer): boolean {
  const type = response.headers.get("content-type") ?? "";
  return /^\s*text\/event-stream\s*(;|$)/i.test(type);
}

/** The message that is the whole body, whether it is the response or not. */
export async function readMessage(
  context: CallContext,
  response: Answer,
  options: AnswerOptions,
): Promise<AnswerReader> {
  const { settings, trace, hold, decodedFor } = context;
  const message = new AnswerReader(options);
  let size = 0;
  for await (const piece of piecesOf(context, response)) {
    size += piece.length;
    if (size > settings.max_response_bytes) {
      trace.resp_size = size;
      throw tooLarge(settings);
    }
    await inSlices(piece, decodedFor.tenant, async (slice) => {
      await hold.grow(message.keptAfter(slice.length));
      return () => message.push(slice);
    });
  }
  trace.resp_size = size;
  return message;
}

/**
 * The response in an event stream.
 *
 * @throws CallError `internal` when the stream ends without it or is too large
 * @throws OutboundError when the connection is lost
 */
export async function readStreamAnswer(
  context: CallContext,
  response: Answer,
  options: AnswerOptions,
): Promise<AnswerReader> {
  const { settings, trace, hold, decodedFor } = context;
  // An event stream is always UTF-8: invalid bytes are replaced.
  const utf8 = new Utf8Reader();
  let message: AnswerReader | null = null;
  let isOther = false;
  let answer: AnswerReader | null = null;
  const events = new EventStreamReader({
    data(bytes) {
      if (answer !== null || isOther) return;
      // An event that can be no message is passed over.
      isOther = message === null && !NEARLY_OBJECT.has(bytes[0] ?? 0);
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
    await inSlices(piece, decodedFor.tenant, async (slice) => {
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
  if (last === null) throw new CallError("internal", "the event stream ended without the response");
  return last;
}

/** The decoded body; left early, it is closed. */
async function* piecesOf({ settings, decodedFor }: CallContext, response: Answer): Chunks {
  try {
    yield* bodyChunks(response, { maxBytes: settings.max_response_bytes, decodedFor });
  } catch (error) {
    throw error instanceof BodyTooLarge ? tooLarge(settings) : error;
  }
}

/** @param ready gives what to do with a slice as soon as that may be done */
async function inSlices(
  piece: Uint8Array,
  tenant: string,
  ready: (slice: Uint8Array) => Promise<() => void>,
): Promise<void> {
  const until = performance.now() + AT_ONCE_MS;
  for (let at = 0; at < piece.length; at += SLICE_BYTES) {
    const work = await ready(piece.subarray(at, at + SLICE_BYTES));
    if (performance.now() < until) work();
    else await inOneStep(work, tenant);
  }
}
