// Taking tools out of the answer to `tools/list`, on the bytes themselves: what is left stays as the server wrote it.
import { outlineArray, outlineObject, skipSpace } from "./scan.ts";
import { type Span, watch } from "./watched-keys.ts";

const KEYS = [watch("result", watch("tools"))];
/** More is no answer for a client, and would only fill memory. */
const TOOLS_MAX = 10_000;
const ANSWERS_MAX = 1_000;

const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

/** The answer can't be read in one way only, so it can't be told what it would show. */
export class UnreadableAnswer extends Error {}

/**
 * A JSON-RPC message, or a batch, without the tools in its results that `isDenied` names. The same array when none of
 * them is in it, or when it is neither an object nor an array. One that is no proper JSON may be read all the same
 * (some decoders take NaN, or the first of two texts), so it is none that can be told.
 *
 * @throws UnreadableAnswer
 */
export function withoutTools(text: Uint8Array, isDenied: (tool: string) => boolean): Uint8Array {
  const start = skipSpace(text, 0);
  const spans = answersIn(text, start);
  const cuts = spans.flatMap((span) => deniedIn(text, span, isDenied));
  return cuts.length === 0 ? text : without(text, cuts);
}

function answersIn(text: Uint8Array, start: number): readonly Span[] {
  if (text[start] !== OPEN_BRACKET) return [{ start, end: text.length }];
  const { items, end, problem } = outlineArray(text, start, ANSWERS_MAX);
  if (problem !== null) throw new UnreadableAnswer(problem);
  if (skipSpace(text, end) !== text.length) throw new UnreadableAnswer("more than one text");
  return items;
}

function deniedIn(text: Uint8Array, { start, end: last }: Span, isDenied: (tool: string) => boolean): Span[] {
  if (text[start] !== OPEN_BRACE) return [];
  const { findings, end, problem } = outlineObject(text, start, KEYS);
  if (problem === null && skipSpace(text, end) < last) throw new UnreadableAnswer("more than one text");
  const [result] = findings;
  const tools = result?.inside[0];
  const isAmbiguous = [result, tools].some((found) => found?.isRepeated || found?.isMiscased);
  if (problem !== null || isAmbiguous) throw new UnreadableAnswer(problem ?? "a key given twice");
  if (tools?.value == null || text[tools.value.start] !== OPEN_BRACKET) return [];
  const listed = outlineArray(text, tools.value.start, TOOLS_MAX);
  if (listed.problem !== null) throw new UnreadableAnswer(listed.problem);
  return cutsOf(text, listed.items, isDenied);
}

/** Each denied item with the comma that parts it from what stays. */
function cutsOf(text: Uint8Array, items: readonly Span[], isDenied: (tool: string) => boolean): Span[] {
  const cuts: Span[] = [];
  let hasKept = false;
  for (const [index, item] of items.entries()) {
    const name = nameOf(text, item);
    if (name === null || !isDenied(name)) {
      hasKept = true;
      continue;
    }
    // After one that stays: from its end, so with the comma in front. Before the first that stays: with the one behind.
    const [before, after] = [items[index - 1], items[index + 1]];
    if (hasKept && before !== undefined) cuts.push({ start: before.end, end: item.end });
    else cuts.push({ start: item.start, end: after?.start ?? item.end });
  }
  return cuts;
}

function nameOf(text: Uint8Array, { start, end }: Span): string | null {
  const tool: unknown = JSON.parse(new TextDecoder().decode(text.subarray(start, end)));
  if (typeof tool !== "object" || tool === null || !("name" in tool)) return null;
  return typeof tool.name === "string" ? tool.name : null;
}

function without(text: Uint8Array, cuts: readonly Span[]): Uint8Array {
  const kept: Uint8Array[] = [];
  let at = 0;
  for (const { start, end } of cuts) {
    kept.push(text.subarray(at, start));
    at = end;
  }
  return Buffer.concat([...kept, text.subarray(at)]);
}
