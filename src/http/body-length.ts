// How long the body of an answer is, by its head.

import { isNamed } from "./answer.ts";

/** Exact as a number. */
const LENGTH = /^\d{1,15}$/;

/**
 * The length of a body that nothing else delimits; null for any other body.
 *
 * @param fields names and values in turn; the parser has refused those that contradict each other
 */
export function lengthOf(fields: readonly string[]): number | null {
  let length: number | null = null;
  for (let at = 0; at + 1 < fields.length; at += 2) {
    const name = fields[at] ?? "";
    if (isNamed(name, "transfer-encoding")) return null;
    if (!isNamed(name, "content-length")) continue;
    const value = fields[at + 1] ?? "";
    if (length !== null || !LENGTH.test(value)) return null;
    length = Number(value);
  }
  return length;
}
