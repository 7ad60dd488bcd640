// Taking in request bodies: bounded in size, in time, in silence, and in what all of them together and each tenant's
// hold in memory. Of a large body only bytes that are here count, so one that never comes keeps none from others.
import { createFairShare } from "../core/fair-share.ts";
import { Fault } from "../core/fault.ts";
import { BODY_INTAKE_BYTES_MAX, BODY_INTAKE_MS_MAX, BODY_INTAKE_SILENCE_MS_MAX } from "../core/limits.ts";
import { named } from "../core/steps.ts";
import { during } from "../core/work.ts";
import { gather } from "./gathered.ts";
import { inSteps } from "./steps.ts";
import { doneInTurns } from "./turns.ts";

/** Up to here a body weighs nothing: there are fewer connections than could matter. */
const TINY_BYTES = 4096;
/** Up to here a body that is sent with its length is taken in one piece, and weighs that much from its start. */
const SMALL_BYTES = 65_536;

export interface IntakeLimits {
  /** What the bodies that are coming in may hold, all together. */
  readonly bytesMax: number;
  /** How long a larger body may take, and be silent. */
  readonly msMax: number;
  readonly silenceMsMax: number;
}

/**
 * The whole body of a request of `tenant`, at most `bytesMax` bytes. It counts as held until `heldUntil` settles,
 * for a body that is here may still wait for the store.
 *
 * @throws Fault `payload_too_large`; `invalid_request` when the body breaks off, falls silent or takes too long;
 *   `unavailable` when too much of large bodies is coming in
 */
export type Intake = (
  request: Request,
  tenant: string,
  bytesMax: number,
  heldUntil?: Promise<unknown>,
) => Promise<Uint8Array>;

export function createIntake(limits: IntakeLimits): Intake {
  const memory = createFairShare({ size: limits.bytesMax, least: 0 });

  function charge(tenant: string, bytes: number): void {
    if (memory.take(tenant, null, bytes) === null) return;
    throw new Fault("unavailable", "too many large bodies are coming in", { retryAfterSeconds: 5 });
  }

  async function readSmall(request: Request, tenant: string, weight: number): Promise<Taken> {
    charge(tenant, weight);
    const release = () => memory.giveBack(tenant, null, weight);
    try {
      return { bytes: await request.bytes(), release };
    } catch (error) {
      release();
      throw error;
    }
  }

  /** Gives the bytes, and what gives their share back. */
  async function readStream(body: ReadableStream<Uint8Array>, tenant: string, expected: Expected) {
    const reader: BodyReader = body.getReader();
    const patience = startPatience(limits, () => void reader.cancel().catch(() => {}));
    let charged = 0;
    const release = () => memory.giveBack(tenant, null, charged);
    try {
      const bytes = await gathered(reader, expected, tenant, (held) => {
        patience.heard();
        if (held <= TINY_BYTES) return;
        charge(tenant, held - charged);
        charged = held;
      });
      patience.check();
      memory.giveBack(tenant, null, charged - Math.min(charged, bytes.byteLength));
      charged = Math.min(charged, bytes.byteLength);
      return { bytes, release };
    } catch (error) {
      release();
      throw error;
    } finally {
      patience.end();
    }
  }

  async function take(request: Request, tenant: string, bytesMax: number): Promise<Taken> {
    const header = request.headers.get("content-length");
    const declared = header === null ? bytesMax : Number(header);
    if (declared > bytesMax) throw tooLarge(bytesMax);
    // A declared length bounds the body: the HTTP parser takes no more than that.
    const isSmall = header !== null && declared <= SMALL_BYTES;
    if (isSmall) return readSmall(request, tenant, declared <= TINY_BYTES ? 0 : declared);
    if (request.body === null) return { bytes: new Uint8Array(), release: () => {} };
    return readStream(request.body, tenant, { declared, bytesMax });
  }

  return async (request, tenant, bytesMax, heldUntil = Promise.resolve()) => {
    try {
      const { bytes, release } = await take(request, tenant, bytesMax);
      void heldUntil.then(release, release);
      return bytes;
    } catch (cause) {
      if (cause instanceof Fault) throw cause;
      throw new Fault("invalid_request", "body: it broke off", { cause });
    }
  };
}

export const readBytes = createIntake({
  bytesMax: BODY_INTAKE_BYTES_MAX,
  msMax: BODY_INTAKE_MS_MAX,
  silenceMsMax: BODY_INTAKE_SILENCE_MS_MAX,
});

function tooLarge(bytesMax: number): Fault {
  return new Fault("payload_too_large", `body: larger than ${bytesMax} bytes`);
}

/** Calls `giveUp` once when the body has taken too long or been silent too long, which `check` then throws. */
function startPatience({ msMax, silenceMsMax }: IntakeLimits, giveUp: () => void) {
  let late: Fault | null = null;
  const stop = (problem: string) => {
    late ??= new Fault("invalid_request", `body: ${problem}`, { closesConnection: true });
    giveUp();
  };
  const whole = setTimeout(() => stop(`not here within ${msMax / 1000} seconds`), msMax);
  const silence = setTimeout(() => stop(`nothing of it for ${silenceMsMax / 1000} seconds`), silenceMsMax);
  return {
    heard() {
      silence.refresh();
    },
    check() {
      if (late !== null) throw late;
    },
    end() {
      clearTimeout(whole);
      clearTimeout(silence);
    },
  };
}

interface Taken {
  readonly bytes: Uint8Array;
  /** Gives its share of the memory back. */
  release(): void;
}

interface Expected {
  readonly declared: number;
  readonly bytesMax: number;
}

/** What is used of a stream's reader; Bun's and Node's types of the whole differ. */
interface BodyReader {
  read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }>;
  cancel(): Promise<void>;
  releaseLock(): void;
}

/**
 * Nothing more is read before what has come has had its turn, and what nobody reads is not sent: of 80 bodies that come
 * together a single turn of the event loop would take in 63 MB.
 *
 * @param arrived is told what is held, and throws when no more may come
 */
async function gathered(
  reader: BodyReader,
  { declared, bytesMax }: Expected,
  tenant: string,
  arrived: (held: number) => void,
): Promise<Uint8Array> {
  const body = gather(Math.min(declared, bytesMax));
  let size = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done || value === undefined) return await inSteps(named("intake of a body", body.whole()), tenant);
      size += value.byteLength;
      if (size > bytesMax) throw tooLarge(bytesMax);
      await doneInTurns(() => {
        during("intake of a body", () => body.add(value));
        return false;
      }, tenant);
      arrived(body.held);
    }
  } catch (error) {
    body.drop();
    // What is left of the body is passed over with the answer.
    reader.releaseLock();
    throw error;
  }
}
