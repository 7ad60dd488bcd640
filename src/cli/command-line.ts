// Parses the command line: finds the command, its words and its flags, and loads the configuration for it. All problems are
// reported at once, with the word that was probably meant.
import { type Config, loadConfig, type Purpose, processEnvironment, VARIABLES, withEnvFile } from "../config.ts";
import { suggest } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import { type OpenLog, openLog } from "./log.ts";

/** The outcome of a check. One that does not hold is printed to standard error. */
export interface CommandVerdict {
  readonly holds: boolean;
  /** The exit status of one that does not hold; 1 if it is left out. */
  readonly status?: number;
  readonly text: string;
  /** What `--json` prints in place of the text, on standard output. */
  readonly document?: object | undefined;
}

/** What a command prints; a string goes to standard output. */
export type CommandOutcome = string | CommandVerdict | undefined;

export interface CliCommand {
  /** The arguments in one or more forms, for help and parser: `NAME [FILE] --flag VALUE [--bare] [--list V [--list V ...]]`. */
  readonly forms: readonly string[];
  /** One line, for the list of commands and for completions. */
  readonly summary: string;
  readonly about: string;
  run(line: CommandLine): Promise<CommandOutcome>;
}

export type Commands = Readonly<Record<string, CliCommand>>;

export interface CommandLine {
  /** The name of the command, "" if none is given; null if there is no such command. */
  readonly command: string | null;
  readonly words: readonly string[];
  /** The values of the flags by name, without dashes; "" for a flag without a value. */
  readonly flags: ReadonlyMap<string, string>;
  /** The values of flags that may be given more than once, by name. */
  readonly lists: ReadonlyMap<string, readonly string[]>;
  /** A command adds the problems of its own words and flags, so that all are reported together. */
  readonly problems: string[];
}

/** The value of a flag that the command needs; "" with a problem if it is missing. @param what says what the value is */
export function neededFlag({ flags, problems }: CommandLine, flag: string, what: string): string {
  const value = flags.get(flag);
  if (!value) problems.push(`--${flag} ${value === "" ? "must not be empty" : "is missing"}: ${what}`);
  return value ?? "";
}

export const NOTHING_CHANGED: CommandVerdict = { holds: false, text: "nothing was changed\n" };

export class Misuse extends Error {
  override readonly name = "Misuse";
  readonly problems: readonly string[];

  /** @param all the problems: of those about one flag only the first is kept, since the later ones follow from it */
  constructor(all: readonly string[]) {
    const flags = all.map((problem) => /^--\S+ (?=[a-z])/.exec(problem)?.[0]);
    const problems = all.filter((_, at) => flags[at] === undefined || flags.indexOf(flags[at]) === at);
    super(problems.join("; "));
    this.problems = problems;
  }
}

/**
 * Loads the configuration of a command that has read its words and flags. @throws Misuse with the problems of all three
 * @param problemsOf finds what the command can't accept in a configuration that is valid by itself
 */
export function configured(line: CommandLine, purpose: Purpose, problemsOf = (_: Config): readonly string[] => []) {
  const variables = withEnvFile(processEnvironment, line.flags.get("env-file"));
  // Without its file a configuration lacks what the file would have set, so its other problems would mislead.
  if (variables.problems.length > 0) throw new Misuse([...line.problems, ...variables.problems]);
  const { environment, located } = variables;
  const isGateway = line.command === "serve" && !line.flags.has("mode");
  const flags = isGateway ? new Map([...line.flags, ["mode", "gateway"]]) : line.flags;
  const loaded = loadConfig(purpose, flags, environment, process.stderr.isTTY);
  const { config } = loaded;
  const [unread, warnings] = [loaded.unread.map(located), loaded.warnings.map(located)];
  const own = [...line.problems, ...(isGateway ? otherMode(environment["TOLLGATE_MODE"]) : [])];
  const problems = [...own, ...loaded.problems, ...(config === null ? [] : problemsOf(config))].map(located);
  // A variable that nothing reads may be the misspelt cause of a problem.
  if (config === null || problems.length > 0) throw new Misuse([...problems, ...unread, ...warnings]);
  return { config, unread, warnings: [...unread, ...warnings], located };
}

/** `tollgate serve` without --mode is the gateway. An environment that names another mode must not be ignored silently. */
function otherMode(mode: string | undefined): string[] {
  if (mode === undefined || mode === "" || mode === "gateway") return [];
  if (mode !== "facilitator") return ["TOLLGATE_MODE must be gateway or facilitator"];
  const advice = "give --mode facilitator, or unset TOLLGATE_MODE";
  return [`TOLLGATE_MODE is facilitator, but tollgate serve runs the gateway: ${advice}`];
}

/** Loads the configuration, as `configured` does, and opens the log. */
export function begin(line: CommandLine, purpose: Purpose, problemsOf?: (config: Config) => readonly string[]) {
  const { config, warnings, located } = configured(line, purpose, problemsOf);
  const log: OpenLog = openLog({ ...config.log, clock: systemClock });
  for (const warning of warnings) log.warn("configuration", { warning });
  // The warnings come before anything that the command prints.
  log.flush();
  return { config, log, located };
}

/** @param words the arguments of the program */
export function readCommandLine(words: readonly string[], commands: Commands, serve: CliCommand): CommandLine {
  const [first = "", second = ""] = words;
  if (words.includes("--version") || first === "-v") return asked("version", []);
  const isHelp = words.includes("--help") || words.includes("-h");
  if (!isName(first)) return isHelp ? askedForHelp({ all: "" }) : readRest("", serve, words);
  const name = [`${first} ${second}`, first].find((each) => Object.hasOwn(commands, each));
  const command = name === undefined ? undefined : commands[name];
  // Whether the second word is nearly that of a two-word command. Any other second word may be the value of a forgotten flag:
  // a user who types `token acme` wants a token, and would lose tokens by following a suggestion of `token revoke`.
  const meant = name === first && isName(second) && suggest(`${first} ${second}`, subcommands(first, commands));
  if (name !== undefined && command !== undefined && !meant) {
    const its = name.split(" ");
    return isHelp ? askedForHelp({}, its) : readRest(name, command, words.slice(its.length));
  }
  if (isHelp && !isName(second) && isGroup(first, commands)) return askedForHelp({}, [first]);
  const problems = [firstWordProblem(first, second, commands, serve)];
  return { ...asked(null, problems), flags: new Map(words.includes("--json") ? [["json", ""]] : []) };
}

/** The commands of two words that begin with this one. */
const subcommands = (first: string, commands: Commands): readonly string[] =>
  Object.keys(commands).filter((name) => name.startsWith(`${first} `));

/** Whether commands of two words begin with this one. */
export const isGroup = (first: string, commands: Commands): boolean => subcommands(first, commands).length > 0;

/** Why the words are no command; the first may also be meant as a flag of the service. */
function firstWordProblem(first: string, second: string, commands: Commands, { forms }: CliCommand): string {
  const { known, valueForm } = grammarOf(forms);
  if (!known.includes(first)) return commandProblem(first, second, Object.keys(commands));
  return `${first} is not a command; did you mean --${first} ${isName(second) ? shownWord(second) : valueForm(first)}?`;
}

/** Commands that people look for under another name. */
const OTHER_NAMES = new Map([
  ["run", "serve"],
  ["start", "serve"],
  ["server", "serve"],
  ["gateway", "serve"],
  ["facilitator", "serve --mode facilitator"],
  ["status", "doctor"],
  ["check", "doctor"],
  ["config", "help configuration"],
  ["agent", "help start"],
  ["agents", "help start"],
  ["login", "token"],
]);

/** Why the words are no command, with what was probably meant. */
export function commandProblem(first: string, second: string, commands: readonly string[]): string {
  const inGroup = commands.filter((command) => command.startsWith(`${first} `));
  if (inGroup.length === 0) {
    const meant = OTHER_NAMES.get(first.toLowerCase()) ?? commands.find((command) => command.endsWith(` ${first}`));
    const firsts = commands.map((command) => command.replace(/ .*/, ""));
    const problem = unknown(first, "is not a command", firsts, meant);
    return problem.endsWith("?") ? problem : `${problem}; tollgate help ${shownWord(first)} looks for it in the manual`;
  }
  const seconds = inGroup.map((command) => command.slice(first.length + 1)).join(", ");
  const isOne = inGroup.length === 1;
  const hint = isOne ? `the only command of ${first} is ${seconds}` : `the commands of ${first} are ${seconds}`;
  if (!isName(second)) return `${first} is not a command by itself; ${isOne ? `did you mean ${inGroup[0]}?` : hint}`;
  const problem = unknown(`${first} ${second}`, "is not a command", inGroup);
  return problem.endsWith("?") ? problem : `${problem}; ${hint}`;
}

const isName = (word: string): boolean => word !== "" && !word.startsWith("-");

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
  const needed = words.map((each) => each.filter((word) => !word.startsWith("[")));
  const [required = []] = needed.sort((a, b) => a.length - b.length);
  const all = flags.flat();
  const isEndless = forms.some((form) => form.includes("[WORD ...]"));
  return {
    required,
    /** The words as they are written, with a bracket before those that may be left out. */
    words: words.flat(),
    wordsMax: isEndless ? Infinity : Math.max(...words.map((each) => each.length)),
    known: [...new Set(all.map(({ name }) => name))],
    isBare: (flag: string) => all.some(({ name, value }) => name === flag && value === undefined),
    /** How the value of a flag is written; undefined when it takes none. */
    valueForm: (flag: string) => all.find(({ name, value }) => name === flag && value !== undefined)?.value,
    isList: (flag: string) => flags.some((form) => form.filter(({ name }) => name === flag).length > 1),
  };
}

type Grammar = ReturnType<typeof grammarOf>;

function readRest(command: string, { forms }: CliCommand, rest: readonly string[]): CommandLine {
  const grammar = grammarOf(forms);
  const meant = flagsMeant(grammar, forms, rest);
  if (meant !== null) {
    const line = [...meant].map(([name, value]) => `--${name} ${value}`).join(" ");
    const problems = [`${rest.map(shownWord).join(" ")} is not expected here: did you mean ${line}?`];
    return { ...asked(command, problems), flags: meant };
  }
  const words: string[] = [];
  const flags = new Map<string, string>();
  const lists = new Map<string, string[]>();
  const problems: string[] = [];
  for (const pair of pairs(rest, grammar)) {
    const { word, name, value } = pair;
    const problem = pairProblem(grammar, words.length, flags, pair);
    if (problem !== null) problems.push(problem);
    else if (name === null) words.push(word);
    // A flag with a problem still counts as given, so that it is not reported as missing too.
    if (name === null || !grammar.known.includes(name)) continue;
    if (grammar.isList(name)) lists.getOrInsertComputed(name, () => []).push(value ?? "");
    else flags.set(name, flags.get(name) ?? value ?? "");
  }
  const missing = grammar.required.slice(words.length);
  problems.push(...missing.map((word) => `${word} is missing: tollgate ${command} ${grammar.required.join(" ")}`));
  return { command, words, flags, lists, problems };
}

/** The needed flags of a command without words, when just their values were given. */
function flagsMeant({ wordsMax }: Grammar, forms: readonly string[], rest: readonly string[]) {
  const needed = [...(forms[0] ?? "").replaceAll(/\[[^\]]*\]/g, "").matchAll(FLAG)].map(([, name = ""]) => name);
  if (wordsMax > 0 || forms.length > 1 || needed.length < 2 || rest.length !== needed.length) return null;
  return rest.every(isName) ? new Map(needed.map((name, index) => [name, shownWord(rest[index] ?? "")])) : null;
}

function pairProblem(grammar: Grammar, words: number, flags: ReadonlyMap<string, string>, pair: Pair): string | null {
  const { word, name, value } = pair;
  const { known, isBare, valueForm, wordsMax } = grammar;
  if (name === null) return isName(word) && words < wordsMax ? null : strayProblem(word, grammar);
  const all = known.map((flag) => `--${flag}`);
  if (!known.includes(name)) {
    // Most variables have no flag.
    const variable = `TOLLGATE_${name.toUpperCase().replaceAll("-", "_")}`;
    const isVariable = known.includes("env-file") && Object.hasOwn(VARIABLES, variable);
    if (isVariable) return `--${name} is not a flag: set ${variable}`;
    return unknown(`--${name}`, "is not a flag of this command", [...all, "--help"]);
  }
  const form = valueForm(name);
  if (value === null && !isBare(name)) return `--${name} needs a value: --${name} ${form}`;
  if (value !== null && form === undefined) return `--${name} takes no value`;
  return flags.has(name) ? `--${name} may be given only once` : null;
}

/** @param word one that is neither a flag nor a word that the command takes */
function strayProblem(word: string, { known, valueForm, wordsMax }: Grammar): string {
  if (/^-[^-]/.test(word)) {
    const meant = known.find((name) => name.startsWith(word.charAt(1)));
    const hint = meant === undefined ? "" : `; did you mean --${meant}?`;
    return `${shownWord(word)} is not a flag: flags begin with two hyphens${hint}`;
  }
  const flag = known.find((name) => valueForm(name)?.split("|").includes(word));
  const text = known.find((name) => valueForm(name)?.split("|").includes("TEXT"));
  const takes = wordsMax === 0 && known.length > 0 ? ": this command takes flags only" : "";
  const none = text === undefined ? takes : `: --${text} takes text; put it in quotes if it contains spaces`;
  const hint = flag === undefined ? none : `; did you mean --${flag} ${word}?`;
  return `${word === "" ? "an empty word" : shownWord(word)} is not expected here${hint}`;
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

const unknown = (word: string, problem: string, known: readonly string[], meant = suggest(word, known)): string =>
  `${shownWord(word)} ${problem}${meant === null ? "" : `; did you mean ${meant}?`}`;

/** The word as one short line without control characters, whatever was typed. */
export const shownWord = (word: string): string => JSON.stringify(word.slice(0, 40)).slice(1, -1);
