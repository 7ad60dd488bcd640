// Removes tools from the answer to `tools/list`: what is left stays as the server wrote it. The server chooses the answer's
// length and content, so everything is done in steps.

import { MAX } from "../kernel/limits.ts";
import type { Steps } from "../kernel/turns.ts";
import { createPace, type Pace } from "../kernel/turns.ts";
import {
  arrayOutline,
  type ByteRange,
  type FoundKey,
  objectOutline,
  type ScannedItem,
  skipSpaceInSteps,
  watch,
} from "./json-scan.ts";

const ANSWER_KEYS = [watch("result", watch("tools"), watch("cacheScope"))];
const NOTHING = new Uint8Array();
const PRIVATE = Buffer.from('"private"');
const SAYS_PRIVATE = Buffer.from('"cacheScope":"private",');
const TOOL_KEYS = [watch("name")];

/** No rule can name more characters than this, so of a longer name only this much is judged. */
const NAME_UNITS_MAX = 2 * MAX.policyEntryCharacters + 1;
/** The longest way to write a unit: `\u0061`. */
const UNIT_BYTES_MAX = 6;
/** The work of judging a tool, its name apart. */
const JUDGE_WORK = 4_000;

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

/** The answer can be read in more than one way, so nobody can say which tools it would show. */
export class UnreadableAnswer extends Error {}

/**
 * The parts that are left of a JSON-RPC message, or a batch, without the tools in its results for which `isDenied` holds.
 * All of it when it is neither an object nor an array. Text that is no proper JSON counts as unreadable, since some clients
 * may read it all the same: some decoders take NaN, or the first of two texts.
 * @throws UnreadableAnswer
 */
export function* withoutTools(
  text: Uint8Array,
  isDenied: DeniedTools,
  { pace = createPace(), stepBytes }: { pace?: Pace; stepBytes?: number | undefined } = {},
): Steps<readonly Uint8Array[]> {
  const edits: Edit[] = [];
  let toolsLeft = MAX.listedTools;
  for (const [result] of yield* answersIn(text, stepBytes)) {
    const tools = toolsOf(text, result);
    if (tools === null) continue;
    const listed = yield* arrayOutline(text, tools.start, toolsLeft, TOOL_KEYS, stepBytes);
    if (listed.problem !== null) throw new UnreadableAnswer(listed.problem);
    toolsLeft -= listed.items.length;
    if (isDenied.listIsPrivate === true) edits.push(privacyOf(result));
    yield* cut(edits, listed.items, (item) => isToolDenied(text, item, isDenied), pace);
  }
  const parts: Uint8Array[] = [];
  let at = 0;
  for (const { start, end, insert = NOTHING } of edits.sort((a, b) => a.start - b.start)) {
    parts.push(text.subarray(at, start), insert);
    at = end;
  }
  return [...parts, text.subarray(at)].filter(({ length }) => length > 0);
}

/** The result's `cacheScope` as private: instead of its own, or as its first member. */
function privacyOf(result: FoundKey | undefined): Edit {
  const scope = result?.inside[1];
  if (scope?.isRepeated || scope?.isMiscased) throw new UnreadableAnswer("a key given twice");
  if (scope?.value != null) return { ...scope.value, insert: PRIVATE };
  const first = (result?.value?.start ?? 0) + 1;
  return { start: first, end: first, insert: SAYS_PRIVATE };
}

/** The watched keys found in each answer. */
function* answersIn(text: Uint8Array, stepBytes?: number): Steps<readonly (readonly FoundKey[])[]> {
  const start = yield* skipSpaceInSteps(text, 0, stepBytes);
  if (text[start] === OPEN_BRACKET) {
    const { items, end, problem } = yield* arrayOutline(text, start, MAX.listedAnswers, ANSWER_KEYS, stepBytes);
    yield* checkEnd(text, end, problem, stepBytes);
    return items.map(({ findings }) => findings);
  }
  if (text[start] !== OPEN_BRACE) return [];
  const { findings, end, problem } = yield* objectOutline(text, start, ANSWER_KEYS, stepBytes);
  yield* checkEnd(text, end, problem, stepBytes);
  return [findings];
}

function* checkEnd(text: Uint8Array, end: number, problem: string | null, stepBytes?: number): Steps<void> {
  if (problem !== null) throw new UnreadableAnswer(problem);
  if ((yield* skipSpaceInSteps(text, end, stepBytes)) < text.length) {
    throw new UnreadableAnswer("more than one text");
  }
}

/** Where the list of tools stands; null when there is none. */
function toolsOf(text: Uint8Array, result: FoundKey | undefined): ByteRange | null {
  const tools = result?.inside[0];
  const isAmbiguous = [result, tools].some((found) => found?.isRepeated || found?.isMiscased);
  if (isAmbiguous) throw new UnreadableAnswer("a key given twice");
  return tools?.value != null && text[tools.value.start] === OPEN_BRACKET ? tools.value : null;
}

/** Adds a cut for each denied item, with the comma that separates it from what stays. */
function* cut(
  cuts: Edit[],
  items: readonly ScannedItem[],
  isDenied: (item: ScannedItem) => boolean,
  pace: Pace,
): Steps<void> {
  let hasKept = false;
  for (const [index, item] of items.entries()) {
    if (pace(JUDGE_WORK)) yield;
    if (!isDenied(item)) {
      hasKept = true;
      continue;
    }
    // After an item that stays, the cut begins at its end and takes the comma in front; before the first that stays, it
    // takes the comma behind.
    const [before, after] = [items[index - 1], items[index + 1]];
    if (hasKept && before !== undefined) cuts.push({ start: before.end, end: item.end });
    else cuts.push({ start: item.start, end: after?.start ?? item.end });
  }
}

/** Of equal keys the last one counts, and one in another letter case does not. */
function isToolDenied(
  text: Uint8Array,
  { findings: [found] }: ScannedItem,
  isDenied: (tool: string) => boolean,
): boolean {
  const name = found?.value ?? null;
  return name !== null && text[name.start] === QUOTE && isDenied(readName(text, name));
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
