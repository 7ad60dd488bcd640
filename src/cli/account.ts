// `tollgate account`: who may have payments settled by the facilitator. It works on the database alone. A running
// facilitator applies every change from its next request on.

import { certificateFile, readCertificates } from "../config/pem.ts";
import { amount, valueProblem } from "../config/values.ts";
import type { Config } from "../config.ts";
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { suggest } from "../core/text.ts";
import { systemClock } from "../core/time.ts";
import {
  addAccount,
  addCertificate,
  type ListedAccount,
  listAccounts,
  type NewAccount,
  removeAccount,
  removeCertificate,
  setEnabled,
} from "../facilitator/accounts.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";
import type { CommandLine } from "./command-line.ts";
import { openDataDir, requireDatabase } from "./open.ts";

type Change = "account disable" | "account enable" | "account remove";
type CertificateChange = "account add-cert" | "account remove-cert";
export type AccountCommand = "account add" | "account list" | Change | CertificateChange;

type AccountRequest =
  | { readonly command: "account add"; readonly account: NewAccount }
  | { readonly command: "account list" }
  | { readonly command: Change; readonly name: string }
  | { readonly command: CertificateChange; readonly name: string; readonly certificate: string };

interface Read {
  readonly request: AccountRequest | null;
  readonly problems: readonly string[];
}

/** The request that words and flags make, or null and every problem that the flags have. */
export function readAccountRequest(
  command: AccountCommand,
  { words, flags }: Pick<CommandLine, "words" | "flags">,
): Read {
  const [name = ""] = words;
  switch (command) {
    case "account list":
      return { request: { command }, problems: [] };
    case "account disable":
    case "account enable":
    case "account remove":
      return { request: { command, name }, problems: [] };
    case "account add":
      return readNewAccount(name, flags);
    default: {
      const { text, problem } = readClientCertificate(flags.get("cert"));
      if (text === null) return { request: null, problems: problem === null ? [] : [problem] };
      return { request: { command, name, certificate: text }, problems: [] };
    }
  }
}

function readNewAccount(name: string, flags: CommandLine["flags"]): Read {
  const cert = readClientCertificate(flags.get("cert"));
  const limits = ["max-per-transaction", "daily-ceiling"].map((flag) => readLimit(flag, flags.get(flag)));
  const [maxPerTransaction = null, dailyCeiling = null] = limits.map(({ text }) => text);
  const problems = [cert, ...limits].flatMap(({ problem }) => problem ?? []);
  if (cert.text === null || problems.length > 0) return { request: null, problems };
  const account = { name, certificate: cert.text, maxPerTransaction, dailyCeiling };
  return { request: { command: "account add", account }, problems };
}

interface ReadFlag {
  readonly text: string | null;
  readonly problem: string | null;
}

function readLimit(flag: string, given: string | undefined): ReadFlag {
  const bad = given !== undefined && amount.parse(given) === undefined;
  return { text: given ?? null, problem: bad ? `--${flag} must be ${amount.must}` : null };
}

/** The first certificate of a bundle. The others are its issuers. */
function readClientCertificate(path: string | undefined): ReadFlag {
  if (path === undefined) {
    return { text: null, problem: "--cert must be given: the path of a PEM file with the client's certificate" };
  }
  const [certificate] = readCertificates(path);
  if (certificate === undefined) return { text: null, problem: valueProblem("--cert", certificateFile, path) };
  if (certificate.ca) {
    return { text: null, problem: "--cert must be the certificate of a client, not one of a CA" };
  }
  return { text: certificate.toString(), problem: null };
}

/**
 * @returns what to print
 * @throws StartupProblem for what the operator can correct
 */
export async function runAccount(
  config: Pick<Config, "databaseUrl" | "dataDir">,
  request: AccountRequest,
  log: Log,
): Promise<string> {
  // An account may be added before the first start.
  if (request.command !== "account add") requireDatabase(config, "facilitator");
  openDataDir(config, log);
  // Standard error is for problems: that the store was opened is none.
  const store = await openStore({ ...config, log: { ...log, info: log.debug }, clock: systemClock });
  try {
    return await perform(store, request);
  } catch (error) {
    if (!(error instanceof Fault) || error.kind === "unavailable") throw error;
    throw new StartupProblem(error.message, { cause: error });
  } finally {
    await store.close();
  }
}

async function perform(store: Store, request: AccountRequest): Promise<string> {
  if (request.command === "account list") return accountsText(await listAccounts(store.read));
  if (request.command === "account add") {
    const { name, fingerprint } = await addAccount(store, systemClock, request.account);
    return `added ${name}, certificate ${fingerprint}\n`;
  }
  try {
    return await change(store, request);
  } catch (error) {
    if (!(error instanceof Fault) || error.kind !== "not_found") throw error;
    throw await unknownAccount(store, request.name, error);
  }
}

async function change(store: Store, request: Extract<AccountRequest, { readonly name: string }>): Promise<string> {
  const { name } = request;
  switch (request.command) {
    case "account disable":
      await setEnabled(store, systemClock, name, false);
      return `disabled ${name}\n`;
    case "account enable":
      await setEnabled(store, systemClock, name, true);
      return `enabled ${name}\n`;
    case "account remove":
      await removeAccount(store, name);
      return `removed ${name}\n`;
    case "account add-cert":
      return `added to ${name}, certificate ${await addCertificate(store, systemClock, name, request.certificate)}\n`;
    case "account remove-cert": {
      const { fingerprint, left } = await removeCertificate(store, name, request.certificate);
      const rest = left === 0 ? "; it has none left, and settles nothing" : "";
      return `removed from ${name}, certificate ${fingerprint}${rest}\n`;
    }
  }
}

async function unknownAccount(store: Store, name: string, cause: Fault): Promise<StartupProblem> {
  const names = (await listAccounts(store.read)).map((account) => account.name);
  const meant = suggest(name, names);
  const hint = meant === null ? "" : `; did you mean ${meant}?`;
  return new StartupProblem(`NAME must be an account's: there is no ${JSON.stringify(name)}${hint}`, {
    cause,
  });
}

const HEADINGS = ["NAME", "ENABLED", "FINGERPRINT", "MAX PER TRANSACTION", "DAILY CEILING"];
/** For a limit that is the deployment's. */
const DEFAULT = "default";
const NO_CERTIFICATE = "none";

/** Each further certificate of an account has a line of its own. */
function accountsText(accounts: readonly ListedAccount[]): string {
  if (accounts.length === 0) return "there are no accounts\n";
  const rows = accounts.flatMap((account) => {
    const [first = NO_CERTIFICATE, ...others] = account.fingerprints;
    const limits = [account.max_per_transaction ?? DEFAULT, account.daily_ceiling ?? DEFAULT];
    return [
      [account.name, account.enabled ? "yes" : "no", first, ...limits],
      ...others.map((fingerprint) => ["", "", fingerprint, "", ""]),
    ];
  });
  const lines = [HEADINGS, ...rows];
  const widths = HEADINGS.map((_, column) => Math.max(...lines.map((line) => width(line[column]))));
  return lines
    .map((line) => line.map((cell, column) => cell + " ".repeat((widths[column] ?? 0) - width(cell))))
    .map((cells) => `${cells.join("  ").trimEnd()}\n`)
    .join("");
}

/** In columns of a terminal. */
function width(cell = ""): number {
  return Bun.stringWidth(cell);
}
