// Taking in request bodies: bounded in size, in time, and in what all of them together hold in memory.
import { Fault } from "../core/fault.ts";
import { BODY_INTAKE_BYTES_MAX, BODY_INTAKE_MS_MAX } from "../core/limits.ts";

/** Up to here a body is read in one go and weighs nothing: there are fewer connections than could matter. */
const SMALL_BYTES = 65_536;

/** What the larger bodies that are coming in may come to, over the whole process. */
let held = 0;

/**
 * The whole body of a request, at most `bytesMax` bytes.
 *
 * @throws Fault `payload_too_large`; `invalid_request` when the body breaks off or takes too long; `unavailable`
 *   when too many large bodies are coming in
 */
export async function readBytes(request: Request, bytesMax: number): Promise<Uint8Array> {
  const header = request.headers.get("content-length");
  const declared = header === null ? null : Number(header);
  if (declared !== null && declared > bytesMax) throw tooLarge(bytesMax);
  if (request.body === null) return new Uint8Array();
  try {
    // A declared length bounds the body: the HTTP parser takes no more than that.
    if (declared !== null && declared <= SMALL_BYTES) return await request.bytes();
    return await readLarge(request.body, declared ?? bytesMax, bytesMax);
  } catch (cause) {
    if (cause instanceof Fault) throw cause;
    throw new Fault("invalid_request", "body: it broke off", { cause });
  }
}

function tooLarge(bytesMax: number): Fault {
  return new Fault("payload_too_large", `body: larger than ${bytesMax} bytes`);
}

/** What is used of a stream's reader; Bun's and Node's types of the whole differ. */
interface BodyReader {
  read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }>;
  cancel(): Promise<void>;
}

async function readLarge(
  body: ReadableStream<Uint8Array>,
  expected: number,
  bytesMax: number,
): Promise<Uint8Array> {
  if (held + expected > BODY_INTAKE_BYTES_MAX) {
    throw new Fault("unavailable", "too many large bodies are coming in", { retryAfterSeconds: 5 });
  }
  held += expected;
  const reader: BodyReader = body.getReader();
  let late = false;
  const deadline = setTimeout(() => {
    late = true;
    void reader.cancel();
  }, BODY_INTAKE_MS_MAX);
  try {
    const bytes = await gather(reader, bytesMax);
    if (late)
      throw new Fault("invalid_request", `body: not here within ${BODY_INTAKE_MS_MAX / 1000} seconds`);
    return bytes;
  } finally {
    clearTimeout(deadline);
    held -= expected;
  }
}

async function gather(reader: BodyReader, bytesMax: number): Promise<Uint8Array> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done || value === undefined) break;
    size += value.byteLength;
    if (size > bytesMax) {
      // So that no more of the body is taken in.
      await reader.cancel();
      throw tooLarge(bytesMax);
    }
    chunks.push(value);
  }
  return chunks.length === 1 && chunks[0] !== undefined ? chunks[0] : joined(chunks, size);
}

/** Lets go of each chunk once it is copied, so that a large body is not held twice for long. */
function joined(chunks: Uint8Array[], size: number): Uint8Array {
  const whole = new Uint8Array(size);
  let at = size;
  for (let chunk = chunks.pop(); chunk !== undefined; chunk = chunks.pop()) {
    at -= chunk.byteLength;
    whole.set(chunk, at);
  }
  return whole;
}
