// How long the body of a request or of an answer is, by its head.
import { Fault } from "../core/fault.ts";
import { isNamed } from "./answer.ts";

/** Exact as a number. */
const LENGTH = /^\d{1,15}$/;

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
