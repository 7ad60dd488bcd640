// The registry of the manual's pages, in the order in which they are listed everywhere: by the kind of help that a
// reader looks for, and within a section from what is read first. The pages are Markdown files beside this file, and part of the
// binary. A new page is an import and a row here.
import api from "./api.md" with { type: "text" };
import architecture from "./architecture.md" with { type: "text" };
import backups from "./backups.md" with { type: "text" };
import changelog from "./changelog.md" with { type: "text" };
import clients from "./clients.md" with { type: "text" };
import configuration from "./configuration.md" with { type: "text" };
import contributing from "./contributing.md" with { type: "text" };
import decisions from "./decisions.md" with { type: "text" };
import development from "./development.md" with { type: "text" };
import facilitator from "./facilitator.md" with { type: "text" };
import growing from "./growing.md" with { type: "text" };
import install from "./install.md" with { type: "text" };
import limits from "./limits.md" with { type: "text" };
import measurements from "./measurements.md" with { type: "text" };
import monitoring from "./monitoring.md" with { type: "text" };
import operations from "./operations.md" with { type: "text" };
import payments from "./payments.md" with { type: "text" };
import receipts from "./receipts.md" with { type: "text" };
import replicas from "./replicas.md" with { type: "text" };
import rotation from "./rotation.md" with { type: "text" };
import security from "./security.md" with { type: "text" };
import start from "./start.md" with { type: "text" };
import streaming from "./streaming.md" with { type: "text" };
import troubleshooting from "./troubleshooting.md" with { type: "text" };
import upgrades from "./upgrades.md" with { type: "text" };
import vulnerabilities from "./vulnerabilities.md" with { type: "text" };

/** The kinds of page: a first success, a task to be done, facts to look up, and reasons. */
export const SECTIONS = ["Start", "How-to", "Reference", "Explanation"] as const;

export interface Page {
  /** The name of the file without its ending, the path below /docs, and the topic of `tollgate help`. */
  readonly name: string;
  readonly section: (typeof SECTIONS)[number];
  readonly title: string;
  readonly summary: string;
  readonly text: string;
}

type Row = readonly [section: Page["section"], name: string, summary: string, text: string];

const ROWS: readonly Row[] = [
  [
    "Start",
    "install",
    "releases and how to verify them; systemd, compose, one container; upgrade and uninstall",
    install,
  ],
  ["Start", "start", "a token, an agent, a call and its result, and what a failed call says", start],
  ["Start", "payments", "give an agent a price, collect it, and pay for a call", payments],
  ["Start", "streaming", "answers as they come, and ordinary MCP clients", streaming],
  ["Start", "receipts", "signed receipts of calls, and how to check them offline", receipts],
  ["Start", "clients", "call an agent from curl, fetch, Python, MCP clients and x402-fetch", clients],
  ["How-to", "operations", "data directory, doctor, memory, retention, log, shutdown, TLS and connections", operations],
  ["How-to", "backups", "make and check a copy, move a service, go back to an older state", backups],
  ["How-to", "upgrades", "upgrade, upgrade replicas one by one, roll back", upgrades],
  ["How-to", "rotation", "renew the master key and all others, what to do after a theft, end tokens", rotation],
  ["How-to", "facilitator", "run the service that settles payments: certificates, gas, ceilings, reorgs", facilitator],
  ["How-to", "growing", "how much a machine carries, replicas, a standby, cells, which engines fit", growing],
  ["How-to", "replicas", "several gateways on one Postgres: what they share, failover and clocks", replicas],
  ["How-to", "troubleshooting", "by symptom: what it means, and what to do", troubleshooting],
  ["How-to", "development", "build and test commands, dependencies, recipes for typical changes", development],
  ["How-to", "contributing", "report a bug, make a change", contributing],
  ["How-to", "vulnerabilities", "report a vulnerability in private", vulnerabilities],
  ["Reference", "api", "every endpoint of the gateway by example, and its errors", api],
  ["Reference", "configuration", "every variable and every command, with its default", configuration],
  ["Reference", "limits", "every bound of connections, calls, answers, payments and what a tenant keeps", limits],
  ["Reference", "monitoring", "metrics, alert rules, a dashboard, every event of the log, and traces", monitoring],
  ["Reference", "changelog", "what each version brings, and what it asks of you", changelog],
  ["Explanation", "architecture", "the rooms of the code, the way of one paid call, states, glossary", architecture],
  ["Explanation", "security", "who is protected from whom, tokens, secrets, upstream addresses", security],
  ["Explanation", "decisions", "why things are as they are", decisions],
  [
    "Explanation",
    "measurements",
    "how much a machine carries, where the time goes, and decisions that a figure made",
    measurements,
  ],
];

/** Words by which readers look for a section, by page and anchor. Words written as one stand for a whole question. */
export const SEARCH_WORDS: Readonly<Record<string, string>> = {
  receipts: "proof evidence",
  "payments#what-became-of-a-payment": "much transactionhash revenue income",
  "start#an-agent": "add register",
  api: "rest reference endpoints",
  "api#agents":
    "price pricing register changeupstreamurl changeurl list capture body disable enable suspend remove delete",
  "api#calls": "poll long running asynchronous",
  "api#cancel": "call stop abort",
  "api#credentials":
    "api key secret upstream authentication bearer token hashicorp openbao vault header authorization pass",
  "api#errors": "status code http 400 401 402 403 404 405 409 413 422 429 500 502 503 504 invalid request",
  "api#failed-calls": "reason error_class error_detail agent timed out timeout dns reachable down offline",
  "api#history": "list invocations past calls search find request body pagination calledagent seerequestbody",
  "api#idempotency-keys": "retry safe repeat duplicate twice doublecharge doublepayment exactly once calltwice payment",
  "api#open-paths": "swagger openapi health public key",
  "api#rate-limits": "429 throttle quota call request per second minute",
  "api#responses-to-a-paid-call": "402 payment required declined paymentfailed money back charged failed",
  "api#policy": "block forbid deny tool access control dry run rule audit test",
  "api#payments": "header coinbase coinbasefacilitator publicfacilitator commission",
  "backups#backup": "tollgatebackup backup dump snapshot",
  "backups#postgres": "backup",
  "backups#move-a-service": "migrate another server machine host",
  "backups#restore": "backup",
  changelog: "release notes news breaking changes new",
  clients: "sdk library examples go golang java rust chatgpt openai",
  "clients#a-typed-client-in-typescript": "generate codegen openapi sdk",
  "clients#fetch": "javascript node js browser cors nodejs",
  configuration: "environment variables settings options increasetimeout raisetimeout longertimeout",
  "configuration#calls-from-the-command-line": "tollgatecall exit code",
  "configuration#commands": "cli command line completion tab autocomplete",
  "configuration#variables-of-both-services": "change port listen address host custom ca bind 0.0.0.0 run another",
  "configuration#variables-from-a-file": "environmentfile",
  "contributing#report-a-bug": "support contact help",
  "facilitator#certificates": "mtls client renew expired expiry authority",
  "facilitator#keys-and-gas": "wallet balance eth gas pays fees signer remote kms hsm need",
  "facilitator#ceilings": "spending daily limit",
  "facilitator#nodes": "rpc provider alchemy infura",
  "facilitator#several-facilitators": "two second",
  growing: "scale scaling secondgatewaysamemachine",
  "growing#how-much-one-machine-carries": "performance throughput benchmark capacity many requests handle",
  "growing#which-engines-fit": "mysql mariadb",
  "growing#disk": "database size",
  "install#binary-and-systemd": "installwithoutdocker withoutdocker service ubuntu debian",
  "install#compose": "docker container",
  "install#from-source": "demo demoport node version",
  "install#one-container": "docker kubernetes helm",
  "install#releases": "download windows macos linux offline airgapped install",
  "install#postgres-in-place-of-sqlite": "migrate switch",
  "install#upgrade": "update docker image",
  "limits#connections-and-requests": "max body size request size too large fileupload upload",
  "monitoring#metrics": "grafana prometheus scrape",
  "monitoring#traces": "opentelemetry otlp jaeger datadog",
  "operations#doctor": "tollgatedoctor",
  "operations#health": "check probe endpoint readiness liveness",
  "operations#log": "logging debug file rotate verbose verbosity",
  "operations#shutdown": "stop restart drain stopgateway survive",
  "operations#tls": "https proxy nginx reverse certificate use put domain name front",
  "operations#data-directory": "database location files folder change masterkeypermission wipe",
  "operations#retention": "delete history purge gdpr long kept keep result",
  "operations#memory": "out",
  payments: "price chargecall chargingcall mainnet money usdc x402 ethereum chain",
  "payments#get-paid": "getting paid price settlement set",
  "payments#set-a-price": "change settingprice price dollar per call payout address much cost",
  "payments#start-a-facilitator": "accountadd addaccount",
  "payments#name-the-facilitator": "url set change configure",
  "payments#pay-for-a-call": "pay",
  "receipts#check-receipts-offline": "verify signature",
  replicas: "high availability cluster",
  "replicas#postgres": "postgresql",
  "replicas#several-gateways": "load balancer multiple two second",
  "rotation#revoke-tokens": "logout invalidate",
  "security#scopes": "permissions roles rbac admin read body access only readonly",
  "security#secrets": "encryption at rest encrypt secret storage database",
  "security#tenants":
    "delete tenant remove create add multi user users two separate customers list multitenancy tenancy",
  "security#tokens": "jwt oidc sso keycloak auth0 okta identity provider",
  "security#upstream-addresses": "ssrf private network",
  "security#what-is-logged-and-stored": "privacy personal see data",
  start: "getting started quickstart tutorial hello first steps",
  "start#a-call": "responsebodybase64 base64 decode agent result poll image binary file",
  "start#a-token":
    "tollgatetoken login signin auth authentication bearer lost create mint lifetime expire longlived regenerate paste where print newtoken",
  "start#when-a-call-fails": "debug",
  "start#a-gateway": "run start",
  streaming: "sse server sent events",
  "streaming#connect-an-mcp-client": "mcp server url",
  troubleshooting: "requestid correlation",
  "troubleshooting#400-for-localhost-or-a-private-address": "localhost agent call loopback localhostagentnotallowed",
  "troubleshooting#401-for-a-good-token": "unauthorized invalidtoken expiredtoken tokenexpired badtoken",
  "troubleshooting#403": "forbidden",
  "troubleshooting#404-for-an-agent-that-is-there": "not found",
  "troubleshooting#429": "too many requests",
  "troubleshooting#no-connection-to-the-gateway": "connection refused econnrefused unreachable access another machine",
  "troubleshooting#it-does-not-start": "port in use address eaddrinuse crash wont doesnt fails crashed gateway",
  "troubleshooting#500-without-a-body": "error internal",
  "troubleshooting#503": "service unavailable",
  "troubleshooting#it-is-slow": "call latency cpu",
  "troubleshooting#calls": "stuck forever response body missing null",
  "troubleshooting#402-again-though-the-call-was-paid": "insufficient funds balance expired",
  "troubleshooting#payments": "down unhealthy",
  "troubleshooting#the-database-was-away-or-failed-over": "down",
  "troubleshooting#the-disk-fills": "space left device",
  upgrades: "version update",
  "upgrades#several-on-one-postgres": "rolling update zero downtime",
  "upgrades#going-back": "downgrade rollback roll back",
  vulnerabilities: "cve security issue",
};

/** The page for addresses that have nothing, by its name among the files. */
export const NO_PAGE = "no-page";

export const PAGES: readonly Page[] = ROWS.map(([section, name, summary, text]) => ({
  name,
  section,
  title: /^# (.+)$/m.exec(text)?.[1] ?? "",
  summary,
  text,
}));
