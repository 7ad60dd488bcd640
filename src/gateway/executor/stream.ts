// An event-stream answer of an MCP server: read until the one response that was asked for, then closed.
// Progress, notifications and requests of the server come before it and are passed over.
import { createParser } from "eventsource-parser";
import { findAnswer, type RpcAnswer } from "../../core/jsonrpc.ts";
import { decodedBody } from "../../edge/body.ts";
import { BodyTooLarge } from "../../edge/decode.ts";
import { type CallContext, CallError, tooLarge } from "./call.ts";

export interface StreamAnswer extends RpcAnswer {
  /** The JSON-RPC response, as the server wrote it. */
  readonly message: Uint8Array;
}

export function isEventStream(response: Response): boolean {
  const type = response.headers.get("content-type") ?? "";
  return /^\s*text\/event-stream\s*(;|$)/i.test(type);
}

/**
 * The response to the request that was sent with `wireId` (JSON text).
 *
 * @throws CallError `internal` when the stream ends without it or is too large
 * @throws OutboundError when the connection is lost
 */
export async function readStreamAnswer(
  context: CallContext,
  response: Response,
  wireId: string,
): Promise<StreamAnswer> {
  const { settings, trace, hold, decodedFor } = context;
  const reader = decodedBody(response, { maxBytes: settings.max_response_bytes, decodedFor }).getReader();
  const decoder = new TextDecoder();
  const encoder = new TextEncoder();
  let answer: StreamAnswer | null = null;
  /** Bytes of the event that is not complete yet: a message has to be had whole. */
  let kept = 0;
  const parser = createParser({
    onEvent: ({ event, data }) => {
      kept = 0;
      if (answer !== null || (event ?? "message") !== "message") return;
      const message = encoder.encode(data);
      const found = findAnswer(message, wireId);
      if (found !== null) answer = { ...found, message };
    },
  });
  let size = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      size += value?.length ?? 0;
      trace.resp_size = size;
      if (size > settings.max_response_bytes) throw tooLarge(settings);
      kept += value?.length ?? 0;
      await hold.grow(kept);
      // An ordered end closes the last event, even where the server forgot its blank line.
      parser.feed(done ? `${decoder.decode()}\n\n` : decoder.decode(value, { stream: true }));
      if (answer !== null) return answer;
      if (done) throw new CallError("internal", "the event stream ended without the response");
    }
  } catch (error) {
    throw error instanceof BodyTooLarge ? tooLarge(settings) : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
