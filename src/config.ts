// The configuration, and the only reader of the process environment. Everything is checked at once, before
// anything starts, so that an operator sees all problems in one go.
import { resolve } from "node:path";
import { readTlsFiles, validityWarnings } from "./config/pem.ts";
import { readRaw, renewedFile, unknownVariables } from "./config/raw.ts";
import {
  BACKUP_RULES,
  COMMON_RULES,
  type ConfigRule,
  type ConfigValues,
  FACILITATOR_PORT,
  FACILITATOR_RULES,
  GATEWAY_PORT,
  GATEWAY_RULES,
  MODE_RULES,
} from "./config/rules.ts";
import { valueProblem } from "./config/values.ts";
import { COMMON, DEMO, FACILITATOR, GATEWAY, MASTER_KEYS, type VariableRow } from "./config/variables.ts";
import { systemClock } from "./core/clock.ts";
import type { TracingOptions } from "./core/tracing-options.ts";
import type { Environment } from "./environment.ts";

export const processEnvironment: Environment = process.env;

export const VARIABLES = { ...COMMON, ...GATEWAY, ...FACILITATOR, ...DEMO };

export type Config = ReturnType<typeof arrange>;
export type FacilitatorConfig = NonNullable<Config["facilitator"]>;

export interface Loaded {
  /** Null when there are problems. */
  readonly config: Config | null;
  /** Each names a variable, file or flag, and what it must be. */
  readonly problems: readonly string[];
  readonly warnings: readonly string[];
}

/** What the configuration is for. Only a server needs to know which service it is; the accounts are in the database. */
export type Purpose = "serve" | "token" | "keys" | "migrate" | "backup" | "restore" | "account" | "demo";

/**
 * The configuration of a command. Reads the files that variables name and changes nothing on disk. The variables of
 * a service that is not concerned are not looked at: two services may be started with one environment.
 *
 * @param flags by name, without dashes; those that override no variable are the command's own
 * @param terminal whether standard error is a terminal
 */
export function loadConfig(
  purpose: Purpose,
  flags: ReadonlyMap<string, string>,
  environment: Environment,
  terminal: boolean,
): Loaded {
  const mode = readRow("TOLLGATE_MODE", COMMON.TOLLGATE_MODE, flags, environment).value;
  const { tables, rules } = concerned(purpose, mode);
  const { values, problems } = readValues(tables, flags, environment);
  for (const rule of rules) {
    if (problems.has(rule.name) || (rule.other !== undefined && problems.has(rule.other))) continue;
    const problem = rule.problem(values);
    if (problem !== null) problems.set(rule.name, `${rule.name} ${problem}`);
  }
  const warnings = [...unknownVariables(environment, VARIABLES), ...expiries(values)];
  const config = problems.size === 0 ? arrange(values, terminal, environment) : null;
  return { config, problems: [...problems.values()], warnings };
}

/** Of the files whose certificates nothing else tells of before every handshake fails. */
function expiries(values: ConfigValues): string[] {
  return (["TOLLGATE_TLS_CERT_FILE", "TOLLGATE_CLIENT_CA_FILE"] as const).flatMap((name) =>
    validityWarnings(name, values[name] ?? "", systemClock.now()),
  );
}

interface Concern {
  readonly tables: readonly object[];
  readonly rules: readonly ConfigRule[];
}

const GATEWAY_CONCERN: Concern = { tables: [COMMON, GATEWAY], rules: [...COMMON_RULES, ...GATEWAY_RULES] };

/** The key opens those of the copy. A directory that is not there says so by itself. */
const BACKUP_CONCERN: Concern = {
  tables: [COMMON, MASTER_KEYS],
  rules: BACKUP_RULES,
};

/** Of either service: the key is needed where there are keys. */
const RESTORE_CONCERN: Concern = { tables: [COMMON, MASTER_KEYS], rules: COMMON_RULES };

function concerned(purpose: Purpose, mode: ConfigValues["TOLLGATE_MODE"]): Concern {
  if (purpose === "demo") return { tables: [DEMO], rules: [] };
  if (purpose === "account") return { tables: [COMMON], rules: COMMON_RULES };
  if (purpose === "token" || purpose === "keys") return GATEWAY_CONCERN;
  if (purpose === "restore") return RESTORE_CONCERN;
  if (mode === "gateway") return GATEWAY_CONCERN;
  if (purpose === "backup") return BACKUP_CONCERN;
  if (purpose === "migrate") return mode === null ? GATEWAY_CONCERN : { tables: [COMMON], rules: COMMON_RULES };
  if (mode === "facilitator") {
    return { tables: [COMMON, FACILITATOR], rules: [...COMMON_RULES, ...FACILITATOR_RULES] };
  }
  return { tables: [COMMON, GATEWAY, FACILITATOR], rules: [...MODE_RULES, ...COMMON_RULES] };
}

/** Each variable by itself. One that has a problem has its default among the values. */
function readValues(tables: readonly object[], flags: ReadonlyMap<string, string>, environment: Environment) {
  const problems = new Map<string, string>();
  const read: Record<string, unknown> = {};
  for (const [name, row] of Object.entries<VariableRow<unknown, unknown>>(VARIABLES)) {
    const looked = tables.some((table) => Object.hasOwn(table, name));
    const { value, problem } = looked ? readRow(name, row, flags, environment) : unread(row);
    if (problem !== null) problems.set(name, problem);
    read[name] = value;
  }
  // Each name has got what its own row parsed, or that row's fallback.
  return { values: read as ConfigValues, problems };
}

interface ReadRow<T> {
  /** The default when there is a problem. */
  readonly value: T;
  readonly problem: string | null;
}

function unread<T, F>(row: VariableRow<T, F>): ReadRow<T | F> {
  return { value: row.fallback, problem: null };
}

function readRow<T, F>(
  name: string,
  row: VariableRow<T, F>,
  flags: ReadonlyMap<string, string>,
  environment: Environment,
): ReadRow<T | F> {
  const { text, source, problem } = readRaw(name, row, flags, environment);
  if (problem !== null || text === null) return { value: row.fallback, problem };
  const parsed = row.kind.parse(text);
  if (parsed !== undefined) return { value: parsed, problem: null };
  return { value: row.fallback, problem: valueProblem(source, row.kind, text) };
}

function arrange(v: ConfigValues, terminal: boolean, environment: Environment) {
  return {
    /** Null where it makes no difference. */
    mode: v.TOLLGATE_MODE,
    host: v.TOLLGATE_HOST,
    port: v.TOLLGATE_PORT ?? GATEWAY_PORT,
    reusePort: v.TOLLGATE_REUSE_PORT === "1",
    dataDir: resolve(v.TOLLGATE_DATA_DIR),
    /** Null for SQLite. */
    databaseUrl: v.DATABASE_URL,
    /** Null where replicas find out about each other by looking alone. */
    listenUrl: v.TOLLGATE_LISTEN_URL,
    /** Without a slash at its end; null for what the request's Host says. */
    publicUrl: v.TOLLGATE_PUBLIC_URL?.replace(/\/+$/, "") ?? null,
    masterKeys: {
      /** Null when it is kept in the data directory. */
      own: v.TOLLGATE_MASTER_KEY,
      file: renewedFile(environment["TOLLGATE_MASTER_KEY_FILE"]),
      /** Null unless keys are to be rotated to it. */
      next: v.TOLLGATE_NEW_MASTER_KEY,
      nextFile: renewedFile(environment["TOLLGATE_NEW_MASTER_KEY_FILE"]),
    },
    log: {
      level: v.TOLLGATE_LOG_LEVEL,
      format: v.TOLLGATE_LOG_FORMAT ?? (terminal ? "pretty" : "json"),
    },
    /** Null for none. */
    metricsPort: v.TOLLGATE_METRICS_PORT,
    blockedMs: v.TOLLGATE_BLOCKED_MS,
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
    denyHosts: v.TOLLGATE_DENY_HOSTS,
    /** Null when any token of a tenant may change what is its own. */
    manageScope: v.TOLLGATE_MANAGE_SCOPE,
    /** PEM of extra trusted roots. */
    extraCa: v.TOLLGATE_CA_FILE,
    workers: v.TOLLGATE_WORKERS,
    allowedOrigins: v.TOLLGATE_ALLOWED_ORIGINS,
    /** Null where the gateway has none. */
    rpcUrls: v.TOLLGATE_RPC_URLS,
    settleWaitMs: v.TOLLGATE_SETTLE_WAIT_MS,
    upstreamTimeoutMs: v.TOLLGATE_UPSTREAM_TIMEOUT_MS,
    agentConcurrency: v.TOLLGATE_AGENT_CONCURRENCY,
    maxResponseBytes: v.TOLLGATE_MAX_RESPONSE_BYTES,
    /** In days; 0 keeps for ever. */
    retention: {
      body_days: v.TOLLGATE_BODY_RETENTION_DAYS,
      history_days: v.TOLLGATE_HISTORY_RETENTION_DAYS,
    },
    /** Of a tenant. */
    quotas: { agents: v.TOLLGATE_AGENTS_MAX, credentials: v.TOLLGATE_CREDENTIALS_MAX },
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
    /** Of the demo's chain; null to look for it. */
    anvil: v.TOLLGATE_ANVIL,
    tracing: arrangeTracing(v),
    /** Null unless the mode is the facilitator's. */
    facilitator: arrangeFacilitator(v, environment),
  } as const;
}

/** Null where traces are off. */
function arrangeTracing(v: ConfigValues): TracingOptions | null {
  if (v.OTEL_EXPORTER_OTLP_ENDPOINT === null) return null;
  return {
    endpoint: v.OTEL_EXPORTER_OTLP_ENDPOINT,
    headers: v.OTEL_EXPORTER_OTLP_HEADERS,
    serviceName: v.OTEL_SERVICE_NAME,
    resource: v.OTEL_RESOURCE_ATTRIBUTES,
    sampler: v.OTEL_TRACES_SAMPLER,
    ratio: v.OTEL_TRACES_SAMPLER_ARG,
    tracesPerSecond: v.TOLLGATE_TRACES_PER_SECOND,
    extraCa: v.TOLLGATE_CA_FILE,
  };
}

/** Null when one of the required variables is not set: the rules have told so, or it is not the mode. */
function arrangeFacilitator(v: ConfigValues, environment: Environment) {
  const { TOLLGATE_TLS_CERT_FILE: cert, TOLLGATE_TLS_KEY_FILE: key, TOLLGATE_CLIENT_CA_FILE: clientCa } = v;
  const rpcUrls = v.TOLLGATE_RPC_URLS;
  const tlsPaths = {
    cert: resolve(environment["TOLLGATE_TLS_CERT_FILE"] ?? ""),
    key: resolve(environment["TOLLGATE_TLS_KEY_FILE"] ?? ""),
    clientCa: resolve(environment["TOLLGATE_CLIENT_CA_FILE"] ?? ""),
  };
  const signers = arrangeSigners(v);
  if (cert === null || key === null || clientCa === null || rpcUrls === null || signers === null) return null;
  return {
    host: v.TOLLGATE_HOST,
    port: v.TOLLGATE_PORT ?? FACILITATOR_PORT,
    openPort: v.TOLLGATE_OPEN_PORT,
    dataDir: resolve(v.TOLLGATE_DATA_DIR),
    databaseUrl: v.DATABASE_URL,
    drainMs: v.TOLLGATE_DRAIN_MS,
    tracing: arrangeTracing(v),
    tls: { cert, key, clientCa },
    readTls: () => readTlsFiles(tlsPaths),
    rpcUrls,
    signers,
    limits: {
      maxPerTransaction: v.TOLLGATE_MAX_PER_TRANSACTION,
      dailyCeiling: v.TOLLGATE_DAILY_CEILING,
      dailyGasWei: v.TOLLGATE_DAILY_GAS_WEI,
      dailyGasAllWei: v.TOLLGATE_DAILY_GAS_ALL_WEI,
      minValue: v.TOLLGATE_MIN_VALUE,
      gasLowWaterWei: v.TOLLGATE_GAS_LOW_WATER_WEI,
      inclusionTimeoutMs: v.TOLLGATE_INCLUSION_TIMEOUT_MS,
      maxFeeGwei: Number(v.TOLLGATE_MAX_FEE_GWEI) / 1e9,
      confirmations: v.TOLLGATE_CONFIRMATIONS,
      batch: v.TOLLGATE_BATCH,
    },
  } as const;
}

function arrangeSigners(v: ConfigValues) {
  const { TOLLGATE_SIGNER_KEY: keys, TOLLGATE_REMOTE_SIGNER_URL: url } = v;
  const address = v.TOLLGATE_REMOTE_SIGNER_ADDRESS;
  if (keys !== null) return { kind: "local", keys } as const;
  return url === null || address === null ? null : ({ kind: "remote", url, address } as const);
}
