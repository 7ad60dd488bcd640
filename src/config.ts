// The configuration, and the only reader of the process environment. Everything is checked before anything starts, so that an
// operator sees all problems at once. A variable's text comes from its flag, from the environment, or, for secrets, from the
// file that NAME_FILE names. Values are parsed by the table in config/variables.ts, and put at the paths that it names.
import { statSync } from "node:fs";
import { resolve } from "node:path";
import { readTlsFiles, validityWarnings } from "./config/pem.ts";
import * as rules from "./config/rules.ts";
import { fileProblem, readTextFile, valueProblem, writtenPath } from "./config/values.ts";
import type { Sources, VariableRow } from "./config/variables.ts";
import { CALL, COMMON, DEMO, FACILITATOR, GATEWAY, MASTER_KEYS } from "./config/variables.ts";
import { didYouMean } from "./core/text.ts";
import { systemClock } from "./core/time.ts";
import type { TracingOptions } from "./core/tracing.ts";
import { type Environment, OWN_VARIABLES } from "./environment.ts";
import { type Network, networkNamed } from "./x402/network.ts";

export const processEnvironment: Environment = process.env;

export const VARIABLES = { ...COMMON, ...GATEWAY, ...FACILITATOR, ...DEMO, ...CALL };

type Flags = ReadonlyMap<string, string>;
export type Config = ReturnType<typeof arrange>;
export type FacilitatorConfig = NonNullable<Config["facilitator"]>;

/** The command that needs the configuration; it decides which variables are read. */
export type Purpose = "serve" | "token" | "keys" | "migrate" | "backup" | "restore" | "account" | "demo" | "call";

/**
 * The configuration of a command, from variables and the files that they name. Variables of the other service are ignored, so that
 * both services may be started with one environment.
 * @param flags by name, without dashes; flags that override no variable are the command's own
 * @returns null as the configuration when there are problems, each of which names a variable, file or flag, and what it must be;
 * `unread` warns of each `TOLLGATE_` variable that is set but that nothing reads
 */
export function loadConfig(purpose: Purpose, flags: Flags, environment: Environment, terminal: boolean) {
  const mode = readRow("TOLLGATE_MODE", COMMON.TOLLGATE_MODE, flags, environment).value;
  const read = tablesOf(purpose, mode);
  const { values, sources, problems } = readValues(read.tables, flags, environment);
  for (const rule of read.rules) {
    if (problems.has(rule.name) || (rule.other !== null && problems.has(rule.other))) continue;
    const problem = rule.problem(values, (name) => environment[name] ?? "");
    if (problem !== false) problems.set(rule.name, `${sources.get(rule.name) ?? rule.name} ${problem}`);
  }
  // Without these warnings an expired certificate would first show when every handshake fails.
  const expiries = (["TOLLGATE_TLS_CERT_FILE", "TOLLGATE_CLIENT_CA_FILE"] as const).flatMap((name) =>
    validityWarnings(name, values[name] ?? "", systemClock.now()),
  );
  const config = problems.size === 0 ? arrange(values, terminal, environment) : null;
  return { config, problems: [...problems.values()], unread: unreadVariables(environment), warnings: expiries };
}

/** The tables of variables that a command reads, and the rules that hold between their values. */
function tablesOf(purpose: Purpose, mode: rules.ConfigValues["TOLLGATE_MODE"]) {
  const { MODE_RULES, COMMON_RULES } = rules;
  const gateway = { tables: [COMMON, GATEWAY], rules: [...COMMON_RULES, ...rules.GATEWAY_RULES] };
  const either = { tables: [COMMON], rules: COMMON_RULES };
  switch (purpose) {
    case "demo":
      return { tables: [DEMO], rules: [] };
    case "call":
      return { tables: [CALL, { TOLLGATE_CA_FILE: COMMON.TOLLGATE_CA_FILE }], rules: [] };
    case "account":
      return either;
    case "token":
    case "keys":
      return gateway;
    case "restore":
      // A gateway's copy holds keys, for which the master key is needed; a facilitator's holds none.
      return { ...either, tables: [COMMON, MASTER_KEYS] };
    case "backup":
      // The master key opens the keys of the copy. No rule checks the data directory: the command reports a missing one itself.
      return mode === "gateway" ? gateway : { tables: [COMMON, MASTER_KEYS], rules: rules.BACKUP_RULES };
    case "migrate":
      return mode === "facilitator" ? either : gateway;
    case "serve":
      if (mode === "gateway") return gateway;
      if (mode === null) return { tables: [COMMON, GATEWAY, FACILITATOR], rules: [...MODE_RULES, ...COMMON_RULES] };
      return { tables: [COMMON, FACILITATOR], rules: [...COMMON_RULES, ...rules.FACILITATOR_RULES] };
  }
}

/** Reads each variable by itself. The value of a variable with a problem is its default. */
function readValues(tables: readonly object[], flags: Flags, environment: Environment) {
  const problems = new Map<string, string>();
  const sources = new Map<string, string>();
  const read: Record<string, unknown> = {};
  for (const [name, row] of Object.entries<VariableRow<unknown, unknown, string>>(VARIABLES)) {
    read[name] = row.fallback;
    if (!tables.some((table) => Object.hasOwn(table, name))) continue;
    const { value, source, problem } = readRow(name, row, flags, environment);
    if (problem !== null) problems.set(name, problem);
    sources.set(name, source);
    read[name] = value;
  }
  // The cast is safe: each value was parsed by the row of its name, or is that row's fallback.
  return { values: read as rules.ConfigValues, sources, problems };
}

function readRow<T, F>(name: string, row: VariableRow<T, F, string>, flags: Flags, environment: Environment) {
  const { kind, fallback } = row;
  const { text, source, problem } = readRaw(name, row, flags, environment);
  const parsed = text === null ? fallback : kind.parse(text);
  if (parsed !== undefined) return { value: parsed, source, problem };
  return { value: fallback, source, problem: valueProblem(source, kind, text ?? "") };
}

/** The type of an object with the values at dotted paths. */
type Nested<T> = {
  readonly [K in keyof T as K extends `${infer Head}.${string}` ? Head : K]: K extends `${infer Head}.${string}`
    ? Nested<{ [P in keyof T as P extends `${Head}.${infer Rest}` ? Rest : never]: T[P] }>
    : T[K];
};

type OptionTree = Nested<{ [N in rules.VariableName as (typeof VARIABLES)[N]["path"]]: rules.ConfigValues[N] }>;

function nested(values: rules.ConfigValues): OptionTree {
  const options: Record<string, unknown> = {};
  for (const [name, { path }] of Object.entries(VARIABLES)) {
    const parts = path.split(".");
    const last = parts.pop() ?? path;
    let branch = options;
    for (const part of parts) {
      branch[part] ??= {};
      branch = branch[part] as typeof options;
    }
    branch[last] = values[name as rules.VariableName];
  }
  // The cast is safe, since the type is derived from the paths in this table.
  return options as unknown as OptionTree;
}

/** The options as the product uses them. A group of options is null without the values that it needs. */
function arrange(values: rules.ConfigValues, terminal: boolean, environment: Environment) {
  const options = nested(values);
  const { masterKeys, log, identity, vault } = options;
  const [{ issuer, audience }, { address, token }] = [identity.oidc, vault];
  const oidc = issuer === null || audience === null ? null : { ...identity.oidc, issuer, audience };
  const tokenFile = renewedFile(environment["TOLLGATE_VAULT_TOKEN_FILE"]);
  const network = networkNamed("base");
  return {
    ...options,
    network,
    port: options.port ?? rules.GATEWAY_PORT,
    reusePort: options.reusePort === "1",
    dataDir: resolve(options.dataDir),
    /** Without a trailing slash; null to take it from the request's Host. */
    publicUrl: options.publicUrl?.replace(/\/+$/, "") ?? null,
    masterKeys: {
      ...masterKeys,
      /** Path of the file to read the key from again; null when the key did not come from such a file. */
      file: renewedFile(environment["TOLLGATE_MASTER_KEY_FILE"]),
      nextFile: renewedFile(environment["TOLLGATE_NEW_MASTER_KEY_FILE"]),
    },
    log: { ...log, format: log.format ?? (terminal ? "pretty" : "json") },
    /** `oidc` is null for the local issuer. */
    identity: { ...identity, oidc },
    /** A Vault agent renews the token in its file, so the file is read again for each request. */
    vault: address === null || token === null ? null : { ...vault, address, token, tokenFile },
    tracing: arrangeTracing(options),
    /** Null unless the mode is facilitator. */
    facilitator: arrangeFacilitator(options, network, environment),
  } as const;
}

/** Null when tracing is off. */
function arrangeTracing({ tracing, extraCa }: OptionTree): TracingOptions | null {
  const { endpoint } = tracing;
  return endpoint === null ? null : { ...tracing, endpoint, extraCa };
}

/** Null when a required variable is not set. In facilitator mode the rules report the missing variable. */
function arrangeFacilitator(options: OptionTree, network: Network, environment: Environment) {
  const { host, port, databaseUrl, drainMs, rpcUrls, facilitator } = options;
  const { limits } = facilitator;
  const { cert, key, clientCa } = facilitator.tls;
  const tlsPaths = {
    cert: resolve(environment["TOLLGATE_TLS_CERT_FILE"] ?? ""),
    key: resolve(environment["TOLLGATE_TLS_KEY_FILE"] ?? ""),
    clientCa: resolve(environment["TOLLGATE_CLIENT_CA_FILE"] ?? ""),
  };
  const signers = arrangeSigners(facilitator.signers);
  if (cert === null || key === null || clientCa === null || rpcUrls === null || signers === null) return null;
  return {
    network,
    host,
    port: port ?? rules.FACILITATOR_PORT,
    openPort: facilitator.openPort,
    dataDir: resolve(options.dataDir),
    databaseUrl,
    drainMs,
    tracing: arrangeTracing(options),
    tls: { cert, key, clientCa },
    readTls: () => readTlsFiles(tlsPaths),
    rpcUrls,
    signers,
    limits: {
      ...limits,
      confirmations: limits.confirmations ?? network.confirmations,
      gasLowWaterWei: limits.gasLowWaterWei ?? network.fees.lowWater,
      dailyGasWei: limits.dailyGasWei ?? network.fees.dailyGas,
      maxFee: limits.maxFee ?? network.fees.maxFee,
    },
  } as const;
}

function arrangeSigners({ keys, url, address }: OptionTree["facilitator"]["signers"]) {
  if (keys !== null) return { kind: "local", keys } as const;
  return url === null || address === null ? null : ({ kind: "remote", url, address } as const);
}

/** The text of a variable; null when unset, never empty. `source` is what the operator wrote: the variable, its file's or its flag. */
function readRaw(name: string, { flag, secret }: Sources, flags: Flags, environment: Environment) {
  const given = flag === undefined ? undefined : flags.get(flag);
  // An empty variable counts as unset, but an empty flag is certainly a mistake.
  if (given === "") return { text: null, source: `--${flag}`, problem: `--${flag} must not be empty` };
  if (given !== undefined) return { text: given, source: `--${flag}`, problem: null };
  const text = environment[name] || null;
  const file = secret === true ? environment[`${name}_FILE`] || null : null;
  if (file === null) return { text, source: name, problem: null };
  if (text === null) return fromFile(`${name}_FILE`, file);
  return { text: null, source: name, problem: `${name} and ${name}_FILE must not both be set` };
}

const SECRET_BYTES_MAX = 65_536;

function fromFile(source: string, path: string) {
  let why: string;
  try {
    const text = readTextFile(path, SECRET_BYTES_MAX).replace(/\r?\n$/, "");
    if (text !== "") return { text, source, problem: null };
    why = `${writtenPath(path)} is empty`;
  } catch (error) {
    why = fileProblem(path, error);
  }
  const must = `must be the path of a readable file that holds the value (at most ${SECRET_BYTES_MAX} bytes)`;
  return { text: null, source, problem: `${source} ${must}: ${why}` };
}

/** The path if the file can be read again; null for a pipe (/dev/fd/3), whose content is gone after the first reading. */
const renewedFile = (path: string | undefined): string | null =>
  path && statSync(path, { throwIfNoEntry: false })?.isFile() ? path : null;

const ENV_LINE = /^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$/;
const ENV_LINES_TOLD = 10;
const MUST_BE_VARIABLE = "NAME=value (no blank before =), a comment that begins with #, or empty";
const MUST_BE_QUOTED = "NAME=value with one quote at each end of the value, or with none";

/**
 * The environment, and under it the variables of a file: one `NAME=value` a line, whose value may stand in quotes; lines that begin
 * with `#` and empty lines are skipped. What the environment sets takes precedence over the file, even if one of the two sets
 * NAME and the other NAME_FILE.
 * @returns problems that name the file and the line, and never show the line, since it may hold a secret; `located` adds file
 * and line to a problem that begins with the name of a variable, if the file has set it
 */
export function withEnvFile(environment: Environment, path: string | undefined) {
  const lines = new Map<string, readonly [where: string, hint: string]>();
  const located = (problem: string) => {
    const [name = ""] = /^\w+/.exec(problem) ?? [];
    const [where, hint] = lines.get(name) ?? ["", ""];
    return `${name}${where}${problem.slice(name.length)}${hint}`;
  };
  if (path === undefined) return { environment, located, problems: [] };
  if (path === "") return { environment, located, problems: ["--env-file must not be empty"] };
  const file = resolve(path);
  let text: string;
  try {
    text = readTextFile(path);
  } catch (error) {
    const why = fileProblem(file, error, true);
    return { environment, located, problems: [`--env-file must be the path of a readable file of variables: ${why}`] };
  }
  const merged: Record<string, string | undefined> = {};
  const bad: string[] = [];
  for (const [index, line] of text.split(/\r?\n/).entries()) {
    if (/^\s*(#|$)/.test(line)) continue;
    const [, name = "", written = ""] = ENV_LINE.exec(line) ?? [];
    const value = unquoted(written.trim());
    const must = name === "" ? MUST_BE_VARIABLE : MUST_BE_QUOTED;
    const hint = commentHint(written);
    if (name === "" || value === null) bad.push(`line ${index + 1} must be ${must}${hint}`);
    else if (!environment[name] && !environment[otherSource(name)]) {
      merged[name] = value;
      lines.set(name, [` (line ${index + 1} of ${file})`, hint]);
    }
  }
  const problems = bad.slice(0, ENV_LINES_TOLD).map((problem) => `--env-file ${file}: ${problem}`);
  const set = Object.entries(environment).filter(([name, value]) => value || merged[name] === undefined);
  return { environment: { ...merged, ...Object.fromEntries(set) }, located, problems };
}

/** The variable that would set the same secret: itself or its file. */
const otherSource = (name: string): string =>
  name.endsWith("_FILE") ? name.slice(0, -"_FILE".length) : `${name}_FILE`;

const commentHint = (written: string) => (/\s#/.test(written) ? ": a comment needs a line of its own" : "");

/** Null if the value begins with a quote that is not closed, or is closed before the end of the value. */
function unquoted(written: string): string | null {
  const quote = /^["']/.exec(written)?.[0];
  if (quote === undefined) return written;
  const inner = written.slice(1, -1);
  return written.length > 1 && written.endsWith(quote) && !inner.includes(quote) ? inner : null;
}

function unreadVariables(environment: Environment): string[] {
  const known = new Set([...Object.keys(VARIABLES), ...OWN_VARIABLES]);
  for (const [name, { secret }] of Object.entries<Sources>(VARIABLES)) if (secret === true) known.add(`${name}_FILE`);
  return Object.keys(environment)
    .filter((name) => /^TOLLGATE_/i.test(name) && !known.has(name))
    .map((name) => `${name} is set but nothing reads it${didYouMean(name, known)}`);
}
