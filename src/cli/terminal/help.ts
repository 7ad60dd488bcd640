// `tollgate help`: made from the registry of commands and the tables of variables in the manual's page on configuration.
// `tollgate help TOPIC` prints a page of the manual as it is, and `tollgate COMMAND --help` what the registry knows of a command.
import { StartupProblem } from "../../core/startup.ts";
import { suggest } from "../../core/text.ts";
import { PAGES } from "../../gateway/manual/pages.ts";
import { type CliCommand, type Commands, commandProblem, grammarOf, isGroup, shownWord } from "../command-line.ts";
import { programText } from "../program.ts";

/** What each flag means, under its own name, or under that of a command and its own where commands differ. */
const FLAG_MEANINGS: Readonly<Record<string, string>> = {
  mode: "the service: gateway or facilitator (TOLLGATE_MODE)",
  host: "the address to listen on (TOLLGATE_HOST)",
  port: "the port to listen on; 0 takes a free one (TOLLGATE_PORT)",
  "data-dir": "directory of the SQLite database and of master.key (TOLLGATE_DATA_DIR); ./data if not given",
  "env-file": "file with one NAME=value per line; flags and environment variables override it",
  json: "print one JSON document on standard output",
  yes: "don't ask whether to go on",
  tenant: "the tenant",
  user: "a user of the tenant",
  scope: "the token's scopes, with one space between them",
  ttl: "how long the token is valid: 90s, 30m, 12h or 7d",
  all: "every token of every tenant; not with --tenant or --user",
  "help all": "every command and every variable",
  facilitator: "https URL of the facilitator",
  bundle: "PEM file with the client certificate, its private key, and the CA of the facilitator's certificate",
  cert: "PEM file with the client's certificate",
  "max-per-transaction": "the most that one payment may be, in smallest units (1 USDC is 1000000)",
  "daily-ceiling": "the most that the account may settle in a day, in smallest units (1 USDC is 1000000)",
  dir: "directory of the CA and of what it issues",
  "pki server host": "host name or IP address in the certificate; may be given several times",
  name: "name of the client, and of its files",
  jwks: "public keys, as a file or as the URL of a gateway's /.well-known/jwks.json",
  data: "the request's body: TEXT, a file after @, or - for standard input; for an MCP agent, a JSON-RPC request",
  stream: "print the response as it arrives, however long it is",
  wait: "how long to wait for the result; 60 if not given, 0 starts the call and returns",
  url: "the gateway; http://127.0.0.1:8080 if not given",
  "token-file": "file with the token, which only its owner can read; overrides TOLLGATE_TOKEN",
  "payer-key-file": "file with the private key to pay with, which only its owner can read",
  "max-price": "the most that is paid for the call, in USDC, such as 0.05; 0 if not given",
  verify: "read the whole copy, and open its keys",
};

/** Sections that are listed for a word that is no topic. */
const FOUND_SHOWN = 8;

const WHAT_IT_IS = "tollgate: a multi-tenant gateway for agents, and the facilitator that settles their payments";

export function shortHelp(commands: Commands): string {
  const program = programText();
  return `${WHAT_IT_IS}

Usage: tollgate COMMAND [flags]

${summariesText(Object.entries(commands))}
Help:
  tollgate COMMAND --help      a command and its flags
  tollgate help configuration  every variable; a flag overrides its variable, and both override --env-file
  tollgate help TOPIC          a page of the manual, such as payments, operations or troubleshooting
  tollgate --help              all commands, variables and topics
${program === "tollgate" ? "" : `\nHere tollgate is called as ${program}\n`}`;
}

function summariesText(entries: readonly (readonly [string, CliCommand])[]): string {
  const width = Math.max(...entries.map(([name]) => name.length));
  return entries.map(([name, { summary }]) => `  ${name.padEnd(width)}  ${summary}\n`).join("");
}

/** The help on a topic, a command, or a group of commands; null when there is no such thing. */
export function helpOn(words: readonly string[], commands: Commands): string | null {
  const name = words.join(" ");
  const command = Object.hasOwn(commands, name) ? commands[name] : undefined;
  const group = Object.entries(commands).filter(([other]) => other.startsWith(`${name} `));
  if (command === undefined && isGroup(name, commands)) return groupHelp(name, group);
  if (command === undefined) return PAGES.find((page) => page.name === name.toLowerCase())?.text ?? null;
  const others = group.length === 0 ? "" : `\nSee also:\n${summariesText(group)}`;
  return `${commandHelp(name, command)}${others}`;
}

function groupHelp(name: string, group: readonly (readonly [string, CliCommand])[]): string {
  return `Usage: tollgate ${name} COMMAND [flags]

${summariesText(group)}
tollgate ${name} COMMAND --help shows the flags of a command.
`;
}

function commandHelp(name: string, { forms, about }: CliCommand): string {
  const usages = forms.map((form) => `tollgate ${name} ${form}`.trimEnd());
  const { known, valueForm } = grammarOf(forms);
  const flags = known.map((flag) => {
    const value = valueForm(flag);
    return [`--${flag}${value === undefined ? "" : ` ${value}`}`, meaningOf(name, flag)] as const;
  });
  const width = Math.max(0, ...flags.map(([flag]) => flag.length));
  const rows = flags.map(([flag, meaning]) => `  ${flag.padEnd(width)}  ${meaning}\n`);
  const variables = known.includes("env-file") ? "\nVariables: tollgate help configuration\n" : "";
  return `Usage: ${usages.join("\n       ")}

${about}
${rows.length === 0 ? "" : `\n${rows.join("")}`}${variables}`;
}

export const meaningOf = (command: string, flag: string): string | undefined =>
  FLAG_MEANINGS[`${command} ${flag}`] ?? FLAG_MEANINGS[flag];

export function helpText(commands: Commands, serve: CliCommand): string {
  const usages = [["", serve] as const, ...Object.entries(commands)].map(([name, { forms, about }]) => {
    const calls = forms.map((form) => `  ${["tollgate", name, form].filter((part) => part !== "").join(" ")}\n`);
    return `${calls.join("")}${about.replaceAll(/^/gm, "      ")}\n`;
  });
  const width = Math.max(...PAGES.map(({ name }) => name.length));
  const topics = PAGES.map(({ name, summary }) => `  ${name.padEnd(width)}  ${summary}\n`);
  return `${WHAT_IT_IS}

${usages.join("")}  tollgate --help | --version

Everything else is set by environment variables. A flag overrides its variable. A variable marked with * can
be read from a file: NAME_FILE names it.
${variablesText()}
Topics of tollgate help:
${topics.join("")}`;
}

/** Where the manual tells of a word that is no topic. @throws StartupProblem when it does not, or the word is nearly a topic */
export async function searchHelp(wanted: string, commands: Commands): Promise<string> {
  const [first = "", second = ""] = wanted.split(" ");
  if (isGroup(first, commands)) throw new StartupProblem(commandProblem(first, second, Object.keys(commands)));
  const names = PAGES.map(({ name }) => name);
  const meant = suggest(wanted, [...names, ...Object.keys(commands)]);
  const { searchManual } = await import("../../gateway/manual/routes.ts");
  const found = meant === null ? (await searchManual(wanted)).slice(0, FOUND_SHOWN) : [];
  const isNone = `${shownWord(wanted)} is neither a command nor a topic`;
  if (found.length === 0) {
    const hint = meant === null ? `the topics are ${names.join(", ")}` : `did you mean ${meant}?`;
    throw new StartupProblem(`${isNone}; ${hint}`);
  }
  const width = Math.max(...found.map(([page]) => page.length));
  const rows = found.map(([page, heading]) => `  ${page.padEnd(width)}  ${heading}\n`);
  return `${isNone}; these sections mention it; read the first with tollgate help ${found[0]?.[0]}:\n\n${rows.join("")}`;
}

/** A heading, or a row of the tables that the page on configuration has below these headings. */
const VARIABLE = /^## (Variables? of .+)$|^\| `(\w+)`( \\\*)?(?: `(--[\w-]+)`)? \| (.+?) \| (.+) \|$/gm;

function variablesText(): string {
  const page = PAGES.find(({ name }) => name === "configuration")?.text ?? "";
  const parts = [...page.matchAll(VARIABLE)].map(([, title, name, secret, flag, fallback = "", meaning = ""]) => {
    if (title !== undefined) return `\n${title}:\n`;
    const head = `${name}${secret === undefined ? "" : "*"}${flag === undefined ? "" : ` (${flag})`}`;
    return `  ${head} [${fallback.replaceAll("`", "")}]\n      ${meaning.replaceAll("\\", "")}\n`;
  });
  return parts.join("");
}
