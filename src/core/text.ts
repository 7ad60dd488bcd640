// Rules for text from outside. Lengths count code points. U+0000 and lone surrogates are refused everywhere: Postgres stores
// neither, and a lone surrogate has no UTF-8 form.
import { invalidField } from "./fault.ts";

export interface TextRule {
  readonly min: number;
  readonly max: number;
  /** Whether control characters other than U+0000 are allowed, such as the line breaks of longer texts. */
  readonly controls?: boolean;
}

// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what is looked for.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f]/;

export const hasControls = (text: string): boolean => CONTROLS.test(text);

export function textProblem(text: string, rule: TextRule): string | null {
  if (!text.isWellFormed()) return "must not contain lone surrogates";
  if (text.includes("\0")) return "must not contain U+0000";
  if (!rule.controls && hasControls(text)) return "must not contain control characters";
  let length = 0;
  for (const _ of text) length += 1;
  if (length < rule.min) return rule.min === 1 ? "must not be empty" : `must be at least ${rule.min} characters`;
  return length > rule.max ? `must be at most ${rule.max} characters` : null;
}

/** @throws Fault `invalid_request` that names the field */
export function checkText(field: string, text: string, rule: TextRule): void {
  const problem = textProblem(text, rule);
  if (problem !== null) throw invalidField(field, problem);
}

/** Replaces control and invisible characters: servers and tenants choose parts of the text, and must not control the terminal. */
export const printable = (text: string): string => text.replace(/[\p{Cc}\p{Cf}\u2028\u2029]+/gu, " ");

/** Escapes in JSON what `printable` would replace, but not the line ends between values: the text keeps its value. */
export function printableJson(json: string): string {
  if (/^[\n\x20-\x7e]*$/.test(json)) return json;
  const unit = (text: string, at: number) => `\\u${text.charCodeAt(at).toString(16).padStart(4, "0")}`;
  return json.replace(/(?!\n)[\p{Cc}\p{Cf}\u2028\u2029]/gu, (character) =>
    Array.from({ length: character.length }, (_, at) => unit(character, at)).join(""),
  );
}

// "Did you mean": the known word nearest to a mistyped one, for the command line and the configuration.

const DISTANCE_MAX = 2;
/** Words that begin with the mistyped one are nearer than those two edits away, if it has at least so many letters. */
const [BEGINNING_LETTERS, BEGINNING_DISTANCE] = [3, 1.5];
/** Two edits make nearly any short word of any other: they count only for words of so many letters with one beginning. */
const FAR_LETTERS = 5;

/** The nearest of `words` whatever their case, or null when none is near: by edits, of which one swaps two neighbours. */
export function suggest(word: string, words: Iterable<string>): string | null {
  let best: string | null = null;
  let bestDistance = DISTANCE_MAX + 1;
  const typed = word.toLowerCase();
  for (const candidate of words) {
    const known = candidate.toLowerCase();
    const distance = distanceBetween(typed, known);
    if (distance < bestDistance) [best, bestDistance] = [candidate, distance];
  }
  return best;
}

function distanceBetween(typed: string, known: string): number {
  const edits = editDistance(typed, known);
  if (edits < DISTANCE_MAX) return edits;
  // "price" begins "pricing".
  const beginning = typed.replace(/e$/, "");
  if (beginning.length >= BEGINNING_LETTERS && known.startsWith(beginning)) return BEGINNING_DISTANCE;
  return typed.length >= FAR_LETTERS && typed[0] === known[0] ? edits : DISTANCE_MAX + 1;
}

/** What follows "no such thing" where one of `words` is near to the word; else nothing. */
export function didYouMean(word: string, words: Iterable<string>): string {
  const meant = suggest(word, words);
  return meant === null ? "" : `; did you mean ${meant}?`;
}

function editDistance(from: string, to: string): number {
  if (Math.abs(from.length - to.length) > DISTANCE_MAX) return DISTANCE_MAX + 1;
  const rows = [Array.from({ length: to.length + 1 }, (_, column) => column)];
  const at = (line: number, column: number) => rows[line]?.[column] ?? Number.POSITIVE_INFINITY;
  for (let line = 1; line <= from.length; line++) {
    rows.push([line]);
    for (let column = 1; column <= to.length; column++) {
      const change = from[line - 1] === to[column - 1] ? 0 : 1;
      const isSwapped = from[line - 1] === to[column - 2] && from[line - 2] === to[column - 1];
      const swapped = isSwapped ? at(line - 2, column - 2) + 1 : Number.POSITIVE_INFINITY;
      const edited = Math.min(at(line - 1, column), at(line, column - 1)) + 1;
      rows[line]?.push(Math.min(at(line - 1, column - 1) + change, edited, swapped));
    }
  }
  return at(from.length, to.length);
}
