// An answer that holds a list of things as large as callers have made them. It is made a few things at a time, with
// turns of the event loop in between. A short one goes out whole; of a long one no more is made than its caller takes,
// so that slow readers fill no memory.
import { createLimiter } from "../concurrency/limiter.ts";
import { inStoreTurns } from "../concurrency/store-turns.ts";
import { type LargeResponse, type ResponseParts, respondLarge, SMALL_CHARACTERS } from "./large-response.ts";

const PIECE_CHARACTERS = 64 * 1024;
/** What there is of a long list meanwhile: a piece, and the things that were read with its last one. */
const LONG_WEIGHT = 512 * 1024;
/** How long things are read and made into text in one turn. */
const TURN_MS = 2;

/** Each may have read things that are large before it has the turn in which it is weighed. */
const begun = createLimiter({ size: 16, tooMany: "too many lists are being made" });

export interface JsonList<T> {
  /** The key of the list. */
  readonly name: string;
  /** What it is made of, one by one; asked for again when the list is made again. */
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
