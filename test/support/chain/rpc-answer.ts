// How the answer in a message is found when the whole message is in memory: the plain way, to hold the other one to.
import { createHash } from "node:crypto";
import { createParser } from "eventsource-parser";
import { objectOutline, skipSpace, watch } from "../../../src/wire/json-scan.ts";

const KEYS = [watch("id"), watch("method"), watch("result"), watch("error", watch("code"))];
const ID_BYTES_MAX = 6 * 1024;

export interface Plain {
  /** Undefined when it is not the answer; null for a result. */
  readonly code: number | null | undefined;
  /** All of it, as the caller gets it. */
  readonly body: Uint8Array;
  readonly sha256: string;
}

/** The message, read as the answer to the request that was sent with `wireId` and came with `callerId`. */
export function plainAnswer(message: Uint8Array, wireId: string, callerId: string): Plain {
  const { findings } = objectOutline(message, skipSpace(message, 0), KEYS);
  const [id, method, , error] = findings;
  const textOf = (span: { start: number; end: number }) =>
    span.end - span.start > ID_BYTES_MAX ? "" : Buffer.from(message.subarray(span.start, span.end)).toString();
  const asItCame = { code: undefined, body: message, sha256: hashOf(message) };
  if (id?.value == null || method?.value != null) return asItCame;
  const isError = error?.value != null;
  const text = textOf(id.value);
  const isNull = text === "null";
  const isSame = text !== "" && JSON.parse(text) === JSON.parse(wireId);
  if (!(isSame || (isNull && isError))) return asItCame;
  const [start, end] = [message.subarray(0, id.value.start), message.subarray(id.value.end)];
  const body = isNull ? message : Buffer.concat([start, Buffer.from(callerId), end]);
  const codeSpan = error?.inside[0]?.value ?? null;
  const code = isError ? (codeSpan === null ? Number.NaN : Number(textOf(codeSpan))) : null;
  return { code, body, sha256: hashOf(body) };
}

/** The first answer among the messages of an event stream; null when there is none. */
export function plainStreamAnswer(stream: Uint8Array, wireId: string, callerId: string): Plain | null {
  let found: Plain | null = null;
  const parser = createParser({
    onEvent({ event, data }) {
      if (found !== null || (event ?? "message") !== "message") return;
      const answer = plainAnswer(new TextEncoder().encode(data), wireId, callerId);
      if (answer.code !== undefined) found = answer;
    },
  });
  parser.feed(`${new TextDecoder().decode(stream)}\n\n`);
  return found;
}

function hashOf(bytes: Uint8Array): string {
  return createHash("sha256").update(bytes).digest("hex");
}
