// Parses the command line: finds the command, its words and its flags, and loads the configuration for it. All problems are
// reported at once, with the word that was probably meant.
import { type Config, loadConfig, type Purpose, processEnvironment } from "../config.ts";
import { suggest } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

/** The outcome of a check. One that does not hold is printed to standard error, with exit status 1. */
export interface CommandVerdict {
  readonly holds: boolean;
  readonly text: string;
}

/** What a command prints; a string goes to standard output. */
export type CommandOutcome = string | CommandVerdict | undefined;

export interface CliCommand {
  /** The arguments in one or more forms, for help and parser: `NAME [FILE] --flag VALUE [--bare] [--list V [--list V ...]]`. */
  readonly forms: readonly string[];
  readonly about: string;
  run(line: CommandLine): Promise<CommandOutcome>;
}

export type Commands = Readonly<Record<string, CliCommand>>;

export interface CommandLine {
  /** The name of the command, "serve" if none is given; null if there is no such command. */
  readonly command: string | null;
  readonly words: readonly string[];
  /** The values of the flags by name, without dashes; "" for a flag without a value. */
  readonly flags: ReadonlyMap<string, string>;
  /** The values of flags that may be given more than once, by name. */
  readonly lists: ReadonlyMap<string, readonly string[]>;
  /** A command adds the problems of its own words and flags, so that all are reported together. */
  readonly problems: string[];
}

/** Thrown when the program can't run because of its arguments or its configuration. */
export class Misuse extends Error {
  override readonly name = "Misuse";
  readonly problems: readonly string[];

  constructor(problems: readonly string[]) {
    super(problems.join("; "));
    this.problems = problems;
  }
}

/**
 * Loads the configuration of a command that has read its words and flags.
 *
 * @param problemsOf finds what the command can't accept in a configuration that is valid by itself
 * @throws Misuse with all problems of the command line and the configuration
 */
export function configured(line: CommandLine, purpose: Purpose, problemsOf = (_: Config): readonly string[] => []) {
  const loaded = loadConfig(purpose, line.flags, processEnvironment, process.stderr.isTTY);
  const { config, warnings } = loaded;
  const problems = [...line.problems, ...loaded.problems, ...(config === null ? [] : problemsOf(config))];
  // The warnings name variables that nothing reads, one of which may be the misspelt cause of a problem.
  if (config === null || problems.length > 0) throw new Misuse([...problems, ...warnings]);
  return { config, warnings };
}

/** Loads the configuration, as `configured` does, and opens the log. */
export function begin(line: CommandLine, purpose: Purpose, problemsOf?: (config: Config) => readonly string[]) {
  const { config, warnings } = configured(line, purpose, problemsOf);
  const log: OpenLog = openLog({ ...config.log, clock: systemClock });
  for (const warning of warnings) log.warn("configuration", { warning });
  return { config, log };
}

/** @param words the arguments of the program */
export function readCommandLine(words: readonly string[], commands: Commands, serve: CliCommand): CommandLine {
  if (words.includes("--help") || words.includes("-h")) return asked("help", []);
  if (words.includes("--version")) return asked("version", []);
  const [first = "", second = ""] = words;
  if (!isName(first)) return readRest("serve", serve, words);
  for (const name of [`${first} ${second}`, first]) {
    const command = Object.hasOwn(commands, name) ? commands[name] : undefined;
    if (command !== undefined) return readRest(name, command, words.slice(name.split(" ").length));
  }
  return asked(null, [commandProblem(first, second, Object.keys(commands))]);
}

function commandProblem(first: string, second: string, commands: readonly string[]): string {
  const inGroup = commands.filter((command) => command.startsWith(`${first} `));
  if (inGroup.length === 0) {
    const firsts = commands.map((command) => command.replace(/ .*/, ""));
    return unknown(first, "is not a command", firsts);
  }
  if (isName(second)) return unknown(`${first} ${second}`, "is not a command", inGroup);
  const seconds = inGroup.map((command) => command.slice(first.length + 1));
  return `${first} must be followed by one of ${seconds.join(", ")}`;
}

function isName(word: string): boolean {
  return word !== "" && !word.startsWith("-");
}

function asked(command: string | null, problems: string[]): CommandLine {
  return { command, words: [], flags: new Map(), lists: new Map(), problems };
}

const FLAG = /--([a-z-]+)(?: ("[^"]*"|[^\s[\]-][^\s[\]]*))?/g;

/** The words and flags that the forms of a command allow. */
function grammarOf(forms: readonly string[]) {
  const flags = forms.map((form) => [...form.matchAll(FLAG)].map(([, name = "", value]) => ({ name, value })));
  const words = forms.map((form) => form.replaceAll(FLAG, "").match(/\[?[A-Z]+/g) ?? []);
  const [required = []] = words
    .map((all) => all.filter((word) => !word.startsWith("[")))
    .sort((a, b) => a.length - b.length);
  return {
    required,
    wordsMax: Math.max(...words.map((all) => all.length)),
    known: [...new Set(flags.flat().map(({ name }) => name))],
    isBare: (flag: string) => flags.flat().some(({ name, value }) => name === flag && value === undefined),
    isList: (flag: string) => flags.some((form) => form.filter(({ name }) => name === flag).length > 1),
  };
}

function readRest(command: string, { forms }: CliCommand, rest: readonly string[]): CommandLine {
  const grammar = grammarOf(forms);
  const words: string[] = [];
  const flags = new Map<string, string>();
  const lists = new Map<string, string[]>();
  const problems: string[] = [];
  for (const pair of pairs(rest)) {
    const { word, name, value } = pair;
    const problem = pairProblem(grammar, words.length, flags, pair);
    if (problem !== null) problems.push(problem);
    else if (name === null) words.push(word);
    else if (grammar.isList(name)) lists.set(name, [...(lists.get(name) ?? []), value ?? ""]);
    else flags.set(name, value ?? "");
  }
  for (const missing of grammar.required.slice(words.length)) problems.push(`${missing} must be given`);
  return { command, words, flags, lists, problems };
}

function pairProblem(
  { known, isBare, wordsMax }: ReturnType<typeof grammarOf>,
  words: number,
  flags: ReadonlyMap<string, string>,
  { word, name, value }: Pair,
): string | null {
  if (name === null) return isName(word) && words < wordsMax ? null : `${shownWord(word)} is not expected`;
  const all = known.map((flag) => `--${flag}`);
  if (!known.includes(name)) return unknown(`--${name}`, "is not a flag", all);
  if (value === null && !isBare(name)) return `--${name} must be followed by a value`;
  return flags.has(name) ? `--${name} must be given only once` : null;
}

/** A word that is no flag, or a flag with its value. */
interface Pair {
  readonly word: string;
  /** Null for a word that is neither a flag nor the value of one. */
  readonly name: string | null;
  readonly value: string | null;
}

/** Splits words into pairs. Flags are `--name value` or `--name=value`; unknown flags are paired with their value too. */
function pairs(words: readonly string[]): Pair[] {
  const found: Pair[] = [];
  for (let at = 0; at < words.length; at++) {
    const word = words[at] ?? "";
    const next = words[at + 1];
    const equals = word.indexOf("=");
    if (!word.startsWith("--") || word === "--") found.push({ word, name: null, value: null });
    else if (equals > 0) found.push({ word, name: word.slice(2, equals), value: word.slice(equals + 1) });
    else if (next === undefined || next.startsWith("--")) found.push({ word, name: word.slice(2), value: null });
    else {
      found.push({ word, name: word.slice(2), value: next });
      at++;
    }
  }
  return found;
}

function unknown(word: string, problem: string, known: readonly string[]): string {
  const meant = suggest(word, known);
  return `${shownWord(word)} ${problem}${meant === null ? "" : `; did you mean ${meant}?`}`;
}

/** The word as one short line without control characters, whatever was typed. */
export function shownWord(word: string): string {
  return JSON.stringify(word.slice(0, 40)).slice(1, -1);
}
