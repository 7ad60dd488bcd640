// Removes tools from the answer to `tools/list`: what is left stays as the server wrote it. The server chooses the answer's
// length and content, so the tools are found on another thread where the answer is long.

import { asBuffer } from "../core/bytes.ts";
import { MAX } from "../kernel/limits.ts";
import { type BodyTask, wholeBodyTask } from "./body.ts";
import { arrayOutline, type ByteRange, type FoundKey, objectOutline, skipSpace, watch } from "./json-scan.ts";

const ANSWER_KEYS = [watch("result", watch("tools"), watch("cacheScope"))];
const NOTHING = new Uint8Array();
const PRIVATE = Buffer.from('"private"');
const SAYS_PRIVATE = Buffer.from('"cacheScope":"private",');
const TOOL_KEYS = [watch("name")];

/** No rule can name more characters than this, so of a longer name only this much is judged. */
const NAME_UNITS_MAX = 2 * MAX.policyEntryCharacters + 1;
/** The longest way to write a unit: `\u0061`. */
const UNIT_BYTES_MAX = 6;

const QUOTE = 0x22;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const LETTER_U = 0x75;
const OPEN_BRACE = 0x7b;

/** Which tools a caller may not see. */
export interface DeniedTools {
  (tool: string): boolean;
  /** The list says to caches that it is this caller's alone (MCP 2026-07-28). */
  readonly listIsPrivate?: boolean;
}

interface Edit extends ByteRange {
  readonly insert?: Uint8Array;
}

interface FoundTool extends ByteRange {
  /** As much of it as a rule may name; null for what has none. */
  readonly name: string | null;
}

interface ToolList {
  readonly tools: readonly FoundTool[];
  /** What makes it its caller's alone; null where nobody can say how. */
  readonly privacy: ByteRange | null;
}

/** The lists of a text; a text: why it can't be read. */
export type FoundTools = readonly ToolList[] | string;

/** A text can be read in more than one way, so nobody can say which tools it would show. */
export class UnreadableAnswer extends Error {}

/**
 * The lists of tools in a JSON-RPC message, or a batch. None when it is neither an object nor an array. Text that is no
 * proper JSON counts as unreadable, since some clients may read it all the same: some decoders take NaN, or the first of two
 * texts.
 */
export function findTools(text: Uint8Array): FoundTools {
  try {
    let toolsLeft = MAX.listedTools;
    return answersIn(text).flatMap(([result]) => {
      const range = toolsOf(text, result);
      if (range === null) return [];
      const { items, problem } = arrayOutline(text, range.start, toolsLeft, TOOL_KEYS);
      if (problem !== null) throw new UnreadableAnswer(problem);
      toolsLeft -= items.length;
      const tools = items.map(({ start, end, findings: [name] }) => ({ start, end, name: nameOf(text, name) }));
      return [{ tools, privacy: privacyOf(result) }];
    });
  } catch (error) {
    if (error instanceof UnreadableAnswer) return error.message;
    throw error;
  }
}

export const TOOLS = wholeBodyTask("tools", findTools);

/**
 * Not ends of lines by the standard, but for clients that split text as Python's `splitlines` does: VT, FF, FS, GS, RS, NEL,
 * LS and PS. And a byte order mark, which some clients take away elsewhere than at the start of the stream.
 */
const AMBIGUOUS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\ufeff"];

/**
 * The lists of tools in an event's data. A client that splits lines at other characters than the standard reads other lines,
 * and may take for data what the standard does not. Inside a string of a JSON text that is harmless: what such a client reads
 * there is not JSON.
 */
function findInEvent(data: Uint8Array, fields: Uint8Array): FoundTools {
  const first = data[skipSpace(data, 0)];
  const searched = first === OPEN_BRACE || first === OPEN_BRACKET ? [fields] : [fields, data];
  const isAmbiguous = searched.map(asBuffer).some((bytes) => AMBIGUOUS.some((found) => bytes.includes(found)));
  return isAmbiguous ? "lines that clients do not agree about" : findTools(data);
}

/** In an event's data and its other fields. */
export const EVENT_TOOLS: BodyTask<FoundTools> = {
  name: "tools of an event",
  run(parts) {
    const [data = NOTHING, fields = NOTHING] = parts;
    return { result: findInEvent(data, fields), parts };
  },
  moved: ({ parts }) => parts,
};

/** The parts that are left of a text without these tools. @throws UnreadableAnswer */
export function withoutTools(
  text: Uint8Array,
  lists: readonly ToolList[],
  denied: ReadonlySet<FoundTool>,
  isPrivate: boolean,
): readonly Uint8Array[] {
  const edits = lists.flatMap(({ tools, privacy }) => [
    ...(isPrivate ? [madePrivate(privacy)] : []),
    ...cuts(tools, denied),
  ]);
  const parts: Uint8Array[] = [];
  let at = 0;
  for (const { start, end, insert = NOTHING } of edits.sort((a, b) => a.start - b.start)) {
    parts.push(text.subarray(at, start), insert);
    at = end;
  }
  return [...parts, text.subarray(at)].filter(({ length }) => length > 0);
}

/** Where the result says who may cache it: its own `cacheScope`, or nothing in front of its first member. */
function privacyOf(result: FoundKey | undefined): ByteRange | null {
  const scope = result?.inside[1];
  if (scope?.isRepeated || scope?.isMiscased) return null;
  const first = (result?.value?.start ?? 0) + 1;
  return scope?.value ?? { start: first, end: first };
}

function madePrivate(range: ByteRange | null): Edit {
  if (range === null) throw new UnreadableAnswer("a key given twice");
  return { ...range, insert: range.start === range.end ? SAYS_PRIVATE : PRIVATE };
}

/** The watched keys found in each answer. */
function answersIn(text: Uint8Array): readonly (readonly FoundKey[])[] {
  const start = skipSpace(text, 0);
  if (text[start] === OPEN_BRACKET) {
    const { items, end, problem } = arrayOutline(text, start, MAX.listedAnswers, ANSWER_KEYS);
    checkEnd(text, end, problem);
    return items.map(({ findings }) => findings);
  }
  if (text[start] !== OPEN_BRACE) return [];
  const { findings, end, problem } = objectOutline(text, start, ANSWER_KEYS);
  checkEnd(text, end, problem);
  return [findings];
}

function checkEnd(text: Uint8Array, end: number, problem: string | null): void {
  if (problem !== null) throw new UnreadableAnswer(problem);
  if (skipSpace(text, end) < text.length) throw new UnreadableAnswer("more than one text");
}

/** Where the list of tools stands; null when there is none. */
function toolsOf(text: Uint8Array, result: FoundKey | undefined): ByteRange | null {
  const tools = result?.inside[0];
  const isAmbiguous = [result, tools].some((found) => found?.isRepeated || found?.isMiscased);
  if (isAmbiguous) throw new UnreadableAnswer("a key given twice");
  return tools?.value != null && text[tools.value.start] === OPEN_BRACKET ? tools.value : null;
}

/** A cut for each denied tool, with the comma that separates it from what stays. */
function cuts(tools: readonly FoundTool[], denied: ReadonlySet<FoundTool>): Edit[] {
  let hasKept = false;
  return tools.flatMap((tool, index) => {
    if (!denied.has(tool)) {
      hasKept = true;
      return [];
    }
    // After a tool that stays, the cut begins at its end and takes the comma in front; before the first that stays, it
    // takes the comma behind.
    const [before, after] = [tools[index - 1], tools[index + 1]];
    if (hasKept && before !== undefined) return [{ start: before.end, end: tool.end }];
    return [{ start: tool.start, end: after?.start ?? tool.end }];
  });
}

/** Of equal keys the last one counts, and one in another letter case does not. */
function nameOf(text: Uint8Array, found: FoundKey | undefined): string | null {
  const name = found?.value ?? null;
  return name !== null && text[name.start] === QUOTE ? readName(text, name) : null;
}

/** The part of the name that a rule may name. */
function readName(text: Uint8Array, { start, end }: ByteRange): string {
  const least = start + 1 + UNIT_BYTES_MAX * NAME_UNITS_MAX;
  if (end <= least) return parseName(text.subarray(start, end));
  let at = start + 1;
  while (at < least) at += text[at] === BACKSLASH ? (text[at + 1] === LETTER_U ? UNIT_BYTES_MAX : 2) : 1;
  return parseName(Buffer.concat([text.subarray(start, at), Buffer.from('"')]));
}

function parseName(quoted: Uint8Array): string {
  return String(JSON.parse(new TextDecoder().decode(quoted))).slice(0, NAME_UNITS_MAX);
}
