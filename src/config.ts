// The configuration: the one table of variables, and the only reader of the process environment. Everything
// is checked at once, before anything starts, so that an operator sees all problems in one go; `--help` prints
// this same table.
import { availableParallelism } from "node:os";
import { resolve } from "node:path";
import { checkDataDir } from "./config/data-dir.ts";
import { readRaw, renewedFile, unknownVariables } from "./config/raw.ts";
import * as value from "./config/values.ts";
import { LOG_LEVELS } from "./core/log.ts";
import type { Environment } from "./environment.ts";

export const processEnvironment: Environment = process.env;

interface Row<T, F> {
  readonly kind: value.Kind<T>;
  readonly fallback: F;
  /** How `--help` shows the default, where the fallback itself does not say it. */
  readonly shown?: string;
  readonly meaning: string;
  /** The command line flag that overrides the variable. */
  readonly flag?: string;
  /** May come from the file that NAME_FILE names. */
  readonly secret?: true;
}

function row<T, const F>(fields: Row<T, F>): Row<T, F> {
  return fields;
}

const DAY_MS = 86_400_000;
const DAYS_MAX = 36_500;
const GIB = 1024 ** 3;

export const VARIABLES = {
  TOLLGATE_MODE: row({
    kind: value.oneOf(["gateway", "facilitator"]),
    fallback: null,
    flag: "mode",
    shown: "none",
    meaning: "gateway or facilitator",
  }),
  TOLLGATE_HOST: row({
    kind: value.host,
    fallback: "127.0.0.1",
    flag: "host",
    meaning: "listen address",
  }),
  TOLLGATE_PORT: row({
    kind: value.wholeNumber(0, 65_535),
    fallback: 8080,
    flag: "port",
    meaning: "port; 0 takes a free one",
  }),
  TOLLGATE_DATA_DIR: row({
    kind: value.path,
    fallback: "./data",
    flag: "data-dir",
    meaning: "directory of tollgate.db and master.key; these two files are what a backup needs",
  }),
  DATABASE_URL: row({
    kind: value.postgresUrl,
    fallback: null,
    secret: true,
    meaning: "postgres://…: use Postgres instead of SQLite; TOLLGATE_MASTER_KEY is required then",
  }),
  TOLLGATE_MASTER_KEY: row({
    kind: value.key,
    fallback: null,
    secret: true,
    shown: "generated as master.key",
    meaning: "32 bytes in base64; wraps every other key",
  }),
  TOLLGATE_LOG_LEVEL: row({
    kind: value.oneOf(LOG_LEVELS),
    fallback: "info",
    meaning: "least level that is logged: debug, info, warn or error",
  }),
  TOLLGATE_LOG_FORMAT: row({
    kind: value.oneOf(["json", "pretty"]),
    fallback: null,
    shown: "json; pretty on a terminal",
    meaning: "form of the log on standard error",
  }),
  TOLLGATE_DRAIN_MS: row({
    kind: value.wholeNumber(0, DAY_MS),
    fallback: 30_000,
    meaning: "how long running calls may finish after SIGTERM or SIGINT",
  }),
  TOLLGATE_OIDC_ISSUER: row({
    kind: value.httpUrl("no query"),
    fallback: null,
    shown: "unset: the local issuer",
    meaning: "accept the tokens of this OIDC issuer, and only these",
  }),
  TOLLGATE_OIDC_AUDIENCE: row({
    kind: value.text,
    fallback: null,
    meaning: "audience that tokens must name; required with TOLLGATE_OIDC_ISSUER",
  }),
  TOLLGATE_JWKS_URL: row({
    kind: value.httpUrl("query"),
    fallback: null,
    shown: "by OIDC discovery",
    meaning: "where the issuer's keys are",
  }),
  TOLLGATE_TENANT_CLAIM: row({
    kind: value.claimName,
    fallback: "tenant_id",
    meaning: "claim that names the tenant",
  }),
  TOLLGATE_USER_CLAIM: row({ kind: value.claimName, fallback: "sub", meaning: "claim that names the user" }),
  TOLLGATE_SCOPE_CLAIM: row({
    kind: value.claimName,
    fallback: "scope",
    meaning: "claim with the scopes: a space-separated string or an array",
  }),
  TOLLGATE_ALLOW_HOSTS: row({
    kind: value.hostList,
    fallback: [] as readonly string[],
    shown: "empty",
    meaning: "comma list of hosts, addresses or CIDR ranges that are exempt from the host rules",
  }),
  TOLLGATE_CA_FILE: row({
    kind: value.certificateFile,
    fallback: null,
    meaning: "PEM file of extra trusted roots for upstreams",
  }),
  TOLLGATE_WORKERS: row({
    kind: value.wholeNumber(1, 64),
    fallback: Math.min(Math.max(availableParallelism() - 1, 1), 64),
    shown: "cores - 1, at least 1",
    meaning: "worker threads that make upstream calls",
  }),
  TOLLGATE_UPSTREAM_TIMEOUT_MS: row({
    kind: value.wholeNumber(1, DAY_MS),
    fallback: 300_000,
    meaning: "deadline of one upstream call, whole",
  }),
  TOLLGATE_AGENT_CONCURRENCY: row({
    kind: value.wholeNumber(1, 10_000),
    fallback: 64,
    meaning: "running upstream calls per agent",
  }),
  TOLLGATE_MAX_RESPONSE_BYTES: row({
    kind: value.wholeNumber(1, GIB),
    fallback: 33_554_432,
    meaning: "a larger upstream response ends the call as failed",
  }),
  TOLLGATE_BODY_RETENTION_DAYS: row({
    kind: value.wholeNumber(0, DAYS_MAX),
    fallback: 30,
    meaning: "age at which captured bodies are removed; 0 keeps them",
  }),
  TOLLGATE_HISTORY_RETENTION_DAYS: row({
    kind: value.wholeNumber(0, DAYS_MAX),
    fallback: 0,
    meaning: "age at which whole records are removed; 0 keeps them",
  }),
  TOLLGATE_SECRETS_DIR: row({
    kind: value.directory,
    fallback: null,
    meaning: "vault credentials from files: <dir>/<tenant>/<vault_ref>",
  }),
  TOLLGATE_VAULT_ADDR: row({
    kind: value.httpUrl("no query"),
    fallback: null,
    meaning: "vault credentials from HashiCorp Vault or OpenBao (KV version 2) at this URL",
  }),
  TOLLGATE_VAULT_TOKEN: row({
    kind: value.text,
    fallback: null,
    secret: true,
    meaning: "its token; required with TOLLGATE_VAULT_ADDR",
  }),
  TOLLGATE_VAULT_PREFIX: row({
    kind: value.tenantPrefix,
    fallback: "secret/data/tenants/{tenant}",
    meaning: "where a tenant's secrets are",
  }),
};

type Table = typeof VARIABLES;
type VariableName = keyof Table;
type Values = { [N in VariableName]: Table[N] extends Row<infer T, infer F> ? T | F : never };

export type Config = ReturnType<typeof arrange>;

export interface Loaded {
  /** Null when there are problems. */
  readonly config: Config | null;
  /** Each names a variable, file or flag, and what it must be. */
  readonly problems: readonly string[];
  readonly warnings: readonly string[];
}

/**
 * The configuration of a command. Reads the files that variables name and changes nothing on disk.
 *
 * @param flags by name, without dashes; those that override no variable are the command's own
 * @param terminal whether standard error is a terminal
 */
export function loadConfig(
  command: "gateway" | "token" | "migrate",
  flags: ReadonlyMap<string, string>,
  environment: Environment,
  terminal: boolean,
): Loaded {
  const { values, problems } = readValues(flags, environment);
  for (const rule of command === "gateway" ? [...COMBINATIONS, ...GATEWAY_RULES] : COMBINATIONS) {
    if (problems.has(rule.name) || (rule.other !== undefined && problems.has(rule.other))) continue;
    const problem = rule.problem(values);
    if (problem !== null) problems.set(rule.name, `${rule.name} ${problem}`);
  }
  const warnings = unknownVariables(environment, VARIABLES);
  const config = problems.size === 0 ? arrange(values, terminal, environment) : null;
  return { config, problems: [...problems.values()], warnings };
}

/** Each variable by itself. One that has a problem has its default among the values. */
function readValues(flags: ReadonlyMap<string, string>, environment: Environment) {
  const problems = new Map<string, string>();
  const read: Record<string, unknown> = {};
  for (const [name, variable] of Object.entries<Row<unknown, unknown>>(VARIABLES)) {
    const { text, source, problem } = readRaw(name, variable, flags, environment);
    const parsed = text === null ? variable.fallback : variable.kind.parse(text);
    if (problem !== null) problems.set(name, problem);
    else if (parsed === undefined) problems.set(name, `${source} must be ${variable.kind.must}`);
    read[name] = parsed ?? variable.fallback;
  }
  // Each name has got what its own row parsed, or that row's fallback.
  return { values: read as Values, problems };
}

interface Rule {
  /** The variable that the rule is about. Where it, or the other one, is wrong by itself the rule says nothing. */
  readonly name: VariableName;
  readonly other?: VariableName;
  readonly problem: (values: Values) => string | null;
}

const COMBINATIONS: readonly Rule[] = [
  {
    name: "TOLLGATE_MASTER_KEY",
    other: "DATABASE_URL",
    problem: (v) =>
      v.DATABASE_URL !== null && v.TOLLGATE_MASTER_KEY === null
        ? "must be set when DATABASE_URL is: replicas share it"
        : null,
  },
  {
    name: "TOLLGATE_DATA_DIR",
    other: "DATABASE_URL",
    problem: (v) => (v.DATABASE_URL === null ? checkDataDir(v.TOLLGATE_DATA_DIR) : null),
  },
  {
    name: "TOLLGATE_OIDC_AUDIENCE",
    other: "TOLLGATE_OIDC_ISSUER",
    problem: (v) => together(v.TOLLGATE_OIDC_AUDIENCE, v.TOLLGATE_OIDC_ISSUER, "TOLLGATE_OIDC_ISSUER"),
  },
  {
    name: "TOLLGATE_JWKS_URL",
    other: "TOLLGATE_OIDC_ISSUER",
    problem: (v) =>
      v.TOLLGATE_JWKS_URL !== null && v.TOLLGATE_OIDC_ISSUER === null
        ? "must be unset, or TOLLGATE_OIDC_ISSUER set too"
        : null,
  },
  {
    name: "TOLLGATE_VAULT_TOKEN",
    other: "TOLLGATE_VAULT_ADDR",
    problem: (v) => together(v.TOLLGATE_VAULT_TOKEN, v.TOLLGATE_VAULT_ADDR, "TOLLGATE_VAULT_ADDR"),
  },
  {
    name: "TOLLGATE_USER_CLAIM",
    problem: (v) =>
      v.TOLLGATE_USER_CLAIM === v.TOLLGATE_TENANT_CLAIM
        ? "must not be the claim of TOLLGATE_TENANT_CLAIM"
        : null,
  },
  {
    name: "TOLLGATE_SCOPE_CLAIM",
    problem: (v) =>
      [v.TOLLGATE_TENANT_CLAIM, v.TOLLGATE_USER_CLAIM].includes(v.TOLLGATE_SCOPE_CLAIM)
        ? "must not be the claim of TOLLGATE_TENANT_CLAIM or TOLLGATE_USER_CLAIM"
        : null,
  },
];

const GATEWAY_RULES: readonly Rule[] = [
  {
    name: "TOLLGATE_MODE",
    problem: ({ TOLLGATE_MODE: mode }) => {
      if (mode === null) return "must be gateway or facilitator (or give --mode)";
      return mode === "gateway" ? null : "must be gateway: this build has no facilitator yet";
    },
  },
];

/** What is needed with the other, and means nothing without it. */
function together(own: unknown, other: unknown, otherName: string): string | null {
  if ((own === null) === (other === null)) return null;
  return own === null ? `must be set when ${otherName} is` : `must be unset, or ${otherName} set too`;
}

function arrange(v: Values, terminal: boolean, environment: Environment) {
  return {
    host: v.TOLLGATE_HOST,
    port: v.TOLLGATE_PORT,
    dataDir: resolve(v.TOLLGATE_DATA_DIR),
    /** Null for SQLite. */
    databaseUrl: v.DATABASE_URL,
    /** Null when it is kept in the data directory. */
    masterKey: v.TOLLGATE_MASTER_KEY,
    log: {
      level: v.TOLLGATE_LOG_LEVEL,
      format: v.TOLLGATE_LOG_FORMAT ?? (terminal ? "pretty" : "json"),
    },
    drainMs: v.TOLLGATE_DRAIN_MS,
    identity: {
      /** Null for the local issuer. */
      oidc:
        v.TOLLGATE_OIDC_ISSUER === null || v.TOLLGATE_OIDC_AUDIENCE === null
          ? null
          : {
              issuer: v.TOLLGATE_OIDC_ISSUER,
              audience: v.TOLLGATE_OIDC_AUDIENCE,
              /** Null for discovery. */
              jwksUrl: v.TOLLGATE_JWKS_URL,
            },
      claims: {
        tenant: v.TOLLGATE_TENANT_CLAIM,
        user: v.TOLLGATE_USER_CLAIM,
        scope: v.TOLLGATE_SCOPE_CLAIM,
      },
    },
    allowHosts: v.TOLLGATE_ALLOW_HOSTS,
    /** PEM of extra trusted roots. */
    extraCa: v.TOLLGATE_CA_FILE,
    workers: v.TOLLGATE_WORKERS,
    upstreamTimeoutMs: v.TOLLGATE_UPSTREAM_TIMEOUT_MS,
    agentConcurrency: v.TOLLGATE_AGENT_CONCURRENCY,
    maxResponseBytes: v.TOLLGATE_MAX_RESPONSE_BYTES,
    /** In days; 0 keeps for ever. */
    retention: {
      body_days: v.TOLLGATE_BODY_RETENTION_DAYS,
      history_days: v.TOLLGATE_HISTORY_RETENTION_DAYS,
    },
    secretsDir: v.TOLLGATE_SECRETS_DIR,
    vault:
      v.TOLLGATE_VAULT_ADDR === null || v.TOLLGATE_VAULT_TOKEN === null
        ? null
        : {
            address: v.TOLLGATE_VAULT_ADDR,
            token: v.TOLLGATE_VAULT_TOKEN,
            /** Read anew for each request, since a Vault agent renews the token in place. */
            tokenFile: renewedFile(environment["TOLLGATE_VAULT_TOKEN_FILE"]),
            /** With the segment `{tenant}`. */
            prefix: v.TOLLGATE_VAULT_PREFIX,
          },
  } as const;
}
