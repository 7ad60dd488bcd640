// Checks the servers that a gateway needs in addition to its database: the issuer of the callers' tokens, HashiCorp Vault or
// OpenBao, and the facilitators of all tenants. Each is sent the requests that the gateway would send it.
import { and, count, eq, isNotNull, isNull } from "drizzle-orm";
import type { Config } from "../../config.ts";
import { attempt } from "../../core/fault.ts";
import { hostRules } from "../../core/host.ts";
import { silentLog } from "../../core/log.ts";
import { createSecrets } from "../../gateway/credentials/resolve.ts";
import { currentToken } from "../../gateway/credentials/secrets-stores.ts";
import { fetchKeySet } from "../../gateway/identity/identity.ts";
import { clientIdentity } from "../../gateway/payment/facilitator-client.ts";
import { CredentialFailure } from "../../gateway/upstream/failure.ts";
import type { ClientIdentity } from "../../http/client/connections.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import { createOutbound, exchangeJson, fetchDocument, fetchJson, ownAddresses } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { openSealed } from "../../keys/keyring.ts";
import { findMasterKeys } from "../../keys/master-keys.ts";
import type { DatabaseInspection } from "../../storage/inspect.ts";
import { fitOf } from "../../storage/migrate.ts";
import type { Network } from "../../x402/network.ts";
import type { Finding, Problem } from "./findings.ts";
import {
  CHECK_MS_MAX,
  certificateProblems,
  failure,
  findings,
  inTime,
  NAMED_MAX,
  notChecked,
  observed,
  problemOf,
  warning,
} from "./findings.ts";

type Oidc = NonNullable<Config["identity"]["oidc"]>;

export async function issuerFindings(oidc: Oidc | null, trusted: Outbound): Promise<Finding[]> {
  if (oidc === null) return findings("issuer", [], "local, using this deployment's keys");
  const server = observed(trusted);
  const problem = await keysProblem(oidc, server.outbound);
  const problems = [problem, server.certificateProblem(), server.clockProblem()];
  return findings("issuer", problems, `${oidc.issuer} has keys that verify tokens`);
}

const ISSUER_ADVICE =
  "TOLLGATE_OIDC_ISSUER (and TOLLGATE_JWKS_URL) must be right, and this machine must reach it: without keys no call is taken";

async function keysProblem(oidc: Oidc, outbound: Outbound): Promise<Problem | null> {
  try {
    await fetchKeySet({ ...oidc, fetchJson: (url) => fetchDocument(outbound, url) });
    return null;
  } catch (error) {
    if (error instanceof OutboundError) return problemOf(error, ISSUER_ADVICE);
    // The message comes from `fetchKeySet`, which names no secret.
    const why = error instanceof Error ? error.message : "unknown";
    return failure(`${oidc.jwksUrl ?? oidc.issuer}: ${why}`, ISSUER_ADVICE);
  }
}

const VAULT_LIMITS = { timeoutMs: 4_500, bytesMax: 64 * 1024 };

type Vault = NonNullable<Config["vault"]>;

export async function vaultFindings(vault: Vault, trusted: Outbound): Promise<Finding[]> {
  const server = observed(trusted);
  const problem = await tokenProblem(vault, server.outbound);
  return findings("vault", [problem, server.certificateProblem()], "it answers, and accepts the token");
}

const BAD_TOKEN =
  "TOLLGATE_VAULT_TOKEN must be valid, and should allow auth/token/lookup-self (as the policy `default` does)";
const NOT_READY = "unseal it, or find out why it is not ready: calls with its secrets fail meanwhile";

/** Newer servers say this about an unknown token, but not about a token that lacks a permission. */
const INVALID_TOKEN = /invalid token/i;

/** Looks up the token with itself, which the policy `default` of every Vault allows. */
async function tokenProblem(vault: Vault, outbound: Outbound): Promise<Problem | null> {
  try {
    const headers = { "x-vault-token": await currentToken(vault), "x-vault-request": "true" };
    const url = `${vault.address.replace(/\/+$/, "")}/v1/auth/token/lookup-self`;
    const { status, body } = await fetchJson(outbound, url, headers, VAULT_LIMITS);
    if (status === 200) return null;
    if (status === 503) return failure("it answers 503: it is sealed, or has no leader", NOT_READY);
    if (status !== 403) return failure(`it answers ${status} about the token`, NOT_READY);
    return INVALID_TOKEN.test(JSON.stringify(body))
      ? failure("it does not know the token", BAD_TOKEN)
      : warning("it does not say whether the token is valid", BAD_TOKEN);
  } catch (error) {
    return problemOf(error, "TOLLGATE_VAULT_ADDR must be its address, and this machine must reach it");
  }
}

/** The time for the facilitators of all tenants together. Those whose check has not begun by then are only counted. */
const ALL_MS_MAX = 30_000;
export const FACILITATORS_MS_MAX = ALL_MS_MAX + 2 * CHECK_MS_MAX;
const AT_ONCE = 8;

/** A facilitator, with the credential that is shown to it and the tenants that use both. */
interface Facilitator {
  readonly network: Network;
  readonly url: string;
  readonly tls: ClientIdentity | null;
  readonly header: readonly [name: string, value: string] | null;
  readonly tenants: string[];
}

type Group = Facilitator & { found: readonly Finding[] };

/**
 * Sends each facilitator a request as a settlement would: under the host rules, with the tenant's own certificate or header.
 * Tenants with the same facilitator and credential share a request. Findings name tenants, and show nothing of their secrets.
 */
export async function facilitatorFindings(config: Config, database: DatabaseInspection | null, trusted: Outbound) {
  const fit = database === null ? "none" : fitOf(database.schema);
  if (database === null || fit === "none") return findings("facilitators", [], "no tenant has one yet");
  if (fit !== "same" && fit !== "newer") return notChecked("facilitators", "a schema that fits this program");
  // If the keys can't be read, the check of the keys reports why.
  const masterKeys = attempt(() => findMasterKeys({ ...config, log: silentLog })) ?? null;
  if (masterKeys === null) return notChecked("facilitators", "the master key");
  const { settlementConfigs: t } = database.read.tables;
  const fields = { tenant: t.tenant, url: t.facilitator_url, ref: t.facilitator_credential_ref };
  const settlements = await inTime(database.read.db.select(fields).from(t).orderBy(t.tenant));
  const uncollected = await inTime(uncollectedProblems(database));
  if (settlements.length === 0)
    return findings("facilitators", uncollected, "no tenant has a settlement configuration");
  const { read } = createSecrets({
    store: database,
    keyring: openSealed(database.read, masterKeys),
    secretsDir: config.secretsDir,
    vault: config.vault,
    fetchJson: (url, headers, limits) => fetchJson(trusted, url, headers, limits),
  });
  const groups = new Map<string, Group>();
  const unreadable: Finding[] = [];
  const until = performance.now() + ALL_MS_MAX;
  let left = await eachInTime(settlements, until, async ({ tenant, url, ref }) => {
    try {
      const opened = await inTime(read(tenant, ref, `${base(url)}/settle`));
      const tls = clientIdentity(opened.secret);
      const header = tls === null ? opened.header() : null;
      const shown = { url, tls, header: header === null ? null : ([header.name, header.value] as const) };
      const key = JSON.stringify(shown);
      const group = groups.get(key);
      if (group === undefined) groups.set(key, { network: config.network, ...shown, tenants: [tenant], found: [] });
      else group.tenants.push(tenant);
    } catch (error) {
      unreadable.push(...findings(named({ url, tenants: [tenant] }), [credentialProblem(error)], ""));
    }
  });
  const rules = hostRules({ allow: config.allowHosts, deny: config.denyHosts, own: ownAddresses() });
  const outbound = createOutbound({ rules, extraCa: config.extraCa });
  left += await eachInTime([...groups.values()], until, async (group) => {
    group.found = await groupFindings(group, outbound);
  });
  const text = `${left} more were not checked within ${ALL_MS_MAX / 1000} s`;
  const missed = left === 0 ? null : warning(text, "look at those that are slow");
  const others = [...uncollected, missed].filter((problem) => problem !== null);
  const found = [...unreadable, ...[...groups.values()].flatMap(({ found }) => found)];
  return others.length === 0 ? found : [...found, ...findings("facilitators", others, "")];
}

/** Tenants whose payments are checked, and stay with the payers. */
async function uncollectedProblems({ read: { db, tables } }: DatabaseInspection): Promise<Problem[]> {
  const { agents: a, settlementConfigs: s } = tables;
  const rows = await db
    .select({ tenant: a.tenant, agents: count() })
    .from(a)
    .leftJoin(s, eq(s.tenant, a.tenant))
    .where(and(isNotNull(a.pricing), isNull(a.deleted_at), isNull(s.tenant)))
    .groupBy(a.tenant)
    .orderBy(a.tenant)
    .limit(NAMED_MAX + 1);
  const advice = "its calls are made and nothing is collected";
  return rows.map(({ tenant, agents }, index) => {
    if (index === NAMED_MAX) return warning("more tenants have priced agents and no facilitator", advice);
    const priced = `${agents} priced ${agents === 1 ? "agent" : "agents"}`;
    const text = `tenant ${tenant} has ${priced} and no facilitator: ${advice}`;
    return warning(text, "tollgate settlement set names one");
  });
}

const named = ({ url, tenants: [first = "", ...others] }: Pick<Group, "url" | "tenants">): string =>
  `facilitator ${url} of ${first}${others.length === 0 ? "" : ` and ${others.length} more`}`;

/** Errors of credentials and bundles hold no part of a secret; other errors may. */
function credentialProblem(error: unknown): Problem {
  const advice = "the tenant must store a valid one: its paid calls are refused";
  const isSafe = error instanceof CredentialFailure || (error instanceof Error && /\bbundle\b/.test(error.message));
  return isSafe ? failure(`its credential can't be used: ${error.message}`, advice) : problemOf(error, advice);
}

const base = (url: string): string => url.replace(/\/+$/, "");

async function groupFindings(group: Group, outbound: Outbound): Promise<Finding[]> {
  const unseen = "run `tollgate account list` at the facilitator to see whether the tenant has an account";
  const good = `it answers and supports ${group.network.name}; ${unseen}`;
  return findings(named(group), await facilitatorProblems(group, outbound), good);
}

/** Asks a facilitator as a settlement would, and judges its answer and the certificates of both sides. */
export async function facilitatorProblems(group: Facilitator, outbound: Outbound): Promise<(Problem | null)[]> {
  const server = observed(outbound);
  const problem = await supportedProblem(group, server.outbound);
  // The first certificate of the bundle is the tenant's own.
  const advice = "the tenant must store a new one in its credential";
  const [own = null] = certificateProblems("the tenant's client certificate", group.tls?.cert ?? "", advice);
  return [problem, server.certificateProblem(), server.clockProblem(), own];
}

async function supportedProblem(group: Facilitator, outbound: Outbound): Promise<Problem | null> {
  const { network, url, tls, header, tenants } = group;
  const unreached = "check the URL (tollgate settlement set), or tell its operator: paid calls wait or are refused";
  const request = {
    method: "GET",
    headers: header === null ? [] : [header],
    tls,
    tenant: tenants[0] ?? "",
    signal: AbortSignal.timeout(4_500),
  };
  try {
    const { status, body } = await exchangeJson(outbound, `${base(url)}/supported`, request, MAX.facilitatorBytes);
    if (status === 200) return kindsProblem(network, body);
    const text = `it answers ${status} to GET /supported`;
    // Some facilitators have no such route.
    if (status === 404 || status === 405) return warning(text, unreached);
    const advice = status === 401 || status === 403 ? "the tenant must store a credential that it accepts" : unreached;
    return failure(text, advice);
  } catch (error) {
    return error instanceof OutboundError
      ? problemOf(error, unreached)
      : failure("it does not answer in time", unreached);
  }
}

function kindsProblem({ name, caip2 }: Network, body: unknown): Problem | null {
  const kinds = (body as { readonly kinds?: unknown } | undefined)?.kinds;
  const networks = (Array.isArray(kinds) ? kinds : []).map((kind) => (kind as { network?: unknown } | null)?.network);
  if (networks.some((network) => network === name || network === caip2)) return null;
  return failure(`it does not settle on ${name}`, "the tenant must name a facilitator that does");
}

/** Works on the items, a few at a time, until the deadline (performance.now()). Returns how many were not begun by then. */
export async function eachInTime<T>(items: readonly T[], until: number, work: (item: T) => Promise<void>) {
  let left = 0;
  await mapLimit(items, AT_ONCE, async (item) => {
    if (performance.now() < until) await work(item);
    else left++;
  });
  return left;
}
