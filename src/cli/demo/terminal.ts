// Prints the demo's output: short lines on standard output, in colour only if that is a terminal.
import { styleText } from "node:util";

export type ListLine = readonly [name: string, value: string];

const INDENT = "     ";

const print = (text: string) => void process.stdout.write(`${text}\n`);

export const terminal = {
  section: (title: string) => print(`\n ${styleText("bold", title)}\n`),
  chapter: (number: number, title: string) =>
    print(`${number === 1 ? "" : "\n"}  ${styleText("cyan", `${number}`)}  ${styleText("bold", title)}`),
  line: (text = "") => print(text === "" ? "" : INDENT + text),
  /** Text for the reader to copy: without indentation, never wrapped, and with blank lines around it. */
  copied: (text: string) => print(`\n${text}\n`),
  entries(list: readonly ListLine[]) {
    for (const [name, value] of list) print(`${INDENT}${styleText("dim", name.padEnd(13))} ${value}`);
  },
  json(value: unknown) {
    for (const line of JSON.stringify(value, null, 2).split("\n")) print(INDENT + styleText("cyan", line));
  },
  /** A line that the reader should notice. */
  note: (text: string) => print(INDENT + styleText("yellow", text)),
  done: (name: string, detail: string, ms: number) =>
    print(`  ${styleText("green", "✓")} ${styleText("dim", duration(ms).padStart(7))}  ${name.padEnd(14)} ${detail}`),
};

export const duration = (ms: number): string =>
  ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
