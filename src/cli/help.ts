// `tollgate help`: made from the registry of commands and the tables of variables in the manual's page on configuration.
// `tollgate help TOPIC` prints a page of the manual as it is.
import { StartupProblem } from "../core/startup.ts";
import { suggest } from "../core/text.ts";
import { PAGES } from "../gateway/manual/pages.ts";
import { type CliCommand, type Commands, shownWord } from "./command-line.ts";

export function helpText(commands: Commands, serve: CliCommand): string {
  const usages = [["", serve] as const, ...Object.entries(commands)].map(([name, { forms, about }]) => {
    const calls = forms.map((form) => `  ${["tollgate", name, form].filter((part) => part !== "").join(" ")}\n`);
    return `${calls.join("")}${about.replaceAll(/^/gm, "      ")}\n`;
  });
  const width = Math.max(...PAGES.map(({ name }) => name.length));
  const topics = PAGES.map(({ name, summary }) => `  ${name.padEnd(width)}  ${summary}\n`);
  return `tollgate: a multi-tenant gateway for agents, and the facilitator that settles their payments

${usages.join("")}  tollgate help | --help | --version

Everything else is set by environment variables. A flag overrides its variable. A variable marked with * can
be read from a file: NAME_FILE names it.
${variablesText()}
Topics of tollgate help:
${topics.join("")}`;
}

/** The page of the manual on a topic. @throws StartupProblem when there is no such topic */
export function topicText(topic: string): string {
  const page = PAGES.find(({ name }) => name === topic.toLowerCase());
  if (page !== undefined) return page.text;
  const names = PAGES.map(({ name }) => name);
  const meant = suggest(topic.toLowerCase(), names);
  const hint = meant === null ? `the topics are ${names.join(", ")}` : `did you mean ${meant}?`;
  throw new StartupProblem(`${shownWord(topic)} is not a topic; ${hint}`);
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
