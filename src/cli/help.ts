// `tollgate help`, made from the tables of variables, so that it can't leave one out, and the pages of the manual that
// `tollgate help TOPIC` prints as they are.
import { COMMON, DEMO, FACILITATOR, GATEWAY } from "../config/variables.ts";
import { StartupProblem } from "../core/startup.ts";
import { suggest } from "../core/text.ts";
import { PAGES } from "../gateway/manual/pages.ts";

const USAGE = `tollgate: a multi-tenant gateway for agents, and the facilitator that settles their payments

  tollgate --mode gateway|facilitator [--host H] [--port N] [--data-dir DIR]
      run the gateway or the facilitator
  tollgate token --tenant T --user U [--scope "a b"] [--ttl 12h] [--data-dir DIR]
      print a token of the gateway's local issuer; --ttl takes s, m, h or d, 12h if not given
  tollgate token revoke --tenant T [--user U] [--data-dir DIR]
      refuse the tokens of the local issuer that this user, or each user of the tenant, has by now; new ones are taken
  tollgate token revoke --all [--data-dir DIR]
      refuse every token of the local issuer that there is by now, forged ones too: its key is replaced
  tollgate keys rotate [--data-dir DIR]
      renew every key beside the gateways that run: the master key, the key of each tenant, and the keys that sign tokens
      and receipts; a run that was cut short is taken up by the next (see tollgate help operations)
  tollgate account add NAME --cert FILE [--max-per-transaction N] [--daily-ceiling N] [--data-dir DIR]
      let the facilitator settle for the holder of this client certificate (PEM); limits are in atomic units, those
      of the configuration if not given; a running facilitator needs no restart
  tollgate account list [--data-dir DIR]
      print the facilitator's accounts
  tollgate account disable NAME | enable NAME | remove NAME [--data-dir DIR]
      take an account out of use, at once, put it back, or remove it with all its certificates
  tollgate account add-cert NAME --cert FILE | remove-cert NAME --cert FILE [--data-dir DIR]
      give an account one more client certificate, or take one away, at once; so they rotate without a gap
  tollgate pki init --dir DIR
      make a small private CA for the mutual TLS between gateway and facilitator: ca.crt and ca.key
  tollgate pki server --dir DIR --host H [--host H ...]
      issue the facilitator's certificate: server.crt and server.key; H is a host name or an IP address
  tollgate pki client --dir DIR --name N
      issue a client's certificate: N.crt, N.key, and N.pem, the bundle for a credential of the gateway
  tollgate receipt verify FILE --jwks FILE|URL
      check trust receipts offline, one compact JWS a line: signatures, claims and the chain; ends with 1 and names
      the first that does not hold; the keys are those that a gateway shows at /.well-known/jwks.json
  tollgate migrate [--data-dir DIR]
      apply pending migrations of the database and exit; for a facilitator's, set TOLLGATE_MODE=facilitator
  tollgate backup FILE [--verify] [--data-dir DIR]
      copy the SQLite database of a running or stopped service into a new file; with --verify the copy is read as a
      whole then, and its keys are opened; keep master.key beside it, which no copy holds
  tollgate backup --verify FILE [--data-dir DIR]
      check a copy that is there, and make none
  tollgate restore [FILE] [--data-dir DIR]
      once before the first start after a restore to an older state: end the calls in flight of the copy, and keep payments
      that may be older from buying twice; FILE is put in the place of the SQLite database, after a check
  tollgate doctor [--mode gateway|facilitator] [--data-dir DIR]
      try what the configuration names (database, keys, issuer, facilitators, nodes, wallets, clocks) and change nothing;
      a line each says ok, warn or fail, and what to do; ends with 1 after a fail, and with 2 on a bad configuration
  tollgate demo
      play paid calls on this machine, with a chain, both services and two agents of its own, and stay up to be tried
  tollgate help TOPIC
      print a page of the manual; the topics are listed below
  tollgate help | --help | --version

Everything else is set by environment variables. A flag overrides its variable. A variable marked with * can
be read from a file: NAME_FILE names it.
`;

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

export function helpText(): string {
  const groups = GROUPS.map(([title, table]) => `\n${title}:\n${rowsText(table)}`);
  return `${USAGE}${groups.join("")}\nTopics of tollgate help:\n${topicList()}`;
}

function topicList(): string {
  const width = Math.max(...PAGES.map(({ name }) => name.length));
  return PAGES.map(({ name, summary }) => `  ${name.padEnd(width)}  ${summary}\n`).join("");
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
  const shown = JSON.stringify(topic.slice(0, 40)).slice(1, -1);
  throw new StartupProblem(`${shown} is no topic; ${hint}`);
}

function rowsText(table: Readonly<Record<string, HelpRow>>): string {
  const rows = Object.entries(table).map(([name, row]) => {
    const flag = row.flag === undefined ? "" : ` (--${row.flag})`;
    const fallback = row.shown ?? (row.fallback === null ? "unset" : String(row.fallback));
    return `  ${name}${row.secret === true ? "*" : ""}${flag} [${fallback}]\n      ${row.meaning}\n`;
  });
  return rows.join("");
}
