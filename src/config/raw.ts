// Where the text of a variable comes from: its flag, the environment, or for secrets the file that NAME_FILE
// names. And the search for variables that nothing reads, most of which are misspelt.
import { readFileSync, statSync } from "node:fs";
import { suggest } from "../core/suggest.ts";
import { type Environment, OWN_VARIABLES } from "../environment.ts";
import { fileProblem, writtenPath } from "./values.ts";

interface Raw {
  /** Null when unset; never empty. */
  readonly text: string | null;
  /** What the operator wrote: the name of the variable, its file variable or its flag. */
  readonly source: string;
  readonly problem: string | null;
}

interface Sources {
  readonly flag?: string;
  readonly secret?: true;
}

export function readRaw(
  name: string,
  { flag, secret }: Sources,
  flags: ReadonlyMap<string, string>,
  environment: Environment,
): Raw {
  const given = flag === undefined ? undefined : flags.get(flag);
  if (flag !== undefined && given !== undefined) return fromFlag(`--${flag}`, given);
  const text = environment[name] || null;
  const file = secret === true ? environment[`${name}_FILE`] || null : null;
  if (file === null) return { text, source: name, problem: null };
  if (text === null) return fromFile(`${name}_FILE`, file);
  return { text: null, source: name, problem: `${name} and ${name}_FILE must not both be set` };
}

/** An empty variable counts as unset, but an empty flag is surely a mistake. */
function fromFlag(source: string, given: string): Raw {
  if (given !== "") return { text: given, source, problem: null };
  return { text: null, source, problem: `${source} must not be empty` };
}

const FILE_BYTES_MAX = 65_536;

function fromFile(source: string, path: string): Raw {
  let why: string;
  try {
    // Pipes and devices (a secret handed over as /dev/fd/3) have no size; they are read to their end.
    const isLarge = statSync(path).size > FILE_BYTES_MAX;
    const text = isLarge ? "" : readFileSync(path, "utf8").replace(/\r?\n$/, "");
    if (text !== "") return { text, source, problem: null };
    why = `${writtenPath(path)} is ${isLarge ? "larger" : "empty"}`;
  } catch (error) {
    why = fileProblem(path, error);
  }
  const must = `must be the path of a readable file that holds the value (at most ${FILE_BYTES_MAX} bytes)`;
  return { text: null, source, problem: `${source} ${must}: ${why}` };
}

/** The path, if it can be read again: the content of a pipe (/dev/fd/3) is gone after the first reading. */
export function renewedFile(path: string | undefined): string | null {
  return path && statSync(path, { throwIfNoEntry: false })?.isFile() ? path : null;
}

/** A warning for each `TOLLGATE_` variable that is set and that nothing reads. */
export function unknownVariables(environment: Environment, table: Readonly<Record<string, Sources>>): string[] {
  const known = new Set([...Object.keys(table), ...OWN_VARIABLES]);
  for (const [name, { secret }] of Object.entries(table)) if (secret === true) known.add(`${name}_FILE`);
  return Object.keys(environment)
    .filter((name) => name.startsWith("TOLLGATE_") && !known.has(name))
    .map((name) => {
      const meant = suggest(name, known);
      return `${name} is set but nothing reads it${meant === null ? "" : `; did you mean ${meant}?`}`;
    });
}
