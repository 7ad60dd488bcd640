// The command line: what a command is, which one was asked for, with which words and flags, and the configuration that it runs
// with. All problems of all of these are told at once, with the word that was probably meant.
import { type Config, loadConfig, type Purpose, processEnvironment } from "../config.ts";
import { suggest } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

/** A verdict that does not hold goes to standard error, with exit status 1. */
export interface CommandVerdict {
  readonly holds: boolean;
  readonly text: string;
}

/** What is printed. */
export type CommandOutcome = string | CommandVerdict | undefined;

export interface CliCommand {
  /**
   * What follows its name, in one or more ways, as the help shows it and the parser reads it: `NAME [FILE] --flag VALUE
   * [--bare] [--list V [--list V ...]]`.
   */
  readonly forms: readonly string[];
  readonly about: string;
  run(line: CommandLine): Promise<CommandOutcome>;
}

export type Commands = Readonly<Record<string, CliCommand>>;

export interface CommandLine {
  /** The words that call it, "serve" without any; null when there is no such command. */
  readonly command: string | null;
  readonly words: readonly string[];
  /** By name, without dashes; "" for one without a value. */
  readonly flags: ReadonlyMap<string, string>;
  /** The values of flags that may be given more than once, by name. */
  readonly lists: ReadonlyMap<string, readonly string[]>;
  /** A command adds those of its words and flags, so that they are told with the others. */
  readonly problems: string[];
}

/** The program was called or configured in a way that it can't run. */
export class Misuse extends Error {
  override readonly name = "Misuse";
  readonly problems: readonly string[];

  constructor(problems: readonly string[]) {
    super(problems.join("; "));
    this.problems = problems;
  }
}

/**
 * The configuration of a command that has read its words and flags.
 *
 * @param problemsOf what the command has against a configuration that is good by itself
 * @throws Misuse with every problem of both
 */
export function configured(line: CommandLine, purpose: Purpose, problemsOf = (_: Config): readonly string[] => []) {
  const loaded = loadConfig(purpose, line.flags, processEnvironment, process.stderr.isTTY);
  const { config, warnings } = loaded;
  const problems = [...line.problems, ...loaded.problems, ...(config === null ? [] : problemsOf(config))];
  // A variable that nothing reads may be a misspelt one.
  if (config === null || problems.length > 0) throw new Misuse([...problems, ...warnings]);
  return { config, warnings };
}

/** As `configured`, with the log. */
export function begin(line: CommandLine, purpose: Purpose, problemsOf?: (config: Config) => readonly string[]) {
  const { config, warnings } = configured(line, purpose, problemsOf);
  const log: OpenLog = openLog({ ...config.log, clock: systemClock });
  for (const warning of warnings) log.warn("configuration", { warning });
  return { config, log };
}

/** @param words what follows the name of the program */
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
    return unknown(first, "is no command", firsts);
  }
  if (isName(second)) return unknown(`${first} ${second}`, "is no command", inGroup);
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

/** What the forms of a command allow. */
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
  if (!known.includes(name)) return unknown(`--${name}`, "is no flag", all);
  if (value === null && !isBare(name)) return `--${name} must be followed by a value`;
  return flags.has(name) ? `--${name} must be given once only` : null;
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

/** One short line, whatever was typed. */
export function shownWord(word: string): string {
  return JSON.stringify(word.slice(0, 40)).slice(1, -1);
}
