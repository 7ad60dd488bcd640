// What a body is encoded with, by its Content-Encoding, and whether that is taken.

import type { AnswerHeaders } from "./answer.ts";

export type Coding = "gzip" | "deflate" | "br" | "zstd";

/** The answer came in an encoding that is understood but not accepted. The message is for the log. */
export class Undecodable extends Error {
  override readonly name = "Undecodable";
}

/** No honest answer has more codings than this. Each needs a decoder, and memory for the bytes between two. */
const CODINGS_MAX = 2;
/** Nor has one a longer list of them, which is parsed for every answer. */
const LIST_CHARS_MAX = 256;

const CODINGS: Readonly<Record<string, Coding>> = {
  gzip: "gzip",
  "x-gzip": "gzip",
  deflate: "deflate",
  br: "br",
  zstd: "zstd",
};

interface Codings {
  /** To be undone, outermost first. Empty too when one is unknown: then the body stays as it is. */
  readonly list: readonly Coding[];
  readonly problem: string | null;
}

const NONE: Codings = { list: [], problem: null };

function read(headers: AnswerHeaders): Codings {
  const value = headers.get("content-encoding");
  if (value === null) return NONE;
  if (value.length > LIST_CHARS_MAX) return { list: [], problem: "a very long list of encodings" };
  const names = value.split(",").map((name) => name.trim().toLowerCase());
  const list: Coding[] = [];
  for (const name of names.reverse()) {
    if (name === "" || name === "identity") continue;
    const coding = Object.hasOwn(CODINGS, name) ? CODINGS[name] : undefined;
    if (coding === undefined) return NONE;
    list.push(coding);
  }
  if (list.length > CODINGS_MAX) return { list, problem: `more than ${CODINGS_MAX} encodings` };
  if (list.filter((coding) => coding === "zstd").length > 1) return { list, problem: "zstd within zstd" };
  return { list, problem: null };
}

/** @throws Undecodable */
export function codingsOf(headers: AnswerHeaders): readonly Coding[] {
  const { list, problem } = read(headers);
  if (problem !== null) throw new Undecodable(problem);
  return list;
}

/** Whether decoding changes the bytes, so that headers that describe the sent ones no longer apply. */
export function isEncoded(headers: AnswerHeaders): boolean {
  return read(headers).list.length > 0;
}
