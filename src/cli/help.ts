// `tollgate help`, made from the registry of commands and the table of variables, so that it can't leave one out, and the pages
// of the manual that `tollgate help TOPIC` prints as they are.
import { COMMON, DEMO, FACILITATOR, GATEWAY } from "../config/variables.ts";
import { StartupProblem } from "../core/startup.ts";
import { suggest } from "../core/text.ts";
import { PAGES } from "../gateway/manual/pages.ts";
import { type CliCommand, type Commands, shownWord } from "./command-line.ts";

interface HelpRow {
  readonly fallback: unknown;
  readonly shown?: string;
  readonly meaning: string;
  readonly flag?: string;
  readonly secret?: true;
}

const GROUPS = [
  ["Variables of both", COMMON],
  ["Variables of the gateway", GATEWAY],
  ["Variables of the facilitator", FACILITATOR],
  ["Variable of the demo", DEMO],
] as const;

export function helpText(commands: Commands, serve: CliCommand): string {
  const usages = [["", serve] as const, ...Object.entries(commands)].map(([name, { forms, about }]) => {
    const calls = forms.map((form) => `  ${["tollgate", name, form].filter((part) => part !== "").join(" ")}\n`);
    return `${calls.join("")}${about.replaceAll(/^/gm, "      ")}\n`;
  });
  const groups = GROUPS.map(([title, table]) => `\n${title}:\n${rowsText(table)}`);
  const width = Math.max(...PAGES.map(({ name }) => name.length));
  const topics = PAGES.map(({ name, summary }) => `  ${name.padEnd(width)}  ${summary}\n`);
  return `tollgate: a multi-tenant gateway for agents, and the facilitator that settles their payments

${usages.join("")}  tollgate help | --help | --version

Everything else is set by environment variables. A flag overrides its variable. A variable marked with * can
be read from a file: NAME_FILE names it.
${groups.join("")}
Topics of tollgate help:
${topics.join("")}`;
}

/**
 * The page of the manual on a topic.
 *
 * @throws StartupProblem when there is none
 */
export function topicText(topic: string): string {
  const page = PAGES.find(({ name }) => name === topic.toLowerCase());
  if (page !== undefined) return page.text;
  const names = PAGES.map(({ name }) => name);
  const meant = suggest(topic.toLowerCase(), names);
  const hint = meant === null ? `the topics are ${names.join(", ")}` : `did you mean ${meant}?`;
  throw new StartupProblem(`${shownWord(topic)} is no topic; ${hint}`);
}

function rowsText(table: Readonly<Record<string, HelpRow>>): string {
  const rows = Object.entries(table).map(([name, row]) => {
    const flag = row.flag === undefined ? "" : ` (--${row.flag})`;
    const fallback = row.shown ?? (row.fallback === null ? "unset" : String(row.fallback));
    return `  ${name}${row.secret === true ? "*" : ""}${flag} [${fallback}]\n      ${row.meaning}\n`;
  });
  return rows.join("");
}
