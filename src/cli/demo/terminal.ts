// The output of the demo: short lines on standard output. Colours and lines that are written over are used only in a
// terminal, so that the output reads well in a file too.
import type { WriteStream } from "node:tty";

/** A line of a list: a name and its value. */
export type ListLine = readonly [name: string, value: string];

const INDENT = "     ";
const NAME_COLUMNS = 14;
const TIME_COLUMNS = 7;
const ENTRY_COLUMNS = 13;
const BACK_TO_START = "\r\x1b[2K";

export function openTerminal(output: WriteStream) {
  // `hasColors` respects NO_COLOR and dumb terminals. Where there are colours, lines may be written over too.
  const colours = output.isTTY === true && output.hasColors();
  const coloured = (code: number) => (text: string) => (colours ? `\x1b[${code}m${text}\x1b[0m` : text);
  const [bold, dim, red, green, yellow, cyan] = [1, 2, 31, 32, 33, 36].map(coloured) as Paints;
  const print = (text: string) => void output.write(`${text}\n`);
  const over = colours ? BACK_TO_START : "";
  let isAtTop = false;

  return {
    section(title: string) {
      print(`\n ${bold(title)}\n`);
      isAtTop = true;
    },
    /** A numbered step of the scenario. */
    chapter(number: number, title: string) {
      print(`${isAtTop ? "" : "\n"}  ${cyan(String(number))}  ${bold(title)}`);
      isAtTop = false;
    },
    line: (text = "") => print(text === "" ? "" : INDENT + text),
    /** Text that the reader copies: at the very left, and never broken. */
    verbatim: print,
    entries(list: readonly ListLine[]) {
      for (const [name, value] of list) print(`${INDENT}${dim(name.padEnd(ENTRY_COLUMNS))} ${value}`);
    },
    json(value: unknown) {
      for (const line of JSON.stringify(value, null, 2).split("\n")) print(`${INDENT}${cyan(line)}`);
    },
    /** Something that the reader should notice. */
    note: (text: string) => print(`${INDENT}${yellow(text)}`),
    /** Shows the step that runs, where that line can be written over. */
    begin(name: string) {
      if (colours) output.write(`  ${dim("…")} ${"".padStart(TIME_COLUMNS)}  ${name}`);
    },
    done: (name: string, detail: string, ms: number) =>
      print(
        `${over}  ${green("✓")} ${dim(duration(ms).padStart(TIME_COLUMNS))}  ${name.padEnd(NAME_COLUMNS)} ${detail}`,
      ),
    failed: (name: string, reason: string) =>
      print(`${over}  ${red("✗")} ${"".padStart(TIME_COLUMNS)}  ${name.padEnd(NAME_COLUMNS)} ${red(reason)}`),
  };
}

export type Terminal = ReturnType<typeof openTerminal>;

type Paint = (text: string) => string;
type Paints = [Paint, Paint, Paint, Paint, Paint, Paint];

export function duration(ms: number): string {
  return ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
}
