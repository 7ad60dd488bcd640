// The command line: which command, with which words and flags. Like the configuration it reports all problems at once,
// with the word that was probably meant.
import { VARIABLES } from "../config.ts";
import { suggest } from "../core/text.ts";

interface Grammar {
  /** What must follow the command, in the words of the help. */
  readonly words?: readonly string[];
  /** What may follow the required words. */
  readonly optional?: readonly string[];
  /** Flags that take a value. */
  readonly flags?: readonly string[];
  /** Flags of `flags` that may stand without a value. */
  readonly bare?: readonly string[];
  /** Flags that may be given more than once. */
  readonly lists?: readonly string[];
}

const SETTINGS = Object.values<{ readonly flag?: string }>(VARIABLES).flatMap(({ flag }) => flag ?? []);

const DATA_DIR = { flags: ["data-dir"] };
const NAMED_ACCOUNT = { words: ["NAME"], flags: ["data-dir"] };
const CERTIFICATE_OF_ACCOUNT = { words: ["NAME"], flags: ["cert", "data-dir"] };

/** By the words that call them. */
const COMMANDS = {
  token: { flags: ["tenant", "user", "scope", "ttl", "data-dir"] },
  "token revoke": { flags: ["tenant", "user", "all", "data-dir"], bare: ["all"] },
  "keys rotate": DATA_DIR,
  migrate: DATA_DIR,
  backup: { optional: ["FILE"], flags: ["verify", "data-dir"], bare: ["verify"] },
  restore: { optional: ["FILE"], flags: ["data-dir"] },
  "account add": { words: ["NAME"], flags: ["cert", "max-per-transaction", "daily-ceiling", "data-dir"] },
  "account list": DATA_DIR,
  "account disable": NAMED_ACCOUNT,
  "account enable": NAMED_ACCOUNT,
  "account remove": NAMED_ACCOUNT,
  "account add-cert": CERTIFICATE_OF_ACCOUNT,
  "account remove-cert": CERTIFICATE_OF_ACCOUNT,
  "receipt verify": { words: ["FILE"], flags: ["jwks"] },
  doctor: { flags: SETTINGS },
  demo: {},
  help: { optional: ["TOPIC"] },
  "pki init": { flags: ["dir"] },
  "pki server": { flags: ["dir"], lists: ["host"] },
  "pki client": { flags: ["dir", "name"] },
} satisfies Readonly<Record<string, Grammar>>;

/** The command without any words. */
type CommandName = keyof typeof COMMANDS | "serve" | "version";

function isCommand(words: string): words is keyof typeof COMMANDS {
  return Object.hasOwn(COMMANDS, words);
}

export interface CommandLine {
  /** Null when there is no such command. */
  readonly command: CommandName | null;
  readonly words: readonly string[];
  /** By name, without dashes; "" for one without a value. */
  readonly flags: ReadonlyMap<string, string>;
  /** The values of flags that may be given more than once, by name. */
  readonly lists: ReadonlyMap<string, readonly string[]>;
  readonly problems: readonly string[];
}

/** @param words what follows the name of the program */
export function readCommandLine(words: readonly string[]): CommandLine {
  if (words.includes("--help") || words.includes("-h")) return asked("help", []);
  if (words.includes("--version")) return asked("version", []);
  const [first = "", second = ""] = words;
  if (!isName(first)) return readRest("serve", { flags: SETTINGS }, words);
  const both = `${first} ${second}`;
  if (isCommand(both)) return readRest(both, COMMANDS[both], words.slice(2));
  if (isCommand(first)) return readRest(first, COMMANDS[first], words.slice(1));
  return asked(null, [commandProblem(first, second)]);
}

function commandProblem(first: string, second: string): string {
  const commands = Object.keys(COMMANDS);
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

function asked(command: CommandName | null, problems: readonly string[]): CommandLine {
  return { command, words: [], flags: new Map(), lists: new Map(), problems };
}

function readRest(command: CommandName, grammar: Grammar, rest: readonly string[]): CommandLine {
  const { words: expected = [], optional = [], flags: once = [], bare = [], lists: often = [] } = grammar;
  const wordsMax = expected.length + optional.length;
  const words: string[] = [];
  const flags = new Map<string, string>();
  const lists = new Map<string, string[]>();
  const problems: string[] = [];
  const flagProblem = (name: string, value: string | null): string | null => {
    const known = [...once, ...often];
    if (!known.includes(name)) return unknownFlag(name, known);
    if (value === null && !bare.includes(name)) return `--${name} must be followed by a value`;
    return flags.has(name) ? `--${name} must be given once only` : null;
  };
  for (const { word, name, value } of pairs(rest)) {
    const problem = name === null ? wordProblem(word, wordsMax - words.length) : flagProblem(name, value);
    if (problem !== null) problems.push(problem);
    else if (name === null) words.push(word);
    else if (often.includes(name)) lists.set(name, [...(lists.get(name) ?? []), value ?? ""]);
    else flags.set(name, value ?? "");
  }
  for (const missing of expected.slice(words.length)) problems.push(`${missing} must be given`);
  return { command, words, flags, lists, problems };
}

function wordProblem(word: string, missing: number): string | null {
  return isName(word) && missing > 0 ? null : `${shown(word)} is not expected`;
}

function unknownFlag(name: string, known: readonly string[]): string {
  return unknown(
    `--${name}`,
    "is no flag",
    known.map((flag) => `--${flag}`),
  );
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
  return `${shown(word)} ${problem}${meant === null ? "" : `; did you mean ${meant}?`}`;
}

function shown(word: string): string {
  return JSON.stringify(word.slice(0, 40)).slice(1, -1);
}
