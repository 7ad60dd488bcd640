// Removes the tools that the policy denies from `tools/list` answers, in a JSON body or an event stream. A stream's events are
// parsed and written again, so that clients that end lines differently still see the same events. What can't be parsed, or is
// too long to buffer, does not pass. Long input is parsed on a compute thread, or piecewise in turns.

import type { Chunks } from "../../http/client/body.ts";
import { AT_ONCE_BYTES, compute } from "../../kernel/compute.ts";
import { eachInTurns, inTurn } from "../../kernel/turns.ts";
import type { BodyTask } from "../../wire/body.ts";
import { EventStreamReader, Utf8Reader } from "../../wire/event-stream.ts";
import {
  type DeniedTools,
  EVENT_TOOLS,
  type FoundTools,
  TOOLS,
  UnreadableAnswer,
  withoutTools,
} from "../../wire/tool-list.ts";
import type { TenantBudget } from "./response.ts";

export interface FilterOptions {
  readonly isDenied: DeniedTools;
  /** The most bytes of one body or event. */
  readonly bytesMax: number;
  /** The budget of memory that all buffered bodies and events of the tenant share. */
  readonly memory: TenantBudget;
  /** The tenant for whom turns and compute threads are used. */
  readonly tenant: string;
  /** Aborts the work when the exchange ends. */
  readonly signal: AbortSignal;
}

const LINE_FEED = 0x0a;
const OPEN_BRACKET = 0x5b;
const BUFFER_BYTES_FIRST = 4096;
/** Largest piece sent to the caller in one turn, since each piece is hashed on its way. */
const PIECE_BYTES = 128 * 1024;
/** Bytes of an event stream that are parsed, or written, in one turn. */
const READ_BYTES = 16_384;
/** The work of judging one tool, in the units of `eachInTurns`. */
const JUDGE_WORK = 8_000;

/** A growing buffer that takes its memory from the tenant's budget. */
function createTenantBuffer(memory: TenantBudget, bytesMax: number) {
  let bytes = new Uint8Array();
  let size = 0;
  /** Memory taken from the budget: the size of `bytes`, also while they are lent. */
  let counted = 0;

  function grow(room: number): void {
    const taken = memory.take(room);
    if (taken < room) {
      memory.giveBack(taken);
      throw new UnreadableAnswer("too much is being filtered");
    }
    // Not zeroed, so that memory costs nothing until it is written to.
    const larger = Buffer.allocUnsafeSlow(room);
    larger.set(bytes.subarray(0, size));
    memory.giveBack(counted);
    counted = room;
    bytes = larger;
  }

  /** Releases the memory. Views returned by `all` stay valid. */
  function clear(): void {
    memory.giveBack(counted);
    bytes = new Uint8Array();
    [size, counted] = [0, 0];
  }

  return {
    all: () => bytes.subarray(0, size),
    /** The whole content, to be moved to another thread. Call nothing else until `takeBack`. */
    lend(): Uint8Array {
      const lent = bytes.subarray(0, size);
      bytes = new Uint8Array();
      return lent;
    },
    takeBack({ buffer }: Uint8Array): void {
      bytes = new Uint8Array(buffer as ArrayBuffer);
    },
    add(part: Uint8Array): void {
      const wanted = size + part.length;
      if (wanted > bytesMax) throw new UnreadableAnswer("too long to be filtered");
      if (wanted > bytes.length) grow(Math.min(bytesMax, Math.max(wanted, 2 * bytes.length, BUFFER_BYTES_FIRST)));
      bytes.set(part, size);
      size = wanted;
    },
    clear,
    /** Empties the buffer, and keeps small memory. Views returned by `all` are overwritten. */
    reuse(): void {
      if (bytes.length > BUFFER_BYTES_FIRST) clear();
      size = 0;
    },
  };
}

type TenantBuffer = ReturnType<typeof createTenantBuffer>;

/** Runs the task on the buffers' content: here if it is short, else on a compute thread. */
async function findTools(held: readonly TenantBuffer[], task: BodyTask<FoundTools>, { tenant, signal }: FilterOptions) {
  const moved = held.map((each) => each.lend());
  const bytes = moved.reduce((sum, { length }) => sum + length, 0);
  const { result, parts } =
    bytes <= AT_ONCE_BYTES ? task.run(moved) : await compute(task, moved, { tenant, bytes, moved, signal });
  for (const [at, part] of parts.entries()) held[at]?.takeBack(part);
  return result;
}

/** The parts of a text that remain without its denied tools. @throws UnreadableAnswer */
async function keptParts(text: Uint8Array, found: FoundTools, options: FilterOptions): Promise<readonly Uint8Array[]> {
  if (typeof found === "string") throw new UnreadableAnswer(found);
  const { isDenied } = options;
  const tools = found.flatMap((list) => list.tools);
  const denied = new Set<(typeof tools)[number]>();
  await eachInTurns(tools, options.tenant, (tool) => {
    options.signal.throwIfAborted();
    if (tool.name !== null && isDenied(tool.name)) denied.add(tool);
    return JUDGE_WORK;
  });
  return withoutTools(text, found, denied, isDenied.listIsPrivate === true);
}

/** Many streams may have input at once, so the work on it is done in turns. @throws the signal's reason */
async function nextTurn({ tenant, signal }: FilterOptions): Promise<void> {
  await inTurn(tenant, () => signal.throwIfAborted());
}

/** Splits a long piece into smaller ones for the caller. */
async function* inPieces(chunks: Chunks, tenant: string): Chunks {
  for await (const chunk of chunks) {
    for (let at = 0; at < chunk.length; at += PIECE_BYTES) {
      const piece = chunk.subarray(at, at + PIECE_BYTES);
      yield at === 0 ? piece : await inTurn(tenant, () => piece);
    }
  }
}

/** Filters a body that is one JSON text. */
export function filterJson(options: FilterOptions): (chunks: Chunks) => Chunks {
  const { bytesMax, memory, tenant } = options;
  async function* filtered(chunks: Chunks): Chunks {
    const [text, left] = [createTenantBuffer(memory, bytesMax), createTenantBuffer(memory, Number.POSITIVE_INFINITY)];
    try {
      const utf8 = new Utf8Reader();
      for await (const chunk of chunks) text.add(utf8.read(chunk));
      text.add(utf8.end());
      await nextTurn(options);
      const found = await findTools([text], TOOLS, options);
      const parts = await keptParts(text.all(), found, options);
      if (parts.length > 1) for (const part of parts) left.add(part);
      yield parts.length > 1 ? left.all() : text.all();
    } finally {
      text.clear();
      left.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), tenant);
}

/** Filters a body that is an event stream. */
export function filterEvents(options: FilterOptions): (chunks: Chunks) => Chunks {
  async function* filtered(chunks: Chunks): Chunks {
    const utf8 = new Utf8Reader();
    const events = createEventFilter(options);
    /** Sends on the output of the work so far, even when the work fails. */
    async function* outputOf(work: Promise<void>): Chunks {
      const problem = await work.then(
        () => null,
        (error: unknown) => ({ error }),
      );
      const { passed } = events;
      if (passed.all().length > 0) yield passed.all();
      passed.clear();
      if (problem !== null) throw problem.error;
    }
    try {
      for await (const chunk of chunks) yield* outputOf(events.read(utf8.read(chunk)));
      yield* outputOf(events.finish(utf8.end()));
    } finally {
      events.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), options.tenant);
}

const COMMENT = Buffer.from(":\n");
const DATA_FIELD = Buffer.from("data: ");
const LINE_END = Buffer.from("\n");

function createEventFilter(options: FilterOptions) {
  const { bytesMax, memory } = options;
  const [data, otherFields] = [createTenantBuffer(memory, bytesMax), createTenantBuffer(memory, bytesMax)];
  const passed = createTenantBuffer(memory, Number.POSITIVE_INFINITY);
  let ended: { readonly hasData: boolean } | null = null;
  const reader = new EventStreamReader({
    data: data.add,
    other: otherFields.add,
    // A comment is a keep-alive. Its text is not passed on, since no client reads it.
    comment: () => passed.add(COMMENT),
    end(_, hasData) {
      ended = { hasData };
    },
  });

  /** The parts of the event's data that may pass. @throws UnreadableAnswer */
  async function keptData(): Promise<readonly Uint8Array[]> {
    // Without a `[` there is no JSON list, so the event has no tools.
    if (![data, otherFields].some((held) => held.all().includes(OPEN_BRACKET))) return [data.all()];
    const found = await findTools([data, otherFields], EVENT_TOOLS, options);
    return keptParts(data.all(), found, options);
  }

  /** Writes each line of the data as a `data:` field of its own. */
  async function addLines(text: Uint8Array): Promise<void> {
    let until = READ_BYTES;
    for (let at = 0; ; ) {
      const found = text.indexOf(LINE_FEED, at);
      const end = found === -1 ? text.length : found + 1;
      passed.add(text.subarray(at, end));
      if (found === -1) return;
      passed.add(DATA_FIELD);
      if (end > until) {
        until = end + READ_BYTES;
        await nextTurn(options);
      }
      at = end;
    }
  }

  async function writeEnded(hasData: boolean): Promise<void> {
    const parts = await keptData();
    passed.add(otherFields.all());
    if (hasData) {
      passed.add(DATA_FIELD);
      for (const part of parts) await addLines(part);
      passed.add(LINE_END);
    }
    passed.add(LINE_END);
    data.reuse();
    otherFields.reuse();
    ended = null;
  }

  async function read(text: Uint8Array): Promise<void> {
    for (let at = 0; at < text.length; ) {
      await nextTurn(options);
      for (const until = Math.min(at + READ_BYTES, text.length); at < until; ) {
        at += reader.feedEvent(text.subarray(at, until));
        if (ended !== null) await writeEnded(ended.hasData);
      }
    }
  }

  return {
    read,
    /** Parses the last text, and its last event even without a blank line, since some clients accept such an event. */
    async finish(text: Uint8Array): Promise<void> {
      await read(text);
      reader.finish();
      if (ended !== null) await writeEnded((ended as { readonly hasData: boolean }).hasData);
    },
    /** The filtered output that has not been sent on yet. */
    passed,
    clear(): void {
      for (const held of [data, otherFields, passed]) held.clear();
    },
  };
}
