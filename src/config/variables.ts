// The one table of variables, by who reads them: both services, one of them, or the demo. `--help` prints it.
// In one file, since it is one table.

import { availableParallelism } from "node:os";
import { LOG_LEVELS } from "../core/log.ts";
import { DAY_MS } from "../core/time.ts";
import { SAMPLERS } from "../core/tracing.ts";
import * as pem from "./pem.ts";
import * as money from "./values.ts";
import * as value from "./values.ts";

interface Extras {
  /** The command line flag that overrides the variable. */
  readonly flag?: string;
  /** May come from the file that NAME_FILE names. */
  readonly secret?: true;
  /** How `--help` shows the default, where the fallback itself does not say it. */
  readonly shown?: string;
}

export interface VariableRow<T, F, P extends string> extends Extras {
  /** Where the value stands in the configuration. */
  readonly path: P;
  readonly kind: value.Kind<T>;
  readonly fallback: F;
  readonly meaning: string;
}

function row<T, const F, const P extends string>(
  path: P,
  kind: value.Kind<T>,
  fallback: F,
  meaning: string,
  extras: Extras = {},
): VariableRow<T, F, P> {
  return { path, kind, fallback, meaning, ...extras };
}

const TEN_MINUTES_MS = 600_000;
const DAYS_MAX = 36_500;
const GIB = 1024 ** 3;
const MILLION = 1_000_000;

export const COMMON = {
  TOLLGATE_MODE: row("mode", value.choice(["gateway", "facilitator"]), null, "gateway or facilitator", {
    flag: "mode",
    shown: "none",
  }),
  TOLLGATE_HOST: row("host", value.host, "127.0.0.1", "listen address", { flag: "host" }),
  TOLLGATE_PORT: row(
    "port",
    value.wholeNumber(0, 65_535),
    null,
    "port, of the facilitator the one with mutual TLS; 0 takes a free one",
    { flag: "port", shown: "8080; facilitator 8443" },
  ),
  TOLLGATE_DATA_DIR: row(
    "dataDir",
    value.path,
    "./data",
    "directory of tollgate.db and master.key; these two files are what a backup needs",
    { flag: "data-dir" },
  ),
  DATABASE_URL: row(
    "databaseUrl",
    value.postgresUrl,
    null,
    "postgres://…: use Postgres instead of SQLite; the gateway needs TOLLGATE_MASTER_KEY then",
    { secret: true },
  ),
  TOLLGATE_LOG_LEVEL: row(
    "log.level",
    value.choice(LOG_LEVELS),
    "info",
    "least level that is logged: debug, info, warn or error",
  ),
  TOLLGATE_LOG_FORMAT: row("log.format", value.choice(["json", "pretty"]), null, "form of the log on standard error", {
    shown: "json; pretty on a terminal",
  }),
  TOLLGATE_METRICS_PORT: row(
    "metricsPort",
    value.wholeNumber(0, 65_535),
    null,
    "port of a plain listener with GET /metrics only, for Prometheus; 0 takes a free one",
  ),
  TOLLGATE_BLOCKED_MS: row(
    "blockedMs",
    value.wholeNumber(1, 60_000),
    50,
    "pauses of an event loop of at least so many milliseconds are logged as event_loop_blocked",
  ),
  TOLLGATE_DRAIN_MS: row(
    "drainMs",
    value.wholeNumber(0, DAY_MS),
    30_000,
    "how long running calls may finish after SIGTERM or SIGINT",
  ),
  TOLLGATE_CA_FILE: row(
    "extraCa",
    pem.certificateFile,
    null,
    "PEM file of extra trusted roots for upstreams, facilitators and the collector of traces",
  ),
  OTEL_EXPORTER_OTLP_ENDPOINT: row(
    "tracing.endpoint",
    value.httpUrl("no query"),
    null,
    "send traces to this collector, by OTLP over HTTP: to the path v1/traces below this URL",
  ),
  OTEL_EXPORTER_OTLP_HEADERS: row(
    "tracing.headers",
    value.headerPairs,
    [],
    "headers of the requests to the collector: name=value, comma-separated, values percent-encoded",
    { secret: true, shown: "none" },
  ),
  OTEL_SERVICE_NAME: row("tracing.serviceName", value.text, null, "service.name of the traces", {
    shown: "tollgate-gateway; tollgate-facilitator",
  }),
  OTEL_RESOURCE_ATTRIBUTES: row(
    "tracing.resource",
    value.pairs,
    [],
    "more attributes of the service in its traces, written like the headers",
    { shown: "none" },
  ),
  OTEL_TRACES_SAMPLER: row(
    "tracing.sampler",
    value.choice(SAMPLERS),
    "parentbased_always_on",
    "which traces are recorded: OpenTelemetry's samplers",
  ),
  OTEL_TRACES_SAMPLER_ARG: row(
    "tracing.ratio",
    value.ratio,
    1,
    "the share of traces that a sampler by ratio records, from 0 to 1",
  ),
  TOLLGATE_TRACES_PER_SECOND: row(
    "tracing.tracesPerSecond",
    value.wholeNumber(1, 10_000),
    100,
    "the most traces that a process records in a second, whatever the sampler says",
  ),
};

/** Both services may have nodes. */
const TOLLGATE_RPC_URLS = row(
  "rpcUrls",
  money.rpcUrls,
  null,
  "comma list of the JSON-RPC URLs of nodes of the chain, tried in order; the gateway only looks up payments in doubt",
  { secret: true, shown: "facilitator: required; gateway: unset" },
);

export const MASTER_KEYS = {
  TOLLGATE_MASTER_KEY: row("masterKeys.own", value.key, null, "32 bytes in base64; wraps every other key", {
    secret: true,
    shown: "generated as master.key",
  }),
  TOLLGATE_NEW_MASTER_KEY: row(
    "masterKeys.next",
    value.key,
    null,
    "the same, for tollgate keys rotate: what it leads to; gateways need it too, unless it is in master.key.new",
    { secret: true, shown: "generated" },
  ),
};

export const GATEWAY = {
  TOLLGATE_REUSE_PORT: row(
    "reusePort",
    value.choice(["0", "1"]),
    "0",
    "1: share the port with other gateways of this machine (Linux) that have it too, on one Postgres",
  ),
  TOLLGATE_LISTEN_URL: row(
    "listenUrl",
    value.postgresUrl,
    null,
    "postgres://… of the same database without a pooler: gateways that share it tell each other at once what ended",
    { secret: true },
  ),
  TOLLGATE_PUBLIC_URL: row(
    "publicUrl",
    value.httpUrl("no query"),
    null,
    "base of the absolute URLs in payment challenges",
    { shown: "from the request's Host" },
  ),
  TOLLGATE_ALLOWED_ORIGINS: row(
    "allowedOrigins",
    value.origins,
    [],
    "comma list of web origins whose pages may use mcp agents by the streaming path, beside the gateway's own",
    { shown: "empty" },
  ),
  TOLLGATE_OIDC_ISSUER: row(
    "identity.oidc.issuer",
    value.httpUrl("no query"),
    null,
    "accept the tokens of this OIDC issuer, and only these",
    { shown: "unset: the local issuer" },
  ),
  TOLLGATE_OIDC_AUDIENCE: row(
    "identity.oidc.audience",
    value.text,
    null,
    "audience that tokens must name; required with TOLLGATE_OIDC_ISSUER",
  ),
  TOLLGATE_JWKS_URL: row("identity.oidc.jwksUrl", value.httpUrl("query"), null, "where the issuer's keys are", {
    shown: "by OIDC discovery",
  }),
  TOLLGATE_TENANT_CLAIM: row("identity.claims.tenant", value.claimName, "tenant_id", "claim that names the tenant"),
  TOLLGATE_USER_CLAIM: row("identity.claims.user", value.claimName, "sub", "claim that names the user"),
  TOLLGATE_SCOPE_CLAIM: row(
    "identity.claims.scope",
    value.claimName,
    "scope",
    "claim with the scopes: a space-separated string or an array",
  ),
  ...MASTER_KEYS,
  TOLLGATE_ALLOW_HOSTS: row(
    "allowHosts",
    value.hostList,
    [] as readonly string[],
    "comma list of hosts, addresses or CIDR ranges that are exempt from the host rules",
    { shown: "empty" },
  ),
  TOLLGATE_DENY_HOSTS: row(
    "denyHosts",
    value.hostList,
    [] as readonly string[],
    "comma list of hosts, addresses or CIDR ranges that are refused too, also where they are exempt",
    { shown: "empty" },
  ),
  TOLLGATE_MANAGE_SCOPE: row(
    "manageScope",
    value.scope,
    null,
    "scope that a token needs to write agents, credentials, policy and settlement configuration",
  ),
  TOLLGATE_WORKERS: row(
    "workers",
    value.wholeNumber(1, 64),
    Math.min(Math.max(availableParallelism() - 1, 1), 64),
    "worker threads that make upstream calls",
    { shown: "cores - 1, at least 1" },
  ),
  TOLLGATE_UPSTREAM_TIMEOUT_MS: row(
    "upstreamTimeoutMs",
    value.wholeNumber(1, DAY_MS),
    300_000,
    "deadline of one upstream call, whole; of a streamed one, for its head and for each silence",
  ),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SETTLE_WAIT_MS: row(
    "settleWaitMs",
    value.wholeNumber(1, TEN_MINUTES_MS),
    20_000,
    "how long a paid call waits for its settlement",
  ),
  TOLLGATE_AGENT_CONCURRENCY: row(
    "agentConcurrency",
    value.wholeNumber(1, 10_000),
    64,
    "running upstream calls per agent, and as many streamed ones; of several gateways on a database each has its part",
  ),
  TOLLGATE_MAX_RESPONSE_BYTES: row(
    "maxResponseBytes",
    value.wholeNumber(1, GIB),
    33_554_432,
    "a larger upstream response ends the call as failed, unless it is streamed",
  ),
  TOLLGATE_BODY_RETENTION_DAYS: row(
    "retention.body_days",
    value.wholeNumber(0, DAYS_MAX),
    30,
    "age at which captured bodies are removed; 0 keeps them",
  ),
  TOLLGATE_HISTORY_RETENTION_DAYS: row(
    "retention.history_days",
    value.wholeNumber(0, DAYS_MAX),
    0,
    "age at which whole records, receipts and policy decisions are removed; 0 keeps them",
  ),
  TOLLGATE_AGENTS_MAX: row(
    "quotas.agents",
    value.wholeNumber(1, MILLION),
    10_000,
    "agents of a tenant that are not inactive; one more is refused with 429",
  ),
  TOLLGATE_CREDENTIALS_MAX: row(
    "quotas.credentials",
    value.wholeNumber(1, MILLION),
    1_000,
    "credentials of a tenant; one more is refused with 429",
  ),
  TOLLGATE_SECRETS_DIR: row(
    "secretsDir",
    value.directory,
    null,
    "vault credentials from files: <dir>/<tenant>/<vault_ref>",
  ),
  TOLLGATE_VAULT_ADDR: row(
    "vault.address",
    value.httpUrl("no query"),
    null,
    "vault credentials from HashiCorp Vault or OpenBao (KV version 2) at this URL",
  ),
  TOLLGATE_VAULT_TOKEN: row("vault.token", value.text, null, "its token; required with TOLLGATE_VAULT_ADDR", {
    secret: true,
  }),
  TOLLGATE_VAULT_PREFIX: row(
    "vault.prefix",
    value.tenantPrefix,
    "secret/data/tenants/{tenant}",
    "where a tenant's secrets are",
  ),
};

export const FACILITATOR = {
  TOLLGATE_OPEN_PORT: row(
    "facilitator.openPort",
    value.wholeNumber(0, 65_535),
    8081,
    "port of the plain listener with /supported and /healthz only; 0 takes a free one",
  ),
  TOLLGATE_TLS_CERT_FILE: row(
    "facilitator.tls.cert",
    pem.certificateFile,
    null,
    "PEM file of the server's certificate, and of the certificates between it and its root",
    { shown: "required" },
  ),
  TOLLGATE_TLS_KEY_FILE: row("facilitator.tls.key", pem.privateKeyFile, null, "PEM file of its private key", {
    shown: "required",
  }),
  TOLLGATE_CLIENT_CA_FILE: row(
    "facilitator.tls.clientCa",
    pem.caFile,
    null,
    "PEM file of the CA of client certificates",
    { shown: "required" },
  ),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SIGNER_KEY: row(
    "facilitator.signers.keys",
    money.privateKeys,
    null,
    "comma list of hex private keys that pay the gas; several settle in parallel",
    { secret: true, shown: "required unless remote" },
  ),
  TOLLGATE_REMOTE_SIGNER_URL: row(
    "facilitator.signers.url",
    value.httpUrl("query"),
    null,
    "a signer that speaks JSON-RPC eth_signTransaction (Web3Signer, Clef), instead of keys",
  ),
  TOLLGATE_REMOTE_SIGNER_ADDRESS: row(
    "facilitator.signers.address",
    money.address,
    null,
    "the address that it signs for; required with TOLLGATE_REMOTE_SIGNER_URL",
  ),
  TOLLGATE_MAX_PER_TRANSACTION: row(
    "facilitator.limits.maxPerTransaction",
    money.amount,
    10_000_000n,
    "most atomic units of one payment, for accounts without a limit of their own",
  ),
  TOLLGATE_DAILY_CEILING: row(
    "facilitator.limits.dailyCeiling",
    money.amount,
    1_000_000_000n,
    "most atomic units of a UTC day, for accounts without a ceiling of their own",
  ),
  TOLLGATE_GAS_LOW_WATER_WEI: row(
    "facilitator.limits.gasLowWaterWei",
    money.amount,
    1_000_000_000_000_000n,
    "balance of a signer below which it is not ready",
  ),
  TOLLGATE_INCLUSION_TIMEOUT_MS: row(
    "facilitator.limits.inclusionTimeoutMs",
    value.wholeNumber(1, TEN_MINUTES_MS),
    15_000,
    "how long a settlement waits for its block",
  ),
  TOLLGATE_CONFIRMATIONS: row(
    "facilitator.limits.confirmations",
    value.wholeNumber(1, 10_000),
    12,
    "blocks after which a settlement is taken as final",
  ),
  TOLLGATE_MAX_FEE_GWEI: row(
    "facilitator.limits.maxFeeGwei",
    money.gwei,
    5_000_000_000n,
    "cap on maxFeePerGas, that of replacements included; may have decimals",
    { shown: "5" },
  ),
  TOLLGATE_DAILY_GAS_WEI: row(
    "facilitator.limits.dailyGasWei",
    money.amount,
    1_000_000_000_000_000n,
    "wei that the reverted transactions of one account may burn on a UTC day; above it 429; 0: no bound",
  ),
  TOLLGATE_DAILY_GAS_ALL_WEI: row(
    "facilitator.limits.dailyGasAllWei",
    money.amount,
    0n,
    "wei that all transactions of one account may burn on a UTC day, successful ones too; 0: no bound",
  ),
  TOLLGATE_MIN_VALUE: row("facilitator.limits.minValue", money.amount, 100n, "least atomic units of one payment"),
  TOLLGATE_BATCH: row(
    "facilitator.limits.batch",
    value.wholeNumber(0, 100),
    0,
    "most payments in one Multicall3 transaction; 0: one by one",
  ),
};

export const DEMO = {
  TOLLGATE_ANVIL: row("anvil", value.path, null, "path of anvil, the program that is the demo's chain", {
    shown: "looked for on the PATH and in node_modules",
  }),
};
