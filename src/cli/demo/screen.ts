// What the demo shows: short lines on standard output, with colours and a line that is written over only where
// there is a terminal, so that its output reads as well from a file.
import type { WriteStream } from "node:tty";

/** A line of a list: what it is, and what is to be known about it. */
export type ListLine = readonly [name: string, value: string];

export interface Screen {
  section(title: string): void;
  /** A numbered step of what is played. */
  chapter(number: number, title: string): void;
  line(text?: string): void;
  /** Text that is to be copied as it stands: at the very left, and never broken. */
  verbatim(text: string): void;
  entries(list: readonly ListLine[]): void;
  json(value: unknown): void;
  /** Something that is to be noticed. */
  note(text: string): void;
  /** Shows what is under way, where that line can be written over. */
  begin(name: string): void;
  done(name: string, detail: string, ms: number): void;
  failed(name: string, reason: string): void;
}

interface Output {
  write(text: string): unknown;
}

const INDENT = "     ";
const NAME_COLUMNS = 14;
const TIME_COLUMNS = 7;
const ENTRY_COLUMNS = 13;
const BACK_TO_START = "\r\x1b[2K";

/** Whether a stream shows colours; it knows of NO_COLOR and of dumb terminals. */
export function showsColours(stream: Pick<WriteStream, "isTTY" | "hasColors">): boolean {
  return stream.isTTY === true && stream.hasColors();
}

/** @param colours also whether lines may be written over */
export function openScreen(output: Output, colours: boolean): Screen {
  const coloured = (code: number) => (text: string) => (colours ? `\x1b[${code}m${text}\x1b[0m` : text);
  const [bold, dim, red, green, yellow, cyan] = [1, 2, 31, 32, 33, 36].map(coloured) as Paints;
  const print = (text: string) => void output.write(`${text}\n`);
  const over = colours ? BACK_TO_START : "";
  let isAtTop = false;

  return {
    section(title) {
      print(`\n ${bold(title)}\n`);
      isAtTop = true;
    },
    chapter(number, title) {
      print(`${isAtTop ? "" : "\n"}  ${cyan(String(number))}  ${bold(title)}`);
      isAtTop = false;
    },
    line: (text = "") => print(text === "" ? "" : INDENT + text),
    verbatim: print,
    entries(list) {
      for (const [name, value] of list) print(`${INDENT}${dim(name.padEnd(ENTRY_COLUMNS))} ${value}`);
    },
    json(value) {
      for (const line of JSON.stringify(value, null, 2).split("\n")) print(`${INDENT}${cyan(line)}`);
    },
    note: (text) => print(`${INDENT}${yellow(text)}`),
    begin(name) {
      if (colours) output.write(`  ${dim("…")} ${"".padStart(TIME_COLUMNS)}  ${name}`);
    },
    done: (name, detail, ms) =>
      print(
        `${over}  ${green("✓")} ${dim(duration(ms).padStart(TIME_COLUMNS))}  ${name.padEnd(NAME_COLUMNS)} ${detail}`,
      ),
    failed: (name, reason) =>
      print(`${over}  ${red("✗")} ${"".padStart(TIME_COLUMNS)}  ${name.padEnd(NAME_COLUMNS)} ${red(reason)}`),
  };
}

type Paint = (text: string) => string;
type Paints = [Paint, Paint, Paint, Paint, Paint, Paint];

export function duration(ms: number): string {
  return ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
}
