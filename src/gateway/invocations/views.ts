// A call as it is shown with its captured bodies, which may be a MiB each: read in a turn, since many who ask for such
// at once would hold up all others, and made into text as they are taken.

import { inOneStep } from "../../concurrency/steps.ts";
import { asBuffer } from "../../core/bytes.ts";
import { READ_BODY_SCOPE } from "../../core/caller.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import { json, respondLarge, SMALL_CHARACTERS } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import type { Reader } from "../../storage/store.ts";
import { capturedBodies, capturedResponse } from "./history.ts";
import { detail, pollView } from "./model.ts";
import type { InvocationRow } from "./service.ts";

/** Up to here stored bodies are read without a turn of their own, and without one those that are passed over. */
const QUICK_BYTES = 65_536;
/** Three bytes make four characters, so the texts of such pieces join. */
const PIECE_BYTES = 48 * 1024;

/** By the keys that they are shown under; null where there is none. */
type Bodies = Readonly<Record<string, Uint8Array | null>>;

/** The body is shown to the user who made the call, and to tokens that may read all bodies. */
export async function pollAnswer(reader: Reader, request: Request, row: InvocationRow): Promise<Response> {
  const { user, scopes } = scopeOf(request).caller;
  if (row.caller !== user && !scopes.has(READ_BODY_SCOPE)) return json("ok", pollView(row));
  const read = async () => ({ response_body_b64: await capturedResponse(reader, row) });
  return withBodies(request, row, { view: pollView(row), sizes: [row.resp_size], read });
}

export async function detailAnswer(reader: Reader, request: Request, row: InvocationRow): Promise<Response> {
  if (!scopeOf(request).caller.scopes.has(READ_BODY_SCOPE)) return json("ok", detail(row));
  async function read() {
    const { request, response } = await capturedBodies(reader, row);
    return { req_body: request, resp_body: response };
  }
  return withBodies(request, row, { view: detail(row), sizes: [row.req_size, row.resp_size], read });
}

interface Shown {
  /** Without the bodies. */
  readonly view: object;
  /** Of the bodies as they were before they were cut. */
  readonly sizes: readonly (number | null)[];
  read(): Promise<Bodies>;
}

function withBodies(
  request: Request,
  { tenant, body_captured, req_size, resp_size }: InvocationRow,
  { view, sizes, read }: Shown,
): Promise<Response> {
  const isQuick = Math.max(req_size ?? 0, resp_size ?? 0) <= QUICK_BYTES;
  const held = sizes.map((size) => (body_captured ? Math.min(size ?? 0, CAPTURE_BYTES_MAX) : 0));
  const weight = held.reduce((sum, bytes) => sum + bytes, 0);
  return respondLarge({ tenant, request, weight }, async () => {
    const bodies = await (isQuick ? read() : inOneStep(read, tenant));
    const pieces = piecesOf(view, bodies);
    return weight <= SMALL_CHARACTERS ? [...pieces].join("") : { weight, pieces };
  });
}

function* piecesOf(view: object, bodies: Bodies): Generator<string, void> {
  yield JSON.stringify(view).slice(0, -1);
  for (const [key, body] of Object.entries(bodies)) {
    if (body === null) continue;
    yield `,"${key}":"`;
    for (let at = 0; at < body.length; at += PIECE_BYTES) {
      yield asBuffer(body.subarray(at, at + PIECE_BYTES)).toString("base64");
    }
    yield '"';
  }
  yield "}";
}
