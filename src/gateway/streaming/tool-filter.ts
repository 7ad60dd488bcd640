// Removes the tools that the policy denies from responses to `tools/list`, in a JSON body or in an event stream. Events are
// parsed and serialised again, so that all clients read the same ones, however they split lines. A text that can't be read, or
// is too long to be held, does not pass. Long texts are read on another thread, or piece by piece in turns.
import type { Chunks } from "../../http/client/body.ts";
import { AT_ONCE_BYTES, compute } from "../../kernel/compute.ts";
import { eachInTurns, inTurn } from "../../kernel/turns.ts";
import type { BodyTask } from "../../wire/body.ts";
import { EventStreamReader, Utf8Reader } from "../../wire/event-stream.ts";
import type { DeniedTools, FoundTools } from "../../wire/tool-list.ts";
import { EVENT_TOOLS, JSON_TOOLS, TOOLS, TooLongAnswer, UnreadableAnswer, withoutTools } from "../../wire/tool-list.ts";
import type { TenantBudget } from "./response.ts";

export interface FilterOptions {
  readonly isDenied: DeniedTools;
  /** The most bytes of one body or event. */
  readonly bytesMax: number;
  /** The memory that all held bodies and events of the tenant share. */
  readonly memory: TenantBudget;
  readonly tenant: string;
  /** Aborted when the exchange ends. */
  readonly signal: AbortSignal;
}

const LINE_FEED = 0x0a;
const OPEN_BRACKET = 0x5b;
const HELD_BYTES_FIRST = 4096;
/** The largest piece that goes to the caller at once: each piece is hashed on its way. */
const PIECE_BYTES = 128 * 1024;
/** Bytes of an event stream that are read in one turn, and of an event that are written in one. */
const READ_BYTES = 16_384;
/** The cost of judging one tool, in the units of `eachInTurns`. */
const JUDGE_WORK = 8_000;

/** A growing buffer, within the memory of the tenant. */
function createHeld(memory: TenantBudget, bytesMax: number) {
  let bytes = new Uint8Array();
  let size = 0;
  /** The tenant's memory that is taken for `bytes`, also while they are lent. */
  let counted = 0;

  function grow(room: number): void {
    const taken = memory.take(room);
    if (taken < room) {
      memory.giveBack(taken);
      throw new UnreadableAnswer("too much is being filtered");
    }
    // Unzeroed memory costs nothing until it is written to.
    const larger = Buffer.allocUnsafeSlow(room);
    larger.set(bytes.subarray(0, size));
    memory.giveBack(counted);
    counted = room;
    bytes = larger;
  }

  /** Views that `all` has returned stay valid. */
  function clear(): void {
    memory.giveBack(counted);
    bytes = new Uint8Array();
    [size, counted] = [0, 0];
  }

  return {
    all: () => bytes.subarray(0, size),
    /** All bytes, for another thread. No other method may be called before `takeBack`. */
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
      if (wanted > bytesMax) throw new TooLongAnswer("too long to be filtered");
      if (wanted > bytes.length) grow(Math.min(bytesMax, Math.max(wanted, 2 * bytes.length, HELD_BYTES_FIRST)));
      bytes.set(part, size);
      size = wanted;
    },
    clear,
    /** Empties the buffer. Views that `all` has returned must not be used any more. */
    reuse(): void {
      if (bytes.length > HELD_BYTES_FIRST) clear();
      size = 0;
    },
  };
}

type HeldBytes = ReturnType<typeof createHeld>;

/** Runs the task on the held bytes, on another thread if they are long. @throws as `compute` does; the bytes are lost then */
async function foundIn(held: readonly HeldBytes[], task: BodyTask<FoundTools>, { tenant, signal }: FilterOptions) {
  const moved = held.map((each) => each.lend());
  const bytes = moved.reduce((sum, { length }) => sum + length, 0);
  const { result, parts } =
    bytes <= AT_ONCE_BYTES ? task.run(moved) : await compute(task, moved, { tenant, bytes, moved, signal });
  for (const [at, part] of parts.entries()) held[at]?.takeBack(part);
  return result;
}

/** The text, in which these tools were found, without the denied ones, in parts. @throws UnreadableAnswer */
async function leftOf(text: Uint8Array, found: FoundTools, options: FilterOptions): Promise<readonly Uint8Array[]> {
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

/** Waits for the tenant's turn, since many streams may bring data at once. @throws the reason of the signal */
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

/** Filters a body that is one text. @param isJson whether clients take it for JSON, so that nothing else passes */
export function filterJson(options: FilterOptions, isJson: boolean = true): (chunks: Chunks) => Chunks {
  const { bytesMax, memory, tenant } = options;
  async function* filtered(chunks: Chunks): Chunks {
    const [text, left] = [createHeld(memory, bytesMax), createHeld(memory, Number.POSITIVE_INFINITY)];
    try {
      const utf8 = new Utf8Reader();
      for await (const chunk of chunks) text.add(utf8.read(chunk));
      text.add(utf8.end());
      await nextTurn(options);
      const found = await foundIn([text], isJson ? JSON_TOOLS : TOOLS, options);
      const parts = await leftOf(text.all(), found, options);
      if (parts.length > 1) for (const part of parts) left.add(part);
      yield parts.length > 1 ? left.all() : text.all();
    } finally {
      text.clear();
      left.clear();
    }
  }
  return (chunks) => inPieces(filtered(chunks), tenant);
}

/** For a body of a content type that only some clients take for an event stream: an empty one passes. */
export async function* refuseAll(chunks: Chunks): Chunks {
  for await (const chunk of chunks) {
    if (chunk.length > 0) throw new UnreadableAnswer("a content type that clients read differently");
    yield chunk;
  }
}

export function filterEvents(options: FilterOptions): (chunks: Chunks) => Chunks {
  async function* filtered(chunks: Chunks): Chunks {
    const utf8 = new Utf8Reader();
    const events = createEventFilter(options);
    /** The bytes that have passed when the work ends, even if it fails. @throws the error of the work, after them */
    async function* passedBy(work: Promise<void>): Chunks {
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
      for await (const chunk of chunks) yield* passedBy(events.read(utf8.read(chunk)));
      yield* passedBy(events.finish(utf8.end()));
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
  const [data, others] = [createHeld(memory, bytesMax), createHeld(memory, bytesMax)];
  const passed = createHeld(memory, Number.POSITIVE_INFINITY);
  let ended: { readonly hasData: boolean } | null = null;
  const reader = new EventStreamReader({
    data: data.add,
    other: others.add,
    // A comment keeps the connection alive; its text is dropped.
    comment: () => passed.add(COMMENT),
    end(_, hasData) {
      ended = { hasData };
    },
  });

  /** The part of an event's data that may pass. @throws UnreadableAnswer */
  async function leftOfData(): Promise<readonly Uint8Array[]> {
    // Without a `[` there is no list, so no tool can be in the event.
    if (![data, others].some((held) => held.all().includes(OPEN_BRACKET))) return [data.all()];
    const found = await foundIn([data, others], EVENT_TOOLS, options);
    return leftOf(data.all(), found, options);
  }

  /** Writes each line of the data as a field of its own. */
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
    const parts = await leftOfData();
    passed.add(others.all());
    if (hasData) {
      passed.add(DATA_FIELD);
      for (const part of parts) await addLines(part);
      passed.add(LINE_END);
    }
    passed.add(LINE_END);
    data.reuse();
    others.reuse();
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
    /** Filters the last event even if no blank line ends it, since some clients read it. */
    async finish(text: Uint8Array): Promise<void> {
      await read(text);
      reader.finish();
      if (ended !== null) await writeEnded((ended as { readonly hasData: boolean }).hasData);
    },
    passed,
    clear(): void {
      for (const held of [data, others, passed]) held.clear();
    },
  };
}
