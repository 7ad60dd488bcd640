// An answer that holds a list of items, which may be as large as callers made them. A few items are made at a time, with
// turns of the event loop in between. A short list is sent whole; a long one is made only as fast as its caller takes it,
// so that slow readers fill no memory.
// One per thread, since the limit on lists in the making bounds the memory of all routes together.
import { createLimiter } from "../concurrency/limiter.ts";
import { inStoreTurns } from "../concurrency/store-turns.ts";
import { type LargeResponse, type ResponseParts, respondLarge, SMALL_CHARACTERS } from "./large-response.ts";

const PIECE_CHARACTERS = 64 * 1024;
/** The memory of a long list while it is sent: a piece, and the items that were read with the last one in it. */
const LONG_WEIGHT = 512 * 1024;
/** How long items are read and made into text in one turn. */
const TURN_MS = 2;

/** Lists in the making: each may have read large items before its memory is counted. */
const begun = createLimiter({ size: 16, tooMany: "too many lists are being made" });

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

export function jsonList<T>(answer: LargeResponse, list: JsonList<T>): Promise<Response> {
  return respondLarge(answer, () => begun(answer.tenant, () => beginningOf(answer.tenant, list)));
}

/** Whole when it is short. */
async function beginningOf<T>(tenant: string, list: JsonList<T>): Promise<string | ResponseParts> {
  const pieces = piecesOf(tenant, list);
  const first = (await pieces.next()).value ?? "";
  if (first.length >= SMALL_CHARACTERS) return { weight: LONG_WEIGHT, first, pieces };
  return first;
}

/** None but the last one is small. */
async function* piecesOf<T>(
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
