// The table of all variables, grouped by who reads them: both services, one of them, the demo, or `tollgate call`. The manual's page on
// configuration says what each means; `--help` prints that page, and a test compares it with this table.
import { availableParallelism } from "node:os";
import { LOG_LEVELS } from "../core/log.ts";
import { DAY_MS } from "../core/time.ts";
import { SAMPLERS } from "../core/tracing.ts";
import * as pem from "./pem.ts";
import * as value from "./values.ts";

export interface Sources {
  readonly flag?: string;
  /** Whether the value may come from the file that NAME_FILE names. */
  readonly secret?: true;
}

export interface VariableRow<T, F, P extends string> extends Sources {
  /** The dotted path of the value in the configuration. */
  readonly path: P;
  readonly kind: value.Kind<T>;
  readonly fallback: F;
}

function row<T, const F, const P extends string>(path: P, kind: value.Kind<T>, fallback: F, sources: Sources = {}) {
  return { path, kind, fallback, ...sources } satisfies VariableRow<T, F, P>;
}

/** Up to ten minutes, in milliseconds. */
const UP_TO_TEN_MINUTES = value.wholeNumber(1, 600_000);
const PORT = value.wholeNumber(0, 65_535);
const DAYS_MAX = 36_500;
const GIB = 1024 ** 3;
const MILLION = 1_000_000;

export const COMMON = {
  TOLLGATE_MODE: row("mode", value.choice(["gateway", "facilitator"]), null, { flag: "mode" }),
  TOLLGATE_HOST: row("host", value.host, "127.0.0.1", { flag: "host" }),
  TOLLGATE_PORT: row("port", PORT, null, { flag: "port" }),
  TOLLGATE_DATA_DIR: row("dataDir", value.path, "./data", { flag: "data-dir" }),
  DATABASE_URL: row("databaseUrl", value.postgresUrl, null, { secret: true }),
  TOLLGATE_LOG_LEVEL: row("log.level", value.choice(LOG_LEVELS), "info"),
  TOLLGATE_LOG_FORMAT: row("log.format", value.choice(["json", "pretty"]), null),
  TOLLGATE_METRICS_PORT: row("metricsPort", PORT, null),
  TOLLGATE_BLOCKED_MS: row("blockedMs", value.wholeNumber(1, 60_000), 50),
  TOLLGATE_DRAIN_MS: row("drainMs", value.wholeNumber(0, DAY_MS), 30_000),
  TOLLGATE_CA_FILE: row("extraCa", pem.certificateFile, null),
  OTEL_EXPORTER_OTLP_ENDPOINT: row("tracing.endpoint", value.httpUrl("no query"), null),
  OTEL_EXPORTER_OTLP_HEADERS: row("tracing.headers", value.headerPairs, [], { secret: true }),
  OTEL_SERVICE_NAME: row("tracing.serviceName", value.text, null),
  OTEL_RESOURCE_ATTRIBUTES: row("tracing.resource", value.pairs, []),
  OTEL_TRACES_SAMPLER: row("tracing.sampler", value.choice(SAMPLERS), "parentbased_always_on"),
  OTEL_TRACES_SAMPLER_ARG: row("tracing.ratio", value.ratio, 1),
  TOLLGATE_TRACES_PER_SECOND: row("tracing.tracesPerSecond", value.wholeNumber(1, 10_000), 100),
};

/** Read by both services, each in its own table. */
const TOLLGATE_RPC_URLS = row("rpcUrls", value.rpcUrls, null, { secret: true });

export const MASTER_KEYS = {
  TOLLGATE_MASTER_KEY: row("masterKeys.own", value.key, null, { secret: true }),
  TOLLGATE_NEW_MASTER_KEY: row("masterKeys.next", value.key, null, { secret: true }),
};

export const GATEWAY = {
  TOLLGATE_REUSE_PORT: row("reusePort", value.choice(["0", "1"]), "0"),
  TOLLGATE_LISTEN_URL: row("listenUrl", value.postgresUrl, null, { secret: true }),
  TOLLGATE_PUBLIC_URL: row("publicUrl", value.httpUrl("no query"), null),
  TOLLGATE_ALLOWED_ORIGINS: row("allowedOrigins", value.origins, []),
  TOLLGATE_OIDC_ISSUER: row("identity.oidc.issuer", value.httpUrl("no query"), null),
  TOLLGATE_OIDC_AUDIENCE: row("identity.oidc.audience", value.text, null),
  TOLLGATE_JWKS_URL: row("identity.oidc.jwksUrl", value.httpUrl("query"), null),
  TOLLGATE_TENANT_CLAIM: row("identity.claims.tenant", value.claimName, "tenant_id"),
  TOLLGATE_USER_CLAIM: row("identity.claims.user", value.claimName, "sub"),
  TOLLGATE_SCOPE_CLAIM: row("identity.claims.scope", value.claimName, "scope"),
  ...MASTER_KEYS,
  TOLLGATE_ALLOW_HOSTS: row("allowHosts", value.hostList, [] as readonly string[]),
  TOLLGATE_DENY_HOSTS: row("denyHosts", value.hostList, [] as readonly string[]),
  TOLLGATE_MANAGE_SCOPE: row("manageScope", value.scope, null),
  TOLLGATE_WORKERS: row("workers", value.wholeNumber(1, 64), Math.min(Math.max(availableParallelism() - 1, 1), 64)),
  TOLLGATE_UPSTREAM_TIMEOUT_MS: row("upstreamTimeoutMs", value.wholeNumber(1, DAY_MS), 300_000),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SETTLE_WAIT_MS: row("settleWaitMs", UP_TO_TEN_MINUTES, 20_000),
  TOLLGATE_AGENT_CONCURRENCY: row("agentConcurrency", value.wholeNumber(1, 10_000), 64),
  TOLLGATE_MAX_RESPONSE_BYTES: row("maxResponseBytes", value.wholeNumber(1, GIB), 33_554_432),
  TOLLGATE_BODY_RETENTION_DAYS: row("retention.body_days", value.wholeNumber(0, DAYS_MAX), 30),
  TOLLGATE_HISTORY_RETENTION_DAYS: row("retention.history_days", value.wholeNumber(0, DAYS_MAX), 0),
  TOLLGATE_AGENTS_MAX: row("quotas.agents", value.wholeNumber(1, MILLION), 10_000),
  TOLLGATE_CREDENTIALS_MAX: row("quotas.credentials", value.wholeNumber(1, MILLION), 1_000),
  TOLLGATE_SECRETS_DIR: row("secretsDir", value.directory, null),
  TOLLGATE_VAULT_ADDR: row("vault.address", value.httpUrl("no query"), null),
  TOLLGATE_VAULT_TOKEN: row("vault.token", value.text, null, { secret: true }),
  TOLLGATE_VAULT_PREFIX: row("vault.prefix", value.tenantPrefix, "secret/data/tenants/{tenant}"),
};

/** A limit with the fallback null is the network's own when it is not set. */
export const FACILITATOR = {
  TOLLGATE_OPEN_PORT: row("facilitator.openPort", PORT, 8081),
  TOLLGATE_TLS_CERT_FILE: row("facilitator.tls.cert", pem.certificateFile, null),
  TOLLGATE_TLS_KEY_FILE: row("facilitator.tls.key", pem.privateKeyFile, null),
  TOLLGATE_CLIENT_CA_FILE: row("facilitator.tls.clientCa", pem.caFile, null),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SIGNER_KEY: row("facilitator.signers.keys", value.privateKeys, null, { secret: true }),
  TOLLGATE_REMOTE_SIGNER_URL: row("facilitator.signers.url", value.httpUrl("query"), null),
  TOLLGATE_REMOTE_SIGNER_ADDRESS: row("facilitator.signers.address", value.address, null),
  TOLLGATE_MAX_PER_TRANSACTION: row("facilitator.limits.maxPerTransaction", value.amount, 10_000_000n),
  TOLLGATE_DAILY_CEILING: row("facilitator.limits.dailyCeiling", value.amount, 1_000_000_000n),
  TOLLGATE_GAS_LOW_WATER_WEI: row("facilitator.limits.gasLowWaterWei", value.amount, null),
  TOLLGATE_INCLUSION_TIMEOUT_MS: row("facilitator.limits.inclusionTimeoutMs", UP_TO_TEN_MINUTES, 15_000),
  TOLLGATE_CONFIRMATIONS: row("facilitator.limits.confirmations", value.wholeNumber(1, 10_000), null),
  TOLLGATE_MAX_FEE_GWEI: row("facilitator.limits.maxFee", value.gwei, null),
  TOLLGATE_DAILY_GAS_WEI: row("facilitator.limits.dailyGasWei", value.amount, null),
  TOLLGATE_DAILY_GAS_ALL_WEI: row("facilitator.limits.dailyGasAllWei", value.amount, 0n),
  TOLLGATE_MIN_VALUE: row("facilitator.limits.minValue", value.amount, 100n),
  TOLLGATE_BATCH: row("facilitator.limits.batch", value.wholeNumber(0, 100), 0),
};

export const DEMO = { TOLLGATE_ANVIL: row("anvil", value.path, null) };

/** For `tollgate call`, which also reads TOLLGATE_CA_FILE. */
export const CALL = { TOLLGATE_TOKEN: row("token", value.bearerToken, null, { secret: true }) };
