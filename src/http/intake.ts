// Takes in request bodies, and drops what no response needs. They are bounded in size, in time, in silence, and in the memory that all of them and those of
// each tenant hold. Of a large body only received bytes count, so one that never arrives takes nothing from others. When
// others hold more than their part, a body that finds too little memory waits, unread, for all that it may need, and the
// slowest of their bodies is refused: see kernel/share.ts.

import { Fault, type FaultDetail } from "../core/fault.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare, createLimiter, type FairShare, type Holding, ReclaimableShare } from "../kernel/share.ts";
import { inTurn } from "../kernel/turns.ts";
import { unlessAborted } from "../kernel/wait.ts";
import { type CallBody, freeMemory, wholeOf } from "../wire/body.ts";
import { type BodyReader, type Gathered, gather } from "./body-buffer.ts";

/** A length that is exact as a number. */
const LENGTH = /^\d{1,15}$/;
/** A body up to this size is not counted: all connections together could not hold enough to matter. */
const TINY_BYTES = 4096;
/** A body up to this size that is sent with its length is taken in one piece, and counts in full from its start. */
const SMALL_BYTES = 65_536;

export interface IntakeLimits {
  /** What all bodies that are coming in may hold together. */
  readonly bytesMax: number;
  /** The cost of a streamed body beside its bytes: its stream and its timers. */
  readonly streamBytes: number;
  /** How long a larger body may take, and be silent. */
  readonly msMax: number;
  readonly silenceMsMax: number;
}

/** How long a received body is held: it may wait for the store, or for an upstream that takes it slowly. */
export interface Held {
  /** Settles when it is not needed any more. It counts until then. */
  readonly until: Promise<unknown>;
  /** Resolves with a function that ends the hold early, should others need the memory. */
  readonly endBy?: Promise<() => void>;
  /** Only so many bytes of its start may be stored; left out: all. */
  readonly storedMax?: number;
}

const INTAKE_LIMITS: IntakeLimits = {
  bytesMax: MAX.bodyIntakeBytes,
  streamBytes: 32 * 1024,
  msMax: MAX.bodyMs,
  silenceMsMax: MAX.bodySilenceMs,
};

/** All that has come of them is parsed in one turn of the event loop, at 0.4 ms for a read full of chunks of one byte. */
const CHUNKED_BODIES = {
  size: MAX.chunkedBodies,
  waitingMax: MAX.chunkedBodiesWaiting,
  tooMany: "too many bodies in chunks are coming in",
};
const LARGE_BODIES = {
  size: MAX.largeBodies,
  waitingMax: MAX.largeBodiesWaiting,
  tooMany: "too many large bodies are being read",
};

/** What takes in all bodies of a server, whose edge hands it to routes in the scope of a request. */
export class Intake {
  readonly #limits: IntakeLimits;
  readonly #memory: ReclaimableShare;
  readonly #readOnePiece: ReturnType<typeof createOnePieceReader>;
  readonly #waiting = createFairShare({ size: MAX.bodiesWaiting });
  readonly #chunked = createLimiter(CHUNKED_BODIES);
  /** Few large bodies are worked on at a time. */
  readonly largeBodies = createLimiter(LARGE_BODIES);

  constructor(limits: IntakeLimits = INTAKE_LIMITS) {
    this.#limits = limits;
    this.#memory = new ReclaimableShare(limits.bytesMax);
    this.#readOnePiece = createOnePieceReader(limits.silenceMsMax);
  }

  /** Bytes of all bodies that are coming in, and of those that are held. */
  get inUse(): number {
    return this.#memory.inUse;
  }

  /**
   * The whole body of a request of `tenant`, at most `bytesMax` bytes.
   *
   * @throws at once or as rejection: Fault `payload_too_large`; `invalid_request` when the body breaks off, falls silent or takes too long;
   *   `unavailable` when too much of large bodies is coming in
   */
  readBody(request: Request, tenant: string, bytesMax: number, held: Held | null = null): Promise<CallBody> {
    // A declared length bounds the body: the HTTP parser takes no more than that.
    const declared = declaredLength(request.headers);
    if (declared !== null && declared > bytesMax) throw tooLarge(bytesMax);
    if (declared !== null && declared <= TINY_BYTES) return this.#readOnePiece(request, tenant);
    const read = () => this.#readLarge(request, tenant, { declared, bytesMax }, held);
    return (inChunks(request.headers) ? this.#chunked(tenant, read) : read()).catch((cause) => {
      throw brokenOff(cause);
    });
  }

  /** As `readBody`, in one piece. */
  async readBytes(...asked: Parameters<Intake["readBody"]>): Promise<Uint8Array> {
    return wholeOf(await this.readBody(...asked));
  }

  async #readLarge(request: Request, tenant: string, sizes: Sizes, held: Held | null): Promise<CallBody> {
    const { declared } = sizes;
    const holding = this.#memory.hold(tenant, null);
    const body = { holding, tenant, ending: new AbortController() };
    const release = () => holding.giveBack();
    try {
      const isSmall = declared !== null && declared <= SMALL_BYTES;
      const read = isSmall ? this.#readSmall(request, body, declared) : this.#readStream(request, body, sizes, held);
      const bytes = await read;
      holding.evict = null;
      if (held === null) release();
      void held?.until.then(release, release);
      void held?.endBy?.then((end) => {
        holding.evict = end;
      });
      return bytes;
    } catch (error) {
      release();
      throw error;
    }
  }

  async #readSmall(request: Request, body: Body, bytes: number): Promise<Uint8Array> {
    const { holding, tenant, ending } = body;
    // The runtime keeps what arrives of it until its connection ends.
    holding.evict = () => ending.abort(tooMany({ closesConnection: true }));
    await this.#weigh(body, bytes, bytes);
    return unlessAborted(ending.signal, this.#readOnePiece(request, tenant));
  }

  async #readStream(request: Request, body: Body, sizes: Sizes, held: Held | null): Promise<CallBody> {
    if (request.body === null) return new Uint8Array();
    const { holding, ending } = body;
    const reader: BodyReader = request.body.getReader();
    const patience = startPatience(this.#limits, (late) => {
      ending.abort(late);
      void reader.cancel().catch(() => {});
    });
    holding.evict = () => {
      ending.abort(tooMany());
      // Ends a read that is under way; the rest is dropped with the answer.
      reader.releaseLock();
    };
    const most = sizes.declared ?? sizes.bytesMax;
    const gathered = gather(most, held?.storedMax);
    const { streamBytes } = this.#limits;
    const weigh = () => this.#weigh(body, streamBytes + gathered.held, streamBytes + most);
    try {
      await weigh();
      await readInto(gathered, reader, { bytesMax: sizes.bytesMax, tenant: body.tenant }, async () => {
        ending.signal.throwIfAborted();
        holding.progressed();
        await weigh();
        patience.heard();
      });
      ending.signal.throwIfAborted();
      // It is complete, so it can't be slow any more.
      holding.evict = null;
      const whole = gathered.body();
      holding.giveBack(Math.max(0, holding.amount - whole.byteLength));
      return whole;
    } catch (error) {
      gathered.drop();
      reader.releaseLock();
      throw ending.signal.aborted ? ending.signal.reason : error;
    } finally {
      patience.end();
    }
  }

  /**
   * Counts so much of a body from now on; waits for that when others hold more than their part.
   *
   * @param most all that the body may come to
   * @throws Fault `unavailable`, and what ends the body meanwhile
   */
  async #weigh({ holding, tenant, ending }: Body, held: number, most: number): Promise<void> {
    const least = held - holding.amount;
    if (least <= 0 || holding.takeNow(least)) return;
    const amount = this.#memory.worthWaiting(tenant, least, most - holding.amount);
    if (amount === null || this.#waiting.take(tenant) !== null) throw tooMany();
    const giveUp = setTimeout(() => ending.abort(tooMany()), MAX.bodyWaitMs);
    try {
      await holding.take(amount, ending.signal);
    } finally {
      clearTimeout(giveUp);
      this.#waiting.giveBack(tenant);
    }
  }
}

function brokenOff(cause: unknown): Fault {
  return cause instanceof Fault ? cause : new Fault("invalid_request", "body: the request body ended early", { cause });
}

function tooLarge(bytesMax: number): Fault {
  return new Fault("payload_too_large", `body: larger than ${bytesMax} bytes`);
}

interface AwaitedBody {
  readonly tenant: string;
  readonly begunAt: number;
  reject(fault: Fault): void;
}

/**
 * Bodies that come in one piece have no timers and no counts of their own, since nearly all are here at once. A look now and
 * then ends those that are late, and those of tenants that have more than their share of them.
 */
function createOnePieceReader(msMax: number) {
  const waiting = new Set<AwaitedBody>();
  let looking: ReturnType<typeof setInterval> | null = null;

  function look(): void {
    const share = createFairShare({ size: MAX.bodiesInOnePiece });
    const latest = performance.now() - msMax;
    for (const body of waiting) {
      if (body.begunAt <= latest)
        end(
          body,
          new Fault("invalid_request", `body: not here within ${msMax / 1000} seconds`, { closesConnection: true }),
        );
      else if (share.take(body.tenant) !== null) end(body, tooMany({ closesConnection: true }));
    }
    if (waiting.size > 0 || looking === null) return;
    clearInterval(looking);
    looking = null;
  }

  function end(body: AwaitedBody, fault: Fault): void {
    waiting.delete(body);
    body.reject(fault);
  }

  /** @throws Fault `unavailable` when its tenant has too many that do not come; `invalid_request` for a late one */
  return (request: Request, tenant: string): Promise<Uint8Array> =>
    new Promise((resolve, reject) => {
      const body = { tenant, begunAt: performance.now(), reject };
      waiting.add(body);
      looking ??= setInterval(look, Math.min(msMax / 10, 1_000)).unref();
      const over = (bytes: Uint8Array) => {
        waiting.delete(body);
        resolve(bytes);
      };
      request.bytes().then(over, (error) => {
        waiting.delete(body);
        reject(brokenOff(error));
      });
    });
}

function tooMany(detail: FaultDetail = {}): Fault {
  return new Fault("unavailable", "too many large bodies are coming in", { retryAfterSeconds: 5, ...detail });
}

/** Calls `stop` when the body has taken too long or been silent too long. */
function startPatience({ msMax, silenceMsMax }: IntakeLimits, stop: (late: Fault) => void) {
  const late = (problem: string) => stop(new Fault("invalid_request", `body: ${problem}`, { closesConnection: true }));
  const whole = setTimeout(() => late(`not here within ${msMax / 1000} seconds`), msMax);
  const silence = setTimeout(() => late(`nothing of it for ${silenceMsMax / 1000} seconds`), silenceMsMax);
  return {
    heard() {
      silence.refresh();
    },
    end() {
      clearTimeout(whole);
      clearTimeout(silence);
    },
  };
}

/** A body that is being taken in. */
interface Body {
  readonly tenant: string;
  readonly holding: Holding;
  /** Aborted with a Fault when no more of it is to come. */
  readonly ending: AbortController;
}

interface Sizes {
  /** At most `bytesMax`; null for a body that does not say. */
  readonly declared: number | null;
  readonly bytesMax: number;
}

/**
 * Reads to the end. Nothing more is read before the last piece has had its turn, and what is not read is not sent. Without
 * that, 80 bodies that arrive together would bring 63 MB in a single turn of the event loop.
 *
 * @param arrived throws when no more may come
 */
async function readInto(
  gathered: Gathered,
  reader: BodyReader,
  { bytesMax, tenant }: { readonly bytesMax: number; readonly tenant: string },
  arrived: () => Promise<void>,
): Promise<void> {
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done || value === undefined) return;
    size += value.byteLength;
    if (size > bytesMax) throw tooLarge(bytesMax);
    await inTurn(tenant, () => {
      if (!gathered.add(value)) freeMemory(value);
    });
    await arrived();
  }
}

/**
 * The declared length of a request's body in bytes; null when the head declares none. The runtime joins a header that was
 * sent twice ("3, 3"), which is no length.
 *
 * @throws Fault `invalid_request`, which closes the connection: where the next request begins is unknown
 */
export function declaredLength(headers: Headers): number | null {
  const header = headers.get("content-length");
  if (header === null) return null;
  if (LENGTH.test(header)) return Number(header);
  throw new Fault("invalid_request", "content-length: must be one number of bytes", { closesConnection: true });
}

/** The end of such a body is known only when it is here. */
export const inChunks = (headers: Headers): boolean => headers.has("transfer-encoding");

export interface DrainLimits {
  /** Of one body. */
  readonly bytesMax: number;
  readonly msMax: number;
  readonly silenceMsMax: number;
  /** How many connections at a time, shared out by caller. All strangers count as one. */
  readonly countMax: number;
}

const DRAIN_LIMITS: DrainLimits = {
  bytesMax: MAX.drainedBytes,
  msMax: MAX.drainedMs,
  silenceMsMax: MAX.drainedSilenceMs,
  countMax: MAX.drained,
};

/**
 * Drops what is left of a request's body when its response does not need it. A client that writes its whole body before it
 * reads would lose a response that closes the connection earlier: unread bytes make the close a reset (RFC 9112, section
 * 9.6). So the rest is read and dropped first, within bounds; beyond them the connection is closed as it is.
 *
 * If the connection stays open there is nothing to do for a declared length: the server drops the rest itself after the
 * response, so a client that reads while it writes gets that at once (measured on Bun 1.4.5: 256 MiB, memory flat). The server
 * would parse chunks without end, too, so where these do not end within bounds, the connection ends with the response. A client
 * of HTTP/1.0 that does not say `Connection: close` can't be told from one of HTTP/1.1.
 */
export function createBodyDrainer(limits: DrainLimits = DRAIN_LIMITS) {
  const inFlight = createFairShare({ size: limits.countMax });
  const chunked = createFairShare({ size: MAX.drainedChunked });
  const chunkedLimits = { ...limits, silenceMsMax: MAX.drainedChunkedSilenceMs };

  /** @returns whether nothing is left */
  async function drainWhole(request: Request, caller: string, share: FairShare, within: DrainLimits): Promise<boolean> {
    const body = leftOf(request, limits.bytesMax);
    if (body === null || share.take(caller) !== null) return false;
    const isWhole = await drain(body.getReader(), within).catch(() => false);
    share.giveBack(caller);
    return isWhole;
  }

  async function drainChunks(request: Request, { headers }: Response, caller: string): Promise<void> {
    const isWhole = request.body?.locked || (await drainWhole(request, caller, chunked, chunkedLimits));
    if (!isWhole) headers.set("connection", "close");
  }

  /**
   * Reads and drops what is left of a request's body. A body that somebody else is reading, or has read whole, is left to
   * them: a reader that gives up in the middle releases it. Returns at once when the connection stays open. Never rejects.
   *
   * @param caller whose share it counts to
   */
  return (request: Request, response: Response, caller: string): Promise<unknown> | undefined => {
    if (inChunks(request.headers)) return drainChunks(request, response, caller);
    return closes(request) || closes(response) ? drainWhole(request, caller, inFlight, limits) : undefined;
  };
}

/** Null when nothing is left, or more than may be. */
function leftOf({ headers, body }: Request, bytesMax: number): Request["body"] {
  const declared = headers.get("content-length") ?? "0";
  // A length that is no number was refused, and what follows the head is not known.
  if (!(Number(declared) <= bytesMax)) return null;
  return body === null || body.locked ? null : body;
}

function closes({ headers }: Request | Response): boolean {
  const connection = headers.get("connection");
  return connection !== null && /(^|,)\s*close\s*(,|$)/i.test(connection);
}

async function drain(
  reader: Pick<BodyReader, "read" | "cancel">,
  { bytesMax, msMax, silenceMsMax }: DrainLimits,
): Promise<boolean> {
  let isGivenUp = false;
  const giveUp = () => {
    isGivenUp = true;
    void reader.cancel().catch(() => {});
  };
  const whole = setTimeout(giveUp, msMax);
  const silence = setTimeout(giveUp, silenceMsMax);
  try {
    for (let bytes = 0; bytes <= bytesMax; ) {
      const { done, value } = await reader.read();
      if (done || value === undefined) return !isGivenUp;
      silence.refresh();
      bytes += value.byteLength;
      // A reader that waits is given each chunk by itself, for 5 µs; what comes meanwhile is joined, for a hundredth of that.
      await new Promise(setImmediate);
    }
    giveUp();
    return false;
  } finally {
    clearTimeout(whole);
    clearTimeout(silence);
  }
}
