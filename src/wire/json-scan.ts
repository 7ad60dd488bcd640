// The outline of a JSON text, read straight from its bytes: whether it is JSON at all, and where the values of a few
// keys stand. Nothing is built, so a body of 32 MiB costs no second copy and no object tree, and a value can be
// replaced in place without touching its neighbours.

import { atOnce, type Steps } from "../concurrency/steps.ts";
import { ScanError, spaceEnd } from "./json-bytes.ts";
import { LEFT, type Listed, Scan, type ScannedItem } from "./json-scanner.ts";
import { createProbe, type FoundKey, toFinding, type Watched } from "./watched-keys.ts";

const OPEN_BRACKET = 0x5b;
const OPEN_BRACE = 0x7b;

/** Bytes of one step: less than a millisecond, whatever they are. */
const STEP_BYTES = 65_536;

export interface Outline {
  /** One for each watched key, in their order. */
  readonly findings: readonly FoundKey[];
  /** The index after the object; -1 when it does not end properly. */
  readonly end: number;
  /** Why the object does not end: no JSON (or cut off), or nested too deep. */
  readonly problem: "malformed" | "too deep" | null;
}

export interface Items {
  /** Where the items stand. */
  readonly items: readonly ScannedItem[];
  /** The index after the array; -1 when it does not end properly. */
  readonly end: number;
  readonly problem: Outline["problem"] | "too many";
}

/** The index of the first byte at or after `at` that is no JSON white space. */
export function skipSpace(bytes: Uint8Array, at: number): number {
  return spaceEnd(bytes, at, bytes.length);
}

/** The same in steps. */
export function* skipSpaceInSteps(bytes: Uint8Array, at: number, stepBytes = STEP_BYTES): Steps<number> {
  for (let next = at; ; next += stepBytes) {
    const until = Math.min(next + stepBytes, bytes.length);
    const found = spaceEnd(bytes, next, until);
    if (found < until || until === bytes.length) return found;
    yield;
  }
}

/**
 * The outline of the object that opens at `start`. When it is malformed or cut off, the findings are of the
 * complete members before that place. Well-formed UTF-8 is not checked here.
 */
export function outlineObject(bytes: Uint8Array, start: number, watched: readonly Watched[]): Outline {
  return atOnce(objectOutline(bytes, start, watched));
}

/** The same in steps. */
export function* objectOutline(
  bytes: Uint8Array,
  start: number,
  watched: readonly Watched[],
  stepBytes = STEP_BYTES,
): Steps<Outline> {
  const probes = watched.map(createProbe);
  const scan = new Scan(bytes, start, stepBytes, { probes });
  const { end, problem } = yield* ended(scan, bytes[start] === OPEN_BRACE);
  return { findings: probes.map(toFinding), end, problem: problem === "too many" ? "malformed" : problem };
}

/** The items of the array that opens at `start`, none of them looked into. At most `most` are listed. */
export function outlineArray(bytes: Uint8Array, start: number, most: number): Items {
  return atOnce(arrayOutline(bytes, start, most, []));
}

/** The same in steps, and with what is found of the watched keys in each item. */
export function* arrayOutline(
  bytes: Uint8Array,
  start: number,
  most: number,
  watched: readonly Watched[],
  stepBytes = STEP_BYTES,
): Steps<Items> {
  const listed: Listed = { items: [], most, watched };
  const scan = new Scan(bytes, start, stepBytes, { listed });
  const { end, problem } = yield* ended(scan, bytes[start] === OPEN_BRACKET);
  return { items: listed.items, end, problem };
}

function* ended(scan: Scan, opens: boolean): Steps<{ end: number; problem: Items["problem"] }> {
  if (!opens) return { end: -1, problem: "malformed" };
  try {
    for (;;) {
      const end = scan.step();
      if (end !== LEFT) return { end, problem: null };
      yield;
    }
  } catch (error) {
    if (!(error instanceof ScanError)) throw error;
    return { end: -1, problem: error.problem };
  }
}
