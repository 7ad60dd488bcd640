// The output of the demo: short lines on standard output, in colours on a terminal only.
import { styleText } from "node:util";

/** A line of a list: a name and its value. */
export type ListLine = readonly [name: string, value: string];

const INDENT = "     ";

const print = (text: string) => void process.stdout.write(`${text}\n`);

export const terminal = {
  section: (title: string) => print(`\n ${styleText("bold", title)}\n`),
  /** A numbered step of the scenario. */
  chapter: (number: number, title: string) =>
    print(`${number === 1 ? "" : "\n"}  ${styleText("cyan", `${number}`)}  ${styleText("bold", title)}`),
  line: (text = "") => print(text === "" ? "" : INDENT + text),
  /** Text that the reader copies, with space around it: at the very left, and never broken. */
  copied: (text: string) => print(`\n${text}\n`),
  entries(list: readonly ListLine[]) {
    for (const [name, value] of list) print(`${INDENT}${styleText("dim", name.padEnd(13))} ${value}`);
  },
  json(value: unknown) {
    for (const line of JSON.stringify(value, null, 2).split("\n")) print(INDENT + styleText("cyan", line));
  },
  /** Something that the reader should notice. */
  note: (text: string) => print(INDENT + styleText("yellow", text)),
  /** A step of the start. */
  done: (name: string, detail: string, ms: number) =>
    print(`  ${styleText("green", "✓")} ${styleText("dim", duration(ms).padStart(7))}  ${name.padEnd(14)} ${detail}`),
};

export function duration(ms: number): string {
  return ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
}
