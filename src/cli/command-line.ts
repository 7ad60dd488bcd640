// Parses the command line: finds the command, its words and its flags, and loads the configuration for it. All problems are
// reported at once, with the word that was probably meant.
import { type Config, loadConfig, type Purpose, processEnvironment, withEnvFile } from "../config.ts";
import { suggest } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

/** The outcome of a check. One that does not hold is printed to standard error, with exit status 1. */
export interface CommandVerdict {
  readonly holds: boolean;
  readonly text: string;
  /** What `--json` prints in place of the text, on standard output. */
  readonly document?: object;
}

/** What a command prints; a string goes to standard output. */
export type CommandOutcome = string | CommandVerdict | undefined;

export interface CliCommand {
  /** The arguments in one or more forms, for help and parser: `NAME [FILE] --flag VALUE [--bare] [--list V [--list V ...]]`. */
  readonly forms: readonly string[];
  /** One line, for the list of commands and for completions. */
  readonly summary: string;
  readonly about: string;
  /** The values of flags that are not given. */
  readonly defaults?: Readonly<Record<string, string>>;
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

/** What a command prints that was not allowed to go on. */
export const NOTHING_CHANGED: CommandVerdict = { holds: false, text: "nothing was changed\n" };

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
  const variables = withEnvFile(processEnvironment, line.flags.get("env-file"));
  // Without its file a configuration lacks what the file would have set, so its other problems would mislead.
  if (variables.problems.length > 0) throw new Misuse([...line.problems, ...variables.problems]);
  const loaded = loadConfig(purpose, line.flags, variables.environment, process.stderr.isTTY);
  const { config, unread, warnings } = loaded;
  const problems = [...line.problems, ...loaded.problems, ...(config === null ? [] : problemsOf(config))];
  // A variable that nothing reads may be the misspelt cause of a problem.
  if (config === null || problems.length > 0) throw new Misuse([...problems, ...unread, ...warnings]);
  return { config, unread, warnings: [...unread, ...warnings] };
}

/** Loads the configuration, as `configured` does, and opens the log. */
export function begin(line: CommandLine, purpose: Purpose, problemsOf?: (config: Config) => readonly string[]) {
  const { config, warnings } = configured(line, purpose, problemsOf);
  const log: OpenLog = openLog({ ...config.log, clock: systemClock });
  for (const warning of warnings) log.warn("configuration", { warning });
  // The warnings come before anything that the command prints.
  log.flush();
  return { config, log };
}

/** @param words the arguments of the program */
export function readCommandLine(words: readonly string[], commands: Commands, serve: CliCommand): CommandLine {
  const [first = "", second = ""] = words;
  if (words.includes("--version") || first === "-v") return asked("version", []);
  const isHelp = words.includes("--help") || words.includes("-h");
  if (!isName(first)) return isHelp ? askedForHelp({ all: "" }) : readRest("serve", serve, words);
  const name = [`${first} ${second}`, first].find((each) => Object.hasOwn(commands, each));
  const command = name === undefined ? undefined : commands[name];
  if (name !== undefined && command !== undefined) {
    const its = name.split(" ");
    return isHelp ? askedForHelp({}, its) : readRest(name, command, words.slice(its.length));
  }
  if (isHelp && !isName(second) && isGroup(first, commands)) return askedForHelp({}, [first]);
  return asked(null, [commandProblem(first, second, Object.keys(commands))]);
}

/** Whether commands of two words begin with this one. */
export function isGroup(first: string, commands: Commands): boolean {
  return Object.keys(commands).some((name) => name.startsWith(`${first} `));
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

function askedForHelp(flags: Readonly<Record<string, string>>, words: readonly string[] = []): CommandLine {
  return { ...asked("help", []), words, flags: new Map(Object.entries(flags)) };
}

const FLAG = /--([a-z-]+)(?: ("[^"]*"|[^\s[\]-][^\s[\]]*))?/g;

/** The words and flags that the forms of a command allow. */
export function grammarOf(forms: readonly string[]) {
  const flags = forms.map((form) => [...form.matchAll(FLAG)].map(([, name = "", value]) => ({ name, value })));
  const words = forms.map((form) => form.replaceAll(FLAG, "").match(/\[?[A-Z]+/g) ?? []);
  const [required = []] = words
    .map((all) => all.filter((word) => !word.startsWith("[")))
    .sort((a, b) => a.length - b.length);
  const all = flags.flat();
  return {
    required,
    /** The words as they are written, with a bracket before those that may be left out. */
    words: words.flat(),
    wordsMax: Math.max(...words.map((each) => each.length)),
    known: [...new Set(all.map(({ name }) => name))],
    isBare: (flag: string) => all.some(({ name, value }) => name === flag && value === undefined),
    /** How the value of a flag is written; undefined when it takes none. */
    valueForm: (flag: string) => all.find(({ name, value }) => name === flag && value !== undefined)?.value,
    isList: (flag: string) => flags.some((form) => form.filter(({ name }) => name === flag).length > 1),
  };
}

type Grammar = ReturnType<typeof grammarOf>;

function readRest(command: string, { forms, defaults = {} }: CliCommand, rest: readonly string[]): CommandLine {
  const grammar = grammarOf(forms);
  const words: string[] = [];
  const flags = new Map<string, string>();
  const lists = new Map<string, string[]>();
  const problems: string[] = [];
  for (const pair of pairs(rest, grammar)) {
    const { word, name, value } = pair;
    const problem = pairProblem(grammar, words.length, flags, pair);
    if (problem !== null) problems.push(problem);
    else if (name === null) words.push(word);
    else if (grammar.isList(name)) lists.set(name, [...(lists.get(name) ?? []), value ?? ""]);
    else flags.set(name, value ?? "");
  }
  for (const missing of grammar.required.slice(words.length)) problems.push(`${missing} must be given`);
  for (const [name, value] of Object.entries(defaults)) if (!flags.has(name)) flags.set(name, value);
  return { command, words, flags, lists, problems };
}

function pairProblem(
  { known, isBare, valueForm, wordsMax }: Grammar,
  words: number,
  flags: ReadonlyMap<string, string>,
  { word, name, value }: Pair,
): string | null {
  if (name === null) return isName(word) && words < wordsMax ? null : `${shownWord(word)} is not expected`;
  const all = known.map((flag) => `--${flag}`);
  if (!known.includes(name)) return unknown(`--${name}`, "is not a flag", all);
  if (value === null && !isBare(name)) return `--${name} must be followed by a value`;
  if (value !== null && valueForm(name) === undefined) return `--${name} takes no value`;
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
function pairs(words: readonly string[], { isBare, valueForm }: Grammar): Pair[] {
  const found: Pair[] = [];
  for (let at = 0; at < words.length; at++) {
    const word = words[at] ?? "";
    const next = words[at + 1];
    const name = word.slice(2);
    const equals = word.indexOf("=");
    const isAlone = next === undefined || next.startsWith("--") || (isBare(name) && valueForm(name) === undefined);
    if (!word.startsWith("--") || word === "--") found.push({ word, name: null, value: null });
    else if (equals > 0) found.push({ word, name: word.slice(2, equals), value: word.slice(equals + 1) });
    else if (isAlone) found.push({ word, name, value: null });
    else {
      found.push({ word, name, value: next });
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
