// The facilitators of all tenants, each asked as a settlement would ask it: under the host rules, and with the tenant's
// own certificate or header. Tenants that show the same to the same server count as one. Their names are shown to the
// operator, and nothing of their secrets.

import type { Config } from "../../config.ts";
import { parseCertificates } from "../../core/certificates.ts";
import { hostRules } from "../../core/host.ts";
import { systemClock } from "../../core/time.ts";
import { createSecretReader } from "../../gateway/credentials/resolve.ts";
import { CredentialFailure } from "../../gateway/credentials/secrets-stores.ts";
import { clientIdentity } from "../../gateway/payment/facilitator-client.ts";
import type { ClientIdentity } from "../../http/client/connections.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { createOutbound, exchangeJson, fetchJson, type Outbound, ownAddresses } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { mapLimit } from "../../kernel/loop.ts";
import { openSealed } from "../../keys/keyring.ts";
import type { DatabaseLook } from "../../storage/look.ts";
import { fitOf } from "../../storage/migrate.ts";
import { NETWORK, NETWORK_CAIP2 } from "../../x402/kind.ts";
import { type Opening, usableMasterKeys } from "./database.ts";
import {
  CHECK_MS_MAX,
  type Finding,
  failure,
  findings,
  inTime,
  notLookedAt,
  observed,
  type Problem,
  problemOf,
  timeText,
  validityProblem,
  warning,
} from "./findings.ts";

/** For the facilitators of all tenants together. What has not begun by then is counted, and not looked at. */
const ALL_MS_MAX = 30_000;
export const FACILITATORS_MS_MAX = ALL_MS_MAX + 2 * CHECK_MS_MAX;
const AT_ONCE = 8;

interface Settlement {
  readonly tenant: string;
  readonly url: string;
  readonly ref: string;
}

/** What is shown to a facilitator. */
interface Credential {
  readonly tls: ClientIdentity | null;
  readonly header: readonly [name: string, value: string] | null;
}

interface Group extends Credential {
  readonly url: string;
  readonly tenants: string[];
}

export async function facilitatorFindings(config: Config, opening: Opening, trusted: Outbound): Promise<Finding[]> {
  const until = performance.now() + ALL_MS_MAX;
  const database = await opening.catch(() => undefined);
  if (database === undefined) return notLookedAt("facilitators", "the database");
  const fit = database === null ? "none" : fitOf(database.schema);
  if (database === null || fit === "none") return findings("facilitators", [], "no tenant has one yet");
  if (fit !== "same" && fit !== "newer") return notLookedAt("facilitators", "a schema that fits this program");
  const masterKeys = usableMasterKeys(config);
  if (masterKeys === null) return notLookedAt("facilitators", "the master key");
  const settlements = await inTime(settlementsOf(database));
  if (settlements.length === 0) return findings("facilitators", [], "no tenant has a settlement configuration");
  const read = createSecretReader({
    store: database,
    keyring: openSealed(database.read, masterKeys),
    secretsDir: config.secretsDir,
    vault: config.vault,
    fetchJson: (url, headers, limits) => fetchJson(trusted, url, headers, limits),
  });
  const groups = new Map<string, Group>();
  const closed: Finding[] = [];
  let left = await eachInTime(settlements, until, async (settlement) => {
    try {
      const credential = await inTime(credentialOf(settlement, read));
      const key = JSON.stringify([settlement.url, credential]);
      const group = groups.get(key);
      if (group === undefined) groups.set(key, { ...credential, url: settlement.url, tenants: [settlement.tenant] });
      else group.tenants.push(settlement.tenant);
    } catch (error) {
      closed.push(...findings(named(settlement.url, [settlement.tenant]), [credentialProblem(error)], ""));
    }
  });
  const asked = new Map<Group, Finding[]>();
  const ask = asker(config);
  left += await eachInTime([...groups.values()], until, async (group) => void asked.set(group, await ask(group)));
  const found = [...groups.values()].flatMap((group) => asked.get(group) ?? []);
  return [...closed, ...found, ...(left === 0 ? [] : findings("facilitators", [notReached(left)], ""))];
}

function notReached(count: number): Problem {
  const text = `${count} more were not looked at within ${ALL_MS_MAX / 1000} s`;
  return warning(text, "see to those that are slow, and look again");
}

async function settlementsOf({ read }: DatabaseLook): Promise<Settlement[]> {
  const { settlementConfigs: t } = read.tables;
  const fields = { tenant: t.tenant, url: t.facilitator_url, ref: t.facilitator_credential_ref };
  return read.db.select(fields).from(t).orderBy(t.tenant);
}

function named(url: string, [first = "", ...others]: readonly string[]): string {
  return `facilitator ${url} of ${first}${others.length === 0 ? "" : ` and ${others.length} more`}`;
}

async function credentialOf(
  { tenant, url, ref }: Settlement,
  read: ReturnType<typeof createSecretReader>,
): Promise<Credential> {
  const opened = await read(tenant, ref, settleUrl(url));
  const tls = clientIdentity(opened.secret);
  const header = tls === null ? opened.header() : null;
  return { tls, header: header === null ? null : [header.name, header.value] };
}

/** The errors of credentials and bundles hold no part of a secret; other errors may. */
function credentialProblem(error: unknown): Problem {
  const advice = "the tenant must store a good one: its paid calls are refused";
  if (error instanceof CredentialFailure) return failure(`its credential can't be used: ${error.message}`, advice);
  const isOfBundle = error instanceof Error && /\bbundle\b/.test(error.message);
  return isOfBundle ? failure(`its credential can't be used: ${error.message}`, advice) : problemOf(error, advice);
}

function settleUrl(url: string): string {
  return `${base(url)}/settle`;
}

function base(url: string): string {
  return url.replace(/\/+$/, "");
}

function asker({ allowHosts, denyHosts, extraCa }: Config) {
  const rules = hostRules({ allow: allowHosts, deny: denyHosts, own: ownAddresses() });
  const outbound = createOutbound({ rules, extraCa });
  return async (group: Group): Promise<Finding[]> => {
    const server = observed(outbound);
    const problem = await supportedProblem(group, server.outbound);
    const [own, shown] = [server.certificateEnd(), group.tls === null ? null : endOf(group.tls)];
    const ends = own === null ? "" : `, its certificate holds until ${timeText(own)}`;
    const fine = `it settles on ${NETWORK}${ends}${shown === null ? "" : `, the tenant's until ${timeText(shown)}`}`;
    const problems = [
      problem,
      server.certificateProblem(),
      server.clockProblem(),
      group.tls === null ? null : clientProblem(group.tls),
    ];
    return findings(named(group.url, group.tenants), problems, fine);
  };
}

async function supportedProblem({ url, tls, header, tenants }: Group, outbound: Outbound): Promise<Problem | null> {
  const unreached = "its operator must see to it: paid calls of these tenants wait or are refused";
  try {
    const { status, body } = await exchangeJson(
      outbound,
      `${base(url)}/supported`,
      {
        method: "GET",
        headers: header === null ? [] : [header],
        tls,
        tenant: tenants[0] ?? "",
        signal: AbortSignal.timeout(4_500),
      },
      MAX.facilitatorBytes,
    );
    if (status === 200) return kindsProblem(body);
    const text = `it answers ${status} to GET /supported`;
    if (status === 404 || status === 405) return warning(text, "whether it settles on this network is not known");
    const advice = status === 401 || status === 403 ? "the tenant must store a credential that it takes" : unreached;
    return failure(text, advice);
  } catch (error) {
    if (!(error instanceof OutboundError)) return failure("it does not answer in time", unreached);
    return problemOf(error, unreached);
  }
}

function kindsProblem(body: unknown): Problem | null {
  const kinds = (body as { readonly kinds?: unknown } | undefined)?.kinds;
  const networks = (Array.isArray(kinds) ? kinds : []).map((kind) => (kind as { network?: unknown } | null)?.network);
  if (networks.some((network) => network === NETWORK || network === NETWORK_CAIP2)) return null;
  return failure(`it does not settle on ${NETWORK}`, "the tenant must name a facilitator that does");
}

function clientProblem({ cert }: ClientIdentity): Problem | null {
  const [leaf] = parseCertificates(cert);
  if (leaf === undefined) return null;
  const validity = { from: Date.parse(leaf.validFrom), to: Date.parse(leaf.validTo) };
  const advice = "the tenant must store a new one in its credential";
  return validityProblem("the tenant's client certificate", validity, systemClock.now(), advice);
}

function endOf({ cert }: ClientIdentity): number | null {
  const [leaf] = parseCertificates(cert);
  return leaf === undefined ? null : Date.parse(leaf.validTo);
}

/**
 * Works on as many items as there may be, a few at a time, and no longer than there is time. Resolves with how many were
 * not begun before the end.
 *
 * @param until by performance.now()
 */
export async function eachInTime<T>(
  items: readonly T[],
  until: number,
  work: (item: T) => Promise<void>,
): Promise<number> {
  let left = 0;
  await mapLimit(items, AT_ONCE, async (item) => {
    if (performance.now() < until) await work(item);
    else left++;
  });
  return left;
}
