// `tollgate --help`, made from the table of variables, so that it can't leave one out.
import { VARIABLES } from "../config.ts";

const USAGE = `tollgate: a multi-tenant gateway for agents

  tollgate --mode gateway [--host H] [--port N] [--data-dir DIR]
      run the gateway
  tollgate token --tenant T --user U [--scope "a b"] [--ttl 12h] [--data-dir DIR]
      print a token of the local issuer; --ttl takes s, m, h or d, 12h if not given
  tollgate migrate [--data-dir DIR]
      apply pending migrations of the database and exit
  tollgate --help | --version

Everything else is set by environment variables. A flag overrides its variable. A variable marked with * can
be read from a file: NAME_FILE names it.
`;

interface Row {
  readonly fallback: unknown;
  readonly shown?: string;
  readonly meaning: string;
  readonly flag?: string;
  readonly secret?: true;
}

export function helpText(): string {
  const rows = Object.entries<Row>(VARIABLES).map(([name, row]) => {
    const flag = row.flag === undefined ? "" : ` (--${row.flag})`;
    const fallback = row.shown ?? (row.fallback === null ? "unset" : String(row.fallback));
    return `  ${name}${row.secret === true ? "*" : ""}${flag} [${fallback}]\n      ${row.meaning}\n`;
  });
  return `${USAGE}\n${rows.join("")}`;
}
