// The one table of variables, by who reads them: both services, one of them, or the demo. `--help` prints it.
// In one file, since it is one table.

import { availableParallelism } from "node:os";
import { LOG_LEVELS } from "../core/log.ts";
import { DAY_MS } from "../core/time.ts";
import { SAMPLERS } from "../core/tracing-options.ts";
import * as money from "./money.ts";
import * as pem from "./pem.ts";
import * as value from "./values.ts";

export interface VariableRow<T, F> {
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

function row<T, const F>(fields: VariableRow<T, F>): VariableRow<T, F> {
  return fields;
}

const TEN_MINUTES_MS = 600_000;
const DAYS_MAX = 36_500;
const GIB = 1024 ** 3;
const MILLION = 1_000_000;

export const COMMON = {
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
    fallback: null,
    flag: "port",
    shown: "8080; facilitator 8443",
    meaning: "port, of the facilitator the one with mutual TLS; 0 takes a free one",
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
    meaning: "postgres://…: use Postgres instead of SQLite; the gateway needs TOLLGATE_MASTER_KEY then",
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
  TOLLGATE_METRICS_PORT: row({
    kind: value.wholeNumber(0, 65_535),
    fallback: null,
    meaning: "port of a plain listener with GET /metrics only, for Prometheus; 0 takes a free one",
  }),
  TOLLGATE_BLOCKED_MS: row({
    kind: value.wholeNumber(1, 60_000),
    fallback: 50,
    meaning: "pauses of an event loop of at least so many milliseconds are logged as event_loop_blocked",
  }),
  TOLLGATE_DRAIN_MS: row({
    kind: value.wholeNumber(0, DAY_MS),
    fallback: 30_000,
    meaning: "how long running calls may finish after SIGTERM or SIGINT",
  }),
  TOLLGATE_CA_FILE: row({
    kind: pem.certificateFile,
    fallback: null,
    meaning: "PEM file of extra trusted roots for upstreams, facilitators and the collector of traces",
  }),
  OTEL_EXPORTER_OTLP_ENDPOINT: row({
    kind: value.httpUrl("no query"),
    fallback: null,
    meaning: "send traces to this collector, by OTLP over HTTP: to the path v1/traces below this URL",
  }),
  OTEL_EXPORTER_OTLP_HEADERS: row({
    kind: value.headerPairs,
    fallback: [],
    secret: true,
    shown: "none",
    meaning: "headers of the requests to the collector: name=value, comma-separated, values percent-encoded",
  }),
  OTEL_SERVICE_NAME: row({
    kind: value.text,
    fallback: null,
    shown: "tollgate-gateway; tollgate-facilitator",
    meaning: "service.name of the traces",
  }),
  OTEL_RESOURCE_ATTRIBUTES: row({
    kind: value.pairs,
    fallback: [],
    shown: "none",
    meaning: "more attributes of the service in its traces, written like the headers",
  }),
  OTEL_TRACES_SAMPLER: row({
    kind: value.oneOf(SAMPLERS),
    fallback: "parentbased_always_on",
    meaning: "which traces are recorded: OpenTelemetry's samplers",
  }),
  OTEL_TRACES_SAMPLER_ARG: row({
    kind: value.ratio,
    fallback: 1,
    meaning: "the share of traces that a sampler by ratio records, from 0 to 1",
  }),
  TOLLGATE_TRACES_PER_SECOND: row({
    kind: value.wholeNumber(1, 10_000),
    fallback: 100,
    meaning: "the most traces that a process records in a second, whatever the sampler says",
  }),
};

/** Both services may have nodes. */
const TOLLGATE_RPC_URLS = row({
  kind: money.rpcUrls,
  fallback: null,
  secret: true,
  shown: "facilitator: required; gateway: unset",
  meaning:
    "comma list of the JSON-RPC URLs of nodes of the chain, tried in order; the gateway only looks up payments in doubt",
});

export const MASTER_KEYS = {
  TOLLGATE_MASTER_KEY: row({
    kind: value.key,
    fallback: null,
    secret: true,
    shown: "generated as master.key",
    meaning: "32 bytes in base64; wraps every other key",
  }),
  TOLLGATE_NEW_MASTER_KEY: row({
    kind: value.key,
    fallback: null,
    secret: true,
    shown: "generated",
    meaning:
      "the same, for tollgate keys rotate: what it leads to; gateways need it too, unless it is in master.key.new",
  }),
};

export const GATEWAY = {
  TOLLGATE_REUSE_PORT: row({
    kind: value.oneOf(["0", "1"]),
    fallback: "0",
    meaning: "1: share the port with other gateways of this machine (Linux) that have it too, on one Postgres",
  }),
  TOLLGATE_LISTEN_URL: row({
    kind: value.postgresUrl,
    fallback: null,
    secret: true,
    meaning:
      "postgres://… of the same database without a pooler: gateways that share it tell each other at once what ended",
  }),
  TOLLGATE_PUBLIC_URL: row({
    kind: value.httpUrl("no query"),
    fallback: null,
    shown: "from the request's Host",
    meaning: "base of the absolute URLs in payment challenges",
  }),
  TOLLGATE_ALLOWED_ORIGINS: row({
    kind: value.origins,
    fallback: [],
    shown: "empty",
    meaning: "comma list of web origins whose pages may use mcp agents by the streaming path, beside the gateway's own",
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
  ...MASTER_KEYS,
  TOLLGATE_ALLOW_HOSTS: row({
    kind: value.hostList,
    fallback: [] as readonly string[],
    shown: "empty",
    meaning: "comma list of hosts, addresses or CIDR ranges that are exempt from the host rules",
  }),
  TOLLGATE_DENY_HOSTS: row({
    kind: value.hostList,
    fallback: [] as readonly string[],
    shown: "empty",
    meaning: "comma list of hosts, addresses or CIDR ranges that are refused besides, also where they are exempt",
  }),
  TOLLGATE_MANAGE_SCOPE: row({
    kind: value.scope,
    fallback: null,
    meaning: "scope that a token needs to write agents, credentials, policy and settlement configuration",
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
    meaning: "deadline of one upstream call, whole; of a streamed one, for its head and for each silence",
  }),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SETTLE_WAIT_MS: row({
    kind: value.wholeNumber(1, TEN_MINUTES_MS),
    fallback: 20_000,
    meaning: "how long a paid call waits for its settlement",
  }),
  TOLLGATE_AGENT_CONCURRENCY: row({
    kind: value.wholeNumber(1, 10_000),
    fallback: 64,
    meaning:
      "running upstream calls per agent, and as many streamed ones; of several gateways on a database each has its part",
  }),
  TOLLGATE_MAX_RESPONSE_BYTES: row({
    kind: value.wholeNumber(1, GIB),
    fallback: 33_554_432,
    meaning: "a larger upstream response ends the call as failed, unless it is streamed",
  }),
  TOLLGATE_BODY_RETENTION_DAYS: row({
    kind: value.wholeNumber(0, DAYS_MAX),
    fallback: 30,
    meaning: "age at which captured bodies are removed; 0 keeps them",
  }),
  TOLLGATE_HISTORY_RETENTION_DAYS: row({
    kind: value.wholeNumber(0, DAYS_MAX),
    fallback: 0,
    meaning: "age at which whole records, receipts and policy decisions are removed; 0 keeps them",
  }),
  TOLLGATE_AGENTS_MAX: row({
    kind: value.wholeNumber(1, MILLION),
    fallback: 10_000,
    meaning: "agents of a tenant that are not inactive; one more is refused with 429",
  }),
  TOLLGATE_CREDENTIALS_MAX: row({
    kind: value.wholeNumber(1, MILLION),
    fallback: 1_000,
    meaning: "credentials of a tenant; one more is refused with 429",
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

export const FACILITATOR = {
  TOLLGATE_OPEN_PORT: row({
    kind: value.wholeNumber(0, 65_535),
    fallback: 8081,
    meaning: "port of the plain listener with /supported and /healthz only; 0 takes a free one",
  }),
  TOLLGATE_TLS_CERT_FILE: row({
    kind: pem.certificateFile,
    fallback: null,
    shown: "required",
    meaning: "PEM file of the server's certificate, and of the certificates between it and its root",
  }),
  TOLLGATE_TLS_KEY_FILE: row({
    kind: pem.privateKeyFile,
    fallback: null,
    shown: "required",
    meaning: "PEM file of its private key",
  }),
  TOLLGATE_CLIENT_CA_FILE: row({
    kind: pem.caFile,
    fallback: null,
    shown: "required",
    meaning: "PEM file of the CA of client certificates",
  }),
  TOLLGATE_RPC_URLS,
  TOLLGATE_SIGNER_KEY: row({
    kind: money.privateKeys,
    fallback: null,
    secret: true,
    shown: "required unless remote",
    meaning: "comma list of hex private keys that pay the gas; several settle in parallel",
  }),
  TOLLGATE_REMOTE_SIGNER_URL: row({
    kind: value.httpUrl("query"),
    fallback: null,
    meaning: "a signer that speaks JSON-RPC eth_signTransaction (Web3Signer, Clef), instead of keys",
  }),
  TOLLGATE_REMOTE_SIGNER_ADDRESS: row({
    kind: money.address,
    fallback: null,
    meaning: "the address that it signs for; required with TOLLGATE_REMOTE_SIGNER_URL",
  }),
  TOLLGATE_MAX_PER_TRANSACTION: row({
    kind: money.amount,
    fallback: 10_000_000n,
    meaning: "most atomic units of one payment, for accounts without a limit of their own",
  }),
  TOLLGATE_DAILY_CEILING: row({
    kind: money.amount,
    fallback: 1_000_000_000n,
    meaning: "most atomic units of a UTC day, for accounts without a ceiling of their own",
  }),
  TOLLGATE_GAS_LOW_WATER_WEI: row({
    kind: money.amount,
    fallback: 1_000_000_000_000_000n,
    meaning: "balance of a signer below which it is not ready",
  }),
  TOLLGATE_INCLUSION_TIMEOUT_MS: row({
    kind: value.wholeNumber(1, TEN_MINUTES_MS),
    fallback: 15_000,
    meaning: "how long a settlement waits for its block",
  }),
  TOLLGATE_CONFIRMATIONS: row({
    kind: value.wholeNumber(1, 10_000),
    fallback: 12,
    meaning: "blocks after which a settlement is taken as final",
  }),
  TOLLGATE_MAX_FEE_GWEI: row({
    kind: money.gwei,
    fallback: 5_000_000_000n,
    shown: "5",
    meaning: "cap on maxFeePerGas, that of replacements included; may have decimals",
  }),
  TOLLGATE_DAILY_GAS_WEI: row({
    kind: money.amount,
    fallback: 1_000_000_000_000_000n,
    meaning: "wei that the reverted transactions of one account may burn on a UTC day; above it 429; 0: no bound",
  }),
  TOLLGATE_DAILY_GAS_ALL_WEI: row({
    kind: money.amount,
    fallback: 0n,
    meaning: "the same for all transactions of an account, successful ones too; 0: no bound",
  }),
  TOLLGATE_MIN_VALUE: row({
    kind: money.amount,
    fallback: 100n,
    meaning: "least atomic units of one payment",
  }),
  TOLLGATE_BATCH: row({
    kind: value.wholeNumber(0, 100),
    fallback: 0,
    meaning: "most payments in one Multicall3 transaction; 0: one by one",
  }),
};

export const DEMO = {
  TOLLGATE_ANVIL: row({
    kind: value.path,
    fallback: null,
    shown: "looked for on the PATH and in node_modules",
    meaning: "path of anvil, the program that is the demo's chain",
  }),
};
