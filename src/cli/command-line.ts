// The command line: which command, and which flags with which values. Like the configuration it tells all its
// problems at once, with the word that was probably meant.
import { VARIABLES } from "../config.ts";
import { closest } from "../core/closest.ts";

export type Command = "gateway" | "token" | "migrate" | "help" | "version";

const SETTINGS = Object.values<{ readonly flag?: string }>(VARIABLES).flatMap(({ flag }) => flag ?? []);

/** The flags of each command; all of them take a value. */
const FLAGS: Readonly<Record<Command, readonly string[]>> = {
  gateway: SETTINGS,
  token: ["tenant", "user", "scope", "ttl", "data-dir"],
  migrate: ["data-dir"],
  help: [],
  version: [],
};

export interface CommandLine {
  readonly command: Command;
  /** By name, without dashes. */
  readonly flags: ReadonlyMap<string, string>;
  readonly problems: readonly string[];
}

/** @param words what follows the name of the program */
export function readCommandLine(words: readonly string[]): CommandLine {
  if (words.includes("--help") || words.includes("-h")) return asked("help");
  if (words.includes("--version")) return asked("version");
  const [first = ""] = words;
  const named = first !== "" && !first.startsWith("-");
  if (!named) return readFlags("gateway", words);
  if (first === "token" || first === "migrate") return readFlags(first, words.slice(1));
  return { ...asked("gateway"), problems: [unknown(first, "is no command", ["token", "migrate"], "")] };
}

function asked(command: Command): CommandLine {
  return { command, flags: new Map(), problems: [] };
}

function readFlags(command: Command, words: readonly string[]): CommandLine {
  const known = FLAGS[command];
  const flags = new Map<string, string>();
  const problems: string[] = [];
  for (const { word, name, value } of pairs(words)) {
    if (name === null) problems.push(`${shown(word)} is not expected`);
    else if (!known.includes(name)) problems.push(unknown(`--${name}`, "is no flag", known, "--"));
    else if (value === null) problems.push(`--${name} must be followed by a value`);
    else if (flags.has(name)) problems.push(`--${name} must be given once only`);
    else flags.set(name, value);
  }
  return { command, flags, problems };
}

interface Pair {
  readonly word: string;
  /** Null for a word that is neither a flag nor the value of one. */
  readonly name: string | null;
  readonly value: string | null;
}

/** Flags with their values, as `--name value` or `--name=value`; an unknown flag takes its value along too. */
function pairs(words: readonly string[]): Pair[] {
  const found: Pair[] = [];
  for (let at = 0; at < words.length; at++) {
    const word = words[at] ?? "";
    const next = words[at + 1];
    const equals = word.indexOf("=");
    if (!word.startsWith("--") || word === "--") found.push({ word, name: null, value: null });
    else if (equals > 0) found.push({ word, name: word.slice(2, equals), value: word.slice(equals + 1) });
    else if (next === undefined || next.startsWith("--"))
      found.push({ word, name: word.slice(2), value: null });
    else {
      found.push({ word, name: word.slice(2), value: next });
      at++;
    }
  }
  return found;
}

function unknown(word: string, problem: string, known: readonly string[], dashes: string): string {
  const meant = closest(
    word,
    known.map((name) => dashes + name),
  );
  return `${shown(word)} ${problem}${meant === null ? "" : `; did you mean ${meant}?`}`;
}

const SHOWN_CHARACTERS_MAX = 40;

function shown(word: string): string {
  return JSON.stringify(word.slice(0, SHOWN_CHARACTERS_MAX)).slice(1, -1);
}
