// `tollgate account`: lists and changes the accounts that may have payments settled by the facilitator. The command works on
// the database alone; a running facilitator applies each change from its next request on.
import { X509Certificate } from "node:crypto";
import { certificateFile } from "../config/pem.ts";
import { amount, valueProblem } from "../config/values.ts";
import { VARIABLES } from "../config.ts";
import { isServerOnly } from "../core/certificates.ts";
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { didYouMean } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import * as accounts from "../facilitator/accounts.ts";
import type { Store } from "../storage/store.ts";
import { usdc } from "../x402/network.ts";
import { begin, type CommandLine, type CommandOutcome, neededFlag, shownWord } from "./command-line.ts";
import { type DataLocation, openDataDir, openStoreOf, requireDatabase, withStore } from "./open.ts";
import { disagreement, requireAgreement } from "./terminal/interactive.ts";

export async function account(line: CommandLine): Promise<CommandOutcome> {
  const work = workOf(line);
  const isFinal = line.command === "account remove";
  if (isFinal) requireAgreement(line);
  const { config, log } = begin(line, "account");
  const [name = ""] = line.words;
  // An account may be added before the first start.
  if (line.command !== "account add") requireDatabase(config, "facilitator");
  const question = `The account ${shownWord(name)} and all its certificates will be removed.`;
  const disagreed = isFinal ? await disagreement(line, question) : null;
  if (disagreed !== null) return disagreed;
  return withAccounts(config, log, async (store) => {
    try {
      return await work(store);
    } catch (error) {
      throw error instanceof Fault && error.kind === "not_found" ? await unknownAccount(store, name, error) : error;
    }
  });
}

/** Does what `tollgate account add` does; for the demo. */
export const addNewAccount = (config: DataLocation, account: accounts.NewAccount, log: Log): Promise<string> =>
  withAccounts(config, log, (store) => add(store, account));

/** The work of the command, which resolves with what to print. */
function workOf(line: CommandLine): (store: Store) => Promise<CommandOutcome> {
  const [name = ""] = line.words;
  switch (line.command) {
    case "account add": {
      const certificate = readClientCertificate(line);
      const maxPerTransaction = readLimit(line, "max-per-transaction");
      const dailyCeiling = readLimit(line, "daily-ceiling");
      return (store) => add(store, { name, certificate, maxPerTransaction, dailyCeiling });
    }
    case "account add-cert": {
      const certificate = readClientCertificate(line);
      return async (store) =>
        `added to ${name}, certificate ${await accounts.addCertificate(store, systemClock, name, certificate)}\n`;
    }
    case "account remove-cert": {
      const certificate = readClientCertificate(line);
      return async (store) => {
        const { fingerprint, left } = await accounts.removeCertificate(store, name, certificate);
        const rest = left === 0 ? "; the account has no certificate left and can't settle payments" : "";
        return `removed certificate ${fingerprint} from ${name}${rest}\n`;
      };
    }
    case "account disable":
      return (store) => accounts.setEnabled(store, systemClock, name, false).then(() => `disabled ${name}\n`);
    case "account enable":
      return (store) => accounts.setEnabled(store, systemClock, name, true).then(() => `enabled ${name}\n`);
    case "account remove":
      return (store) => accounts.removeAccount(store, name).then(() => `removed ${name}\n`);
    default:
      return async (store) => {
        const listed = await accounts.listAccounts(store.read);
        return { holds: true, text: accountsText(listed), document: { accounts: listed.map(documented) } };
      };
  }
}

const UNITS = "smallest units (1 USDC is 1000000)";
const inUsdc = (units: string): string => `${units} (${usdc(BigInt(units))} USDC)`;

function readLimit({ flags, problems }: CommandLine, flag: string): string | null {
  const given = flags.get(flag) ?? null;
  if (given !== null && amount.parse(given) === undefined)
    problems.push(`--${flag} must be ${amount.must}, in ${UNITS}`);
  return given;
}

/** The first certificate of the PEM file; any others are those of its issuers. */
function readClientCertificate(line: CommandLine): string {
  const path = neededFlag(line, "cert", "a PEM file with the client's certificate");
  if (path === "") return "";
  const pem = certificateFile.parse(path);
  const certificate = pem === undefined ? undefined : new X509Certificate(pem);
  if (certificate === undefined) line.problems.push(valueProblem("--cert", certificateFile, path));
  else if (certificate.ca) line.problems.push("--cert must be a client's certificate, not a CA's");
  // One that was added before may be removed.
  else if (line.command !== "account remove-cert" && isServerOnly(certificate))
    line.problems.push("--cert must be a client's certificate, not a server's");
  return certificate?.toString() ?? "";
}

/** @throws StartupProblem for faults that the operator can correct */
async function withAccounts<T>(config: DataLocation, log: Log, work: (store: Store) => Promise<T>): Promise<T> {
  openDataDir(config, log);
  // Standard error is for problems, so the events of opening the store are logged at `debug`.
  const opening = openStoreOf("facilitator", config, { ...log, info: log.debug });
  try {
    return await withStore(opening, work);
  } catch (error) {
    if (!(error instanceof Fault) || error.kind === "unavailable") throw error;
    throw new StartupProblem(error.message.replace(/^name: /, "NAME "), { cause: error });
  }
}

async function add(store: Store, account: accounts.NewAccount): Promise<string> {
  const { name, fingerprint } = await accounts.addAccount(store, systemClock, account);
  const { maxPerTransaction: most, dailyCeiling: ceiling } = account;
  const least = VARIABLES.TOLLGATE_MIN_VALUE.fallback;
  if (most !== null && BigInt(most) < least) {
    process.stderr.write(
      `warning: the maximum is below ${inUsdc(String(least))}, the default of TOLLGATE_MIN_VALUE, so a facilitator with ` +
        `that default refuses every payment of ${name}; limits are in ${UNITS}\n`,
    );
  }
  const limits = [
    most === null ? "" : `at most ${inUsdc(most)} a payment\n`,
    ceiling === null ? "" : `at most ${inUsdc(ceiling)} a day\n`,
  ];
  return `added ${name}, certificate ${fingerprint}\n${limits.join("")}`;
}

async function unknownAccount(store: Store, name: string, cause: Fault): Promise<StartupProblem> {
  const names = (await accounts.listAccounts(store.read)).map((account) => account.name);
  return new StartupProblem(`there is no account ${JSON.stringify(name)}${didYouMean(name, names)}`, { cause });
}

function documented({ name, enabled, fingerprints, max_per_transaction, daily_ceiling }: accounts.ListedAccount) {
  return { name, enabled: Boolean(enabled), fingerprints, max_per_transaction, daily_ceiling };
}

const HEADINGS = ["NAME", "ENABLED", "FINGERPRINT", "MAX PER TRANSACTION", "DAILY CEILING"];

/** Each further certificate of an account has a line of its own. */
function accountsText(listed: readonly accounts.ListedAccount[]): string {
  if (listed.length === 0) return "there are no accounts\n";
  const shown = (limit: string | null) => (limit === null ? "default" : inUsdc(limit));
  const rows = listed.flatMap((account) => {
    const [first = "none", ...others] = account.fingerprints;
    const limits = [account.max_per_transaction, account.daily_ceiling].map(shown);
    return [
      [account.name, account.enabled ? "yes" : "no", first, ...limits],
      ...others.map((fingerprint) => ["", "", fingerprint, "", ""]),
    ];
  });
  const lines = [HEADINGS, ...rows];
  const widths = HEADINGS.map((_, column) => Math.max(...lines.map((line) => width(line[column]))));
  const padded = (cell: string, column: number) => cell + " ".repeat((widths[column] ?? 0) - width(cell));
  return lines.map((line) => `${line.map(padded).join("  ").trimEnd()}\n`).join("");
}

const width = (cell = ""): number => Bun.stringWidth(cell);
