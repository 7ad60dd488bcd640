// An answer that holds a list of things as large as callers have made them. It is made a few things at a time, with
// turns of the event loop in between. A short one goes out whole; of a long one no more is made than its caller takes,
// so that slow readers fill no memory.
import { inTurn } from "../core/in-turn.ts";
import { SUCCESS } from "./http.ts";

/** An answer up to this size is sent whole, with its length. */
const WHOLE_BYTES_MAX = 512 * 1024;
const PIECE_CHARACTERS = 64 * 1024;
/** How long things are read and made into text in one turn. */
const TURN_MS = 2;

/**
 * @param tenant whose turns it takes
 * @param name the key of the list
 * @param rows what it is made of, one by one
 * @param view a row as it is shown
 * @param rest what stands beside the list
 */
export async function jsonList<T>(
  tenant: string,
  name: string,
  rows: AsyncIterable<T>,
  view: (row: T) => object,
  rest: Readonly<Record<string, unknown>> = {},
): Promise<Response> {
  const pieces = piecesOf(tenant, name, rows, view, rest);
  const first: Uint8Array[] = [];
  let bytes = 0;
  for (;;) {
    const { done, value } = await pieces.next();
    if (done) return answer(Buffer.concat(first));
    first.push(value);
    bytes += value.length;
    if (bytes > WHOLE_BYTES_MAX) return answer(streamed(first, pieces));
  }
}

function answer(body: Buffer | ReadableStream<Uint8Array>): Response {
  // Under the name of its interface a Buffer is a view of any memory, and a body is one of memory of its own.
  return new Response(body as Uint8Array<ArrayBuffer> | ReadableStream<Uint8Array>, {
    status: SUCCESS.ok,
    headers: { "content-type": "application/json" },
  });
}

async function* piecesOf<T>(
  tenant: string,
  name: string,
  rows: AsyncIterable<T>,
  view: (row: T) => object,
  rest: Readonly<Record<string, unknown>>,
): AsyncGenerator<Uint8Array, void, undefined> {
  const iterator = rows[Symbol.asyncIterator]();
  let text = `{${JSON.stringify(name)}:[`;
  let separator = "";
  let isDone = false;

  async function takeRows(): Promise<void> {
    const until = performance.now() + TURN_MS;
    while (text.length < PIECE_CHARACTERS && performance.now() < until) {
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
      await inTurn(tenant, takeRows);
      if (text.length < PIECE_CHARACTERS) continue;
      yield Buffer.from(text);
      text = "";
    }
    const last = JSON.stringify(rest);
    yield Buffer.from(`${text}]${last === "{}" ? "" : ","}${last.slice(1)}`);
  } finally {
    await iterator.return?.();
  }
}

function streamed(
  first: readonly Uint8Array[],
  rest: AsyncGenerator<Uint8Array, void, undefined>,
): ReadableStream<Uint8Array> {
  const begun = first.values();
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { value } = begun.next();
        if (value !== undefined) return controller.enqueue(value);
        const next = await rest.next();
        if (next.done) controller.close();
        else controller.enqueue(next.value);
      },
      cancel: () => void rest.return(),
    },
    { highWaterMark: 0 },
  );
}
