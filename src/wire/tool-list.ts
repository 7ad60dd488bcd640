// Removes the tools that a caller may not see from a response to `tools/list`. The rest stays byte for byte as the server wrote
// it. The server chooses the length and content of the response, so a long one is searched on another thread.
import { asBuffer } from "../core/bytes.ts";
import { MAX } from "../kernel/limits.ts";
import { type BodyTask, wholeBodyTask } from "./body.ts";
import { arrayOutline, type ByteRange, type FoundKey, objectOutline, skipSpace, watch } from "./json-scan.ts";

const ANSWER_KEYS = [watch("result", watch("tools"), watch("cacheScope"))];
const NOTHING = new Uint8Array();
const PRIVATE = Buffer.from('"private"');
const SAYS_PRIVATE = Buffer.from('"cacheScope":"private",');
const TOOL_KEYS = [watch("name")];

/** No rule can name more characters than this, so the rest of a longer name is not judged. */
const NAME_UNITS_MAX = 2 * MAX.policyEntryCharacters + 1;
/** The longest way to write a UTF-16 unit: `\u0061`. */
const UNIT_BYTES_MAX = 6;

const [QUOTE, OPEN_BRACKET, BACKSLASH, LETTER_U, OPEN_BRACE] = [0x22, 0x5b, 0x5c, 0x75, 0x7b];

/** Which tools a caller may not see. */
export interface DeniedTools {
  (tool: string): boolean;
  /** Whether caches must be told that the list is for this caller alone (MCP 2026-07-28). */
  readonly listIsPrivate?: boolean;
}

interface Edit extends ByteRange {
  readonly insert?: Uint8Array;
}

interface FoundTool extends ByteRange {
  /** As much of the name as a rule can hold; null if the tool has no name. */
  readonly name: string | null;
}

interface ToolList {
  readonly tools: readonly FoundTool[];
  /** Where `"private"` is written; null if the key is ambiguous. */
  readonly cacheScope: ByteRange | null;
}

/** The tool lists of a text, or the reason why it can't be read. */
export type FoundTools = readonly ToolList[] | string;

/** The text can be read in more than one way, so it is unknown which tools a client would see. */
export class UnreadableAnswer extends Error {}

/** The text is longer than what is read to find its tools. */
export class TooLongAnswer extends UnreadableAnswer {}

/**
 * Finds the tool lists in a JSON-RPC message or a batch; none if the text is neither an object nor an array. Malformed JSON
 * counts as unreadable, since lenient clients may still read it: some decoders accept NaN, or read the first of two texts.
 * @param isJson whether clients take the text for JSON, so that any other text counts as malformed, unless it is blank
 */
export function findTools(text: Uint8Array, isJson: boolean = false): FoundTools {
  try {
    let toolsLeft = MAX.listedTools;
    return answersIn(text, isJson).flatMap(([result]) => {
      const range = toolsOf(text, result);
      if (range === null) return [];
      const { items, problem } = arrayOutline(text, range.start, toolsLeft, TOOL_KEYS);
      if (problem !== null) throw new UnreadableAnswer(problem);
      toolsLeft -= items.length;
      const tools = items.map(({ start, end, findings: [name] }) => ({ start, end, name: nameOf(text, name) }));
      return [{ tools, cacheScope: cacheScopeOf(result) }];
    });
  } catch (error) {
    if (error instanceof UnreadableAnswer) return error.message;
    throw error;
  }
}

export const TOOLS = wholeBodyTask<FoundTools>("tools", (text) => findTools(text));
export const JSON_TOOLS = wholeBodyTask<FoundTools>("tools of JSON", (text) => findTools(text, true));

/**
 * Characters that end no line by the standard, but do in clients that split text like Python's `splitlines`: VT, FF, FS, GS, RS,
 * NEL, LS and PS. Also the byte order mark, which some clients remove in the middle of a stream too.
 */
const AMBIGUOUS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\ufeff"];

/**
 * Finds the tool lists in an event's data. A client that splits lines at more characters than the standard may read other data
 * than the standard says. Such a character inside JSON data is harmless: what such a client reads then is not JSON.
 */
function findInEvent(data: Uint8Array, fields: Uint8Array): FoundTools {
  const first = data[skipSpace(data, 0)];
  const searched = first === OPEN_BRACE || first === OPEN_BRACKET ? [fields] : [fields, data];
  const isAmbiguous = searched.map(asBuffer).some((bytes) => AMBIGUOUS.some((found) => bytes.includes(found)));
  return isAmbiguous ? "lines that clients split differently" : findTools(data);
}

/** Its input is an event's data and the event's other fields. */
export const EVENT_TOOLS: BodyTask<FoundTools> = {
  name: "tools of an event",
  run(parts) {
    const [data = NOTHING, fields = NOTHING] = parts;
    return { result: findInEvent(data, fields), parts };
  },
  moved: ({ parts }) => parts,
};

/** The text without the denied tools, in parts. @throws UnreadableAnswer */
export function withoutTools(
  text: Uint8Array,
  lists: readonly ToolList[],
  denied: ReadonlySet<FoundTool>,
  isPrivate: boolean,
): readonly Uint8Array[] {
  const edits = lists.flatMap(({ tools, cacheScope }) => [
    ...(isPrivate ? [madePrivate(cacheScope)] : []),
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

/** The range of the value of `cacheScope` in the result; an empty range before the first member if there is none. */
function cacheScopeOf(result: FoundKey | undefined): ByteRange | null {
  const scope = result?.inside[1];
  if (scope?.isRepeated || scope?.isMiscased) return null;
  const first = (result?.value?.start ?? 0) + 1;
  return scope?.value ?? { start: first, end: first };
}

function madePrivate(range: ByteRange | null): Edit {
  if (range === null) throw new UnreadableAnswer("a key given twice");
  return { ...range, insert: range.start === range.end ? SAYS_PRIVATE : PRIVATE };
}

/** What is found of the watched keys in each response of the text. */
function answersIn(text: Uint8Array, isJson: boolean): readonly (readonly FoundKey[])[] {
  const start = skipSpace(text, 0);
  if (text[start] === OPEN_BRACKET) {
    const { items, end, problem } = arrayOutline(text, start, MAX.listedAnswers, ANSWER_KEYS);
    checkEnd(text, end, problem);
    return items.map(({ findings }) => findings);
  }
  if (text[start] !== OPEN_BRACE) {
    if (isJson && start < text.length) throw new UnreadableAnswer("neither a JSON object nor an array");
    return [];
  }
  const { findings, end, problem } = objectOutline(text, start, ANSWER_KEYS);
  checkEnd(text, end, problem);
  return [findings];
}

function checkEnd(text: Uint8Array, end: number, problem: string | null): void {
  if (problem !== null) throw new UnreadableAnswer(problem);
  if (skipSpace(text, end) < text.length) throw new UnreadableAnswer("more than one text");
}

/** @throws UnreadableAnswer when clients may read different values of the key */
function checkReadOnce(found: FoundKey | undefined): void {
  if (found?.isRepeated || found?.isMiscased) throw new UnreadableAnswer("a key given twice");
}

/** The range of the tool list; null when there is none. */
function toolsOf(text: Uint8Array, result: FoundKey | undefined): ByteRange | null {
  const tools = result?.inside[0];
  checkReadOnce(result);
  checkReadOnce(tools);
  return tools?.value != null && text[tools.value.start] === OPEN_BRACKET ? tools.value : null;
}

/** A cut for each denied tool, with the comma that separates it from the tools that stay. */
function cuts(tools: readonly FoundTool[], denied: ReadonlySet<FoundTool>): Edit[] {
  let hasKept = false;
  return tools.flatMap((tool, index) => {
    if (!denied.has(tool)) {
      hasKept = true;
      return [];
    }
    // Once a tool has been kept, a cut includes the comma before the denied tool; until then, the comma after it.
    const [before, after] = [tools[index - 1], tools[index + 1]];
    if (hasKept && before !== undefined) return [{ start: before.end, end: tool.end }];
    return [{ start: tool.start, end: after?.start ?? tool.end }];
  });
}

function nameOf(text: Uint8Array, found: FoundKey | undefined): string | null {
  checkReadOnce(found);
  const name = found?.value ?? null;
  return name !== null && text[name.start] === QUOTE ? readName(text, name) : null;
}

/** The start of the name, as much of it as a rule can hold. */
function readName(text: Uint8Array, { start, end }: ByteRange): string {
  const least = start + 1 + UNIT_BYTES_MAX * NAME_UNITS_MAX;
  if (end <= least) return parseName(text.subarray(start, end));
  let at = start + 1;
  while (at < least) at += text[at] === BACKSLASH ? (text[at + 1] === LETTER_U ? UNIT_BYTES_MAX : 2) : 1;
  return parseName(Buffer.concat([text.subarray(start, at), Buffer.from('"')]));
}

const parseName = (quoted: Uint8Array): string =>
  String(JSON.parse(new TextDecoder().decode(quoted))).slice(0, NAME_UNITS_MAX);
