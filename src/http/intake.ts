// Receives request bodies, and drains those that no response needs. A body is bounded in size, in total time, in silence, and in
// memory, which is shared out by tenant. A large body is charged for the bytes that have arrived, so one that never arrives
// takes nothing from others. A body that finds too little memory waits, unread, while tenants with more than their share
// give some back: the slowest of their bodies is refused (see kernel/share.ts).
import { Fault, type FaultDetail } from "../core/fault.ts";
import { MAX } from "../kernel/limits.ts";
import { createFairShare, createLimiter, type FairShare, type Holding, ReclaimableShare } from "../kernel/share.ts";
import { inTurn, turnOf } from "../kernel/turns.ts";
import { unlessAborted } from "../kernel/wait.ts";
import { type CallBody, freeMemory, wholeOf } from "../wire/body.ts";
import { type BodyBuffer, type BodyReader, createBodyBuffer } from "./body-buffer.ts";

/** A Content-Length that a number can hold exactly. */
const LENGTH = /^\d{1,15}$/;
/** A body up to this size is not charged: all connections together could not hold enough to matter. */
const TINY_BYTES = 4096;
/** A body up to this size with a Content-Length is read in one piece, and charged in full from its start. */
const SMALL_BYTES = 65_536;

export interface IntakeLimits {
  /** The memory that all bodies may hold together. */
  readonly bytesMax: number;
  /** The memory of a streamed body in addition to its bytes: its stream and its timers. */
  readonly streamBytes: number;
  /** How long a body above SMALL_BYTES may take in all. */
  readonly msMax: number;
  /** How long a body may bring no data. */
  readonly silenceMsMax: number;
}

/** How long a received body stays in memory: it may wait for the store, or for an upstream that takes it slowly. */
export interface BodyHolding {
  /** Settles when the body is no longer needed. Its memory is charged until then. */
  readonly until: Promise<unknown>;
  /** Resolves with a function that ends the hold early, in case others need the memory. */
  readonly endBy?: Promise<() => void>;
  /** How many bytes of its start may be stored; all when omitted. */
  readonly storedMax?: number;
}

const INTAKE_LIMITS: IntakeLimits = {
  bytesMax: MAX.bodyIntakeBytes,
  streamBytes: 32 * 1024,
  msMax: MAX.bodyMs,
  silenceMsMax: MAX.bodySilenceMs,
};

/** Receives all bodies of a server, whose edge passes it to routes in the scope of a request. */
export class Intake {
  readonly #limits: IntakeLimits;
  readonly #memory: ReclaimableShare;
  readonly #readOnePiece: ReturnType<typeof createOnePieceReader>;
  readonly #waiting = createFairShare({ size: MAX.bodiesWaiting });
  /** The runtime parses all received chunks in one turn of the event loop: 0.4 ms for a read full of one-byte chunks. */
  readonly #chunked = createLimiter({
    size: MAX.chunkedBodies,
    waitingMax: MAX.chunkedBodiesWaiting,
    tooMany: "too many chunked bodies are being received",
  });
  /** Limits how many large bodies are parsed at a time. */
  readonly largeBodies = createLimiter({
    size: MAX.largeBodies,
    waitingMax: MAX.largeBodiesWaiting,
    tooMany: "too many large bodies are being read",
  });

  constructor(limits: IntakeLimits = INTAKE_LIMITS) {
    this.#limits = limits;
    this.#memory = new ReclaimableShare(limits.bytesMax);
    this.#readOnePiece = createOnePieceReader(limits.silenceMsMax);
  }

  /** Memory of all bodies that are arriving or held. */
  get inUse(): number {
    return this.#memory.inUse;
  }

  /**
   * @throws at once or as rejection: Fault `payload_too_large`; `invalid_request` when the body ends early, falls silent or takes
   *   too long; `unavailable` when large bodies need too much memory
   */
  readBody(request: Request, tenant: string, bytesMax: number, hold: BodyHolding | null = null): Promise<CallBody> {
    // A declared length bounds the body: the HTTP parser accepts no more than that.
    const declared = declaredLength(request.headers);
    if (declared !== null && declared > bytesMax) throw tooLarge(bytesMax);
    if (declared !== null && declared <= TINY_BYTES) return this.#readOnePiece(request, tenant);
    const read = () => this.#readLarge(request, tenant, { declared, bytesMax }, hold);
    const reading = isChunked(request.headers) ? this.#chunked(tenant, read) : read();
    return reading.catch((cause) => Promise.reject(endedEarly(cause)));
  }

  /** As `readBody`, with the body joined into one array. */
  async readBytes(...args: Parameters<Intake["readBody"]>): Promise<Uint8Array> {
    return wholeOf(await this.readBody(...args));
  }

  async #readLarge(request: Request, tenant: string, sizes: Sizes, hold: BodyHolding | null): Promise<CallBody> {
    const { declared } = sizes;
    const holding = this.#memory.hold(tenant, null);
    const body = { holding, tenant, aborting: new AbortController() };
    const release = () => holding.giveBack();
    try {
      const isSmall = declared !== null && declared <= SMALL_BYTES;
      const read = isSmall ? this.#readSmall(request, body, declared) : this.#readStream(request, body, sizes, hold);
      const bytes = await read;
      holding.evict = null;
      if (isChunked(request.headers)) await checkTrailer(request);
      if (hold === null) release();
      void hold?.until.then(release, release);
      void hold?.endBy?.then((end) => {
        holding.evict = end;
      });
      return bytes;
    } catch (error) {
      release();
      throw error;
    }
  }

  async #readSmall(request: Request, body: IncomingBody, bytes: number): Promise<Uint8Array> {
    const { holding, tenant, aborting } = body;
    // The connection is closed as well, since the runtime buffers the body until then.
    holding.evict = () => aborting.abort(tooMany({ closesConnection: true }));
    await this.#charge(body, bytes, bytes);
    return unlessAborted(aborting.signal, this.#readOnePiece(request, tenant));
  }

  async #readStream(request: Request, body: IncomingBody, sizes: Sizes, hold: BodyHolding | null): Promise<CallBody> {
    if (request.body === null) return new Uint8Array();
    const { holding, aborting } = body;
    const reader: BodyReader = request.body.getReader();
    const timers = startTimers(this.#limits, (late) => {
      aborting.abort(late);
      void reader.cancel().catch(() => {});
    });
    holding.evict = () => {
      aborting.abort(tooMany());
      // Ends a pending read; the rest of the body is drained after the response.
      reader.releaseLock();
    };
    const most = sizes.declared ?? sizes.bytesMax;
    const gathered = createBodyBuffer(most, hold?.storedMax);
    const { streamBytes } = this.#limits;
    const charge = () => this.#charge(body, streamBytes + gathered.held, streamBytes + most);
    try {
      await charge();
      await readInto(gathered, reader, { bytesMax: sizes.bytesMax, tenant: body.tenant }, async () => {
        aborting.signal.throwIfAborted();
        holding.progressed();
        await charge();
        timers.received();
      });
      aborting.signal.throwIfAborted();
      // A complete body is no longer slow, so it is not refused for others.
      holding.evict = null;
      const whole = gathered.body();
      holding.giveBack(Math.max(0, holding.amount - whole.byteLength));
      return whole;
    } catch (error) {
      gathered.drop();
      reader.releaseLock();
      throw aborting.signal.aborted ? aborting.signal.reason : error;
    } finally {
      timers.stop();
    }
  }

  /**
   * Charges a body for `held` bytes; waits while other tenants hold more than their share, and then for the `most` that it may come
   * to. @throws Fault `unavailable`; the reason for which the body is aborted meanwhile
   */
  async #charge({ holding, tenant, aborting }: IncomingBody, held: number, most: number): Promise<void> {
    const least = held - holding.amount;
    if (least <= 0 || holding.takeNow(least)) return;
    const amount = this.#memory.worthWaiting(tenant, least, most - holding.amount);
    if (amount === null || this.#waiting.take(tenant) !== null) throw tooMany();
    const giveUp = setTimeout(() => aborting.abort(tooMany()), MAX.bodyWaitMs);
    try {
      await holding.take(amount, aborting.signal);
    } finally {
      clearTimeout(giveUp);
      this.#waiting.giveBack(tenant);
    }
  }
}

/**
 * The runtime (Bun 1.4.5) hands over a chunked body at its last chunk. If a trailer follows in the same packet (a later one is not
 * seen), it answers 400 and closes the connection, which the signal shows in the next turn of the event loop. A call that was made
 * nevertheless would cost a caller who was told 400. @throws Fault `invalid_request` when the connection was closed
 */
async function checkTrailer({ signal }: Request): Promise<void> {
  await new Promise(setImmediate);
  if (signal.aborted) throw endedEarly(signal.reason);
}

const endedEarly = (cause: unknown): Fault =>
  cause instanceof Fault ? cause : new Fault("invalid_request", "body: the request body ended early", { cause });

const tooLarge = (bytesMax: number): Fault => new Fault("payload_too_large", `body: larger than ${bytesMax} bytes`);

interface AwaitedBody {
  readonly tenant: string;
  readonly begunAt: number;
  reject(fault: Fault): void;
}

/**
 * Reads bodies that come in one piece. They have no timers and counts of their own, since nearly all are complete at once. A
 * periodic sweep refuses those that are late, and those of tenants that have more than their share of them.
 */
function createOnePieceReader(msMax: number) {
  const waiting = new Set<AwaitedBody>();
  let sweeping: ReturnType<typeof setInterval> | null = null;

  function sweep(): void {
    const share = createFairShare({ size: MAX.bodiesInOnePiece });
    const latest = performance.now() - msMax;
    for (const body of waiting) {
      if (body.begunAt <= latest) refuse(body, lateBody(`did not arrive within ${msMax / 1000} seconds`));
      else if (share.take(body.tenant) !== null) refuse(body, tooMany({ closesConnection: true }));
    }
    if (waiting.size > 0 || sweeping === null) return;
    clearInterval(sweeping);
    sweeping = null;
  }

  function refuse(body: AwaitedBody, fault: Fault): void {
    waiting.delete(body);
    body.reject(fault);
  }

  /** @throws Fault `unavailable` when the tenant has too many late bodies; `invalid_request` for a body that is too late */
  return (request: Request, tenant: string): Promise<Uint8Array> =>
    new Promise((resolve, reject) => {
      const body = { tenant, begunAt: performance.now(), reject };
      waiting.add(body);
      sweeping ??= setInterval(sweep, Math.min(msMax / 10, 1_000)).unref();
      const complete = (bytes: Uint8Array) => {
        waiting.delete(body);
        resolve(bytes);
      };
      request.bytes().then(complete, async (error) => {
        waiting.delete(body);
        // Thousands of connections may close in one moment.
        await turnOf(tenant);
        reject(endedEarly(error));
      });
    });
}

const tooMany = (detail: FaultDetail = {}): Fault =>
  new Fault("unavailable", "too many large bodies are coming in", { retryAfterSeconds: 5, ...detail });

const lateBody = (problem: string): Fault =>
  new Fault("invalid_request", `body: ${problem}`, { closesConnection: true });

type TimeLimits = Pick<IntakeLimits, "msMax" | "silenceMsMax">;

/** Calls `abort` when the body has taken too long or been silent too long. */
function startTimers({ msMax, silenceMsMax }: TimeLimits, abort: (late: Fault) => void) {
  const whole = setTimeout(() => abort(lateBody(`did not arrive within ${msMax / 1000} seconds`)), msMax);
  const silence = setTimeout(() => abort(lateBody(`no data for ${silenceMsMax / 1000} seconds`)), silenceMsMax);
  return {
    received: () => silence.refresh(),
    stop() {
      clearTimeout(whole);
      clearTimeout(silence);
    },
  };
}

interface IncomingBody {
  readonly tenant: string;
  readonly holding: Holding;
  /** Aborted with a Fault when the body is not to be read on. */
  readonly aborting: AbortController;
}

interface Sizes {
  /** The declared length, at most `bytesMax`; null when none is declared. */
  readonly declared: number | null;
  readonly bytesMax: number;
}

/**
 * Reads a body to its end. The next piece is read only after the last one has had its turn; until then flow control keeps the
 * rest with its sender. Otherwise 80 bodies that arrive together would bring 63 MB in one turn of the event loop. After each piece
 * `arrived` is called, which throws when the body is not to be read on.
 */
async function readInto(
  gathered: BodyBuffer,
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
 * Null when the head declares no length. Two headers, which the runtime joins ("3, 3"), are none either.
 * @throws Fault `invalid_request` that closes the connection, since it is unknown where the next request begins
 */
export function declaredLength(headers: Headers): number | null {
  const header = headers.get("content-length");
  if (header === null) return null;
  if (LENGTH.test(header)) return Number(header);
  throw new Fault("invalid_request", "content-length: must be one number of bytes", { closesConnection: true });
}

/** Whether the body is sent in chunks, so that its length is known only at its end. */
export const isChunked = (headers: Headers): boolean => headers.has("transfer-encoding");

export interface DrainLimits extends TimeLimits {
  /** The most bytes of one body. */
  readonly bytesMax: number;
  /** The most bodies at a time, shared out by caller. All unknown callers count as one. */
  readonly countMax: number;
}

const DRAIN_LIMITS: DrainLimits = {
  bytesMax: MAX.drainedBytes,
  msMax: MAX.drainedMs,
  silenceMsMax: MAX.drainedSilenceMs,
  countMax: MAX.drained,
};

/**
 * Drains the rest of a request's body when its response does not need it. A client that writes its whole body before it reads
 * would lose a response that closes the connection earlier: unread bytes turn the close into a reset (RFC 9112, section 9.6).
 * So the rest is read and dropped first, within bounds; beyond them the connection is closed as it is.
 *
 * If the connection stays open, a body with a declared length needs no draining: the server drops the rest itself after the
 * response, and a client that reads while it writes gets the response at once (measured on Bun 1.4.5: 256 MiB, memory flat).
 * A chunked body would be parsed without end, so if it does not end within bounds, the connection ends with the response. A
 * client of HTTP/1.0 that does not send `Connection: close` can't be told from one of HTTP/1.1.
 */
export function createBodyDrainer(limits: DrainLimits = DRAIN_LIMITS) {
  const inFlight = createFairShare({ size: limits.countMax });
  const chunked = createFairShare({ size: MAX.drainedChunked });
  const chunkedLimits = { ...limits, silenceMsMax: MAX.drainedChunkedSilenceMs };

  /** @returns whether the body was read to its end */
  async function drainWhole(request: Request, caller: string, share: FairShare, within: DrainLimits): Promise<boolean> {
    const body = unreadBody(request, limits.bytesMax);
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
   * Reads and drops the rest of a request's body, in the caller's share. One that another reader holds or has read whole is left to
   * that reader, which releases it if it gives up. Returns at once when the connection stays open. Never rejects.
   */
  return (request: Request, response: Response, caller: string): Promise<unknown> | undefined => {
    if (isChunked(request.headers)) return drainChunks(request, response, caller);
    return closes(request) || closes(response) ? drainWhole(request, caller, inFlight, limits) : undefined;
  };
}

/** The body as far as it is unread; null when nothing is left, or more than may be drained. */
function unreadBody({ headers, body }: Request, bytesMax: number): Request["body"] {
  const declared = headers.get("content-length") ?? "0";
  // A malformed length was refused, and what follows its head is not known.
  if (!(Number(declared) <= bytesMax)) return null;
  return body === null || body.locked ? null : body;
}

function closes({ headers }: Request | Response): boolean {
  const connection = headers.get("connection");
  return connection !== null && /(^|,)\s*close\s*(,|$)/i.test(connection);
}

async function drain(reader: Pick<BodyReader, "read" | "cancel">, limits: DrainLimits): Promise<boolean> {
  let isCancelled = false;
  const giveUp = () => {
    isCancelled = true;
    void reader.cancel().catch(() => {});
  };
  const timers = startTimers(limits, giveUp);
  try {
    for (let bytes = 0; bytes <= limits.bytesMax; ) {
      const { done, value } = await reader.read();
      if (done || value === undefined) return !isCancelled;
      timers.received();
      bytes += value.byteLength;
      // A pending read is given each chunk by itself, for 5 µs; chunks that arrive between reads are joined, for a hundredth.
      await new Promise(setImmediate);
    }
    giveUp();
    return false;
  } finally {
    timers.stop();
  }
}
