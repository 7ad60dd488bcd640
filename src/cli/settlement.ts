// `tollgate settlement set`: stores a tenant's client certificate as a credential and names the facilitator that gets it, in the
// database of a gateway that may be running. What the HTTP API checks is checked here, by the same services. A gateway
// reads both rows for each payment, so it needs no notice.
import { pemFile } from "../config/pem.ts";
import { valueProblem } from "../config/values.ts";
import type { Config } from "../config.ts";
import type { Caller } from "../core/call.ts";
import { isServerOnly, parseCertificates } from "../core/certificates.ts";
import { attempt, Fault } from "../core/fault.ts";
import { type HostRules, hostRules, writtenUrlProblem } from "../core/host.ts";
import { StartupProblem } from "../core/startup.ts";
import { printable } from "../core/text.ts";
import { createCredentialService, findSecret, secretIdentity } from "../gateway/credentials/service.ts";
import { checkFacilitatorUrl, findSettlementConfig, patchSettlementConfig } from "../gateway/payment/config.ts";
import { clientIdentity } from "../gateway/payment/facilitator-client.ts";
import { createOutbound, ownAddresses } from "../http/client/outbound.ts";
import { MAX } from "../kernel/limits.ts";
import { type Keyring, openKeyring } from "../keys/keyring.ts";
import type { Store } from "../storage/store.ts";
import { begin, type CommandLine, neededFlag, shownWord } from "./command-line.ts";
import { facilitatorProblems } from "./doctor/servers.ts";
import { openGatewayStore, requireGatewayPlace, requireMasterKeys, warnOfUnknownTenant, withStore } from "./open.ts";
import { readPrincipal } from "./token.ts";

type ChosenFacilitator = Readonly<Record<"tenant" | "url" | "bundle", string>>;

function identityIn(bundle: string) {
  const identity = clientIdentity(bundle);
  const [own] = parseCertificates(identity?.cert ?? "");
  if (own !== undefined && isServerOnly(own)) throw new Error("its certificate is a server's, not a client's");
  return identity;
}

const bundleFile = pemFile(
  `a PEM file of at most ${MAX.plaintextBytes} bytes with a client certificate, its private key, and the CA of the facilitator's certificate`,
  (text) => (Buffer.byteLength(text) <= MAX.plaintextBytes && identityIn(text) !== null ? text : undefined),
  (text) => {
    if (Buffer.byteLength(text) > MAX.plaintextBytes) return "is larger";
    try {
      identityIn(text);
    } catch (error) {
      return `is not such a bundle: ${error instanceof Error ? error.message : "it can't be read"}`;
    }
    const lacks = text.includes("PRIVATE KEY-----") ? "certificate" : "private key";
    return `holds no ${lacks}`;
  },
);

export async function setSettlement(line: CommandLine): Promise<string> {
  const request = { tenant: readPrincipal(line, "tenant"), url: readUrl(line), bundle: readBundle(line) };
  const { config, log } = begin(line, "keys", (config) => urlProblems(request.url, config));
  await requireGatewayPlace(config);
  const masterKeys = requireMasterKeys(config, log);
  const { url } = request;
  if (writtenUrlProblem(url, rulesOf(config)) !== null) {
    const near = `${new URL(url).host} is an address of this machine or of a private network`;
    process.stderr.write(`${near}: a gateway calls it only if its TOLLGATE_ALLOW_HOSTS names it\n`);
  }
  try {
    return await withStore(openGatewayStore(config, log), async (store) => {
      const keyring = await openKeyring(store, masterKeys, store.clock);
      // Before the credential is stored, by which every tenant is known.
      await warnOfUnknownTenant(store, request.tenant);
      return set(config, store, keyring, request);
    });
  } catch (error) {
    if (!(error instanceof Fault) || error.kind === "unavailable") throw error;
    throw new StartupProblem(flagged(error.message), { cause: error });
  }
}

function readUrl(line: CommandLine): string {
  const is = "https URL, such as https://facilitator.example.com:8443";
  const url = neededFlag(line, "facilitator", `the facilitator's ${is}`);
  if (url === "" || URL.canParse(url)) return url;
  line.problems.push(`--facilitator must be an ${is}: ${shownWord(url)} is not a URL`);
  return "";
}

function readBundle(line: CommandLine): string {
  const path = neededFlag(line, "bundle", bundleFile.must);
  const bundle = path === "" ? "" : bundleFile.parse(path);
  if (bundle === undefined) line.problems.push(valueProblem("--bundle", bundleFile, path));
  return bundle ?? "";
}

/** The message of a fault with the flag in the place of the field of the API. */
function flagged(message: string): string {
  const named = message.replace(/^facilitator_url: /, "--facilitator ");
  return named.replace(/^(facilitator_credential_ref|plaintext): /, "--bundle ");
}

const rulesOf = ({ allowHosts: allow, denyHosts: deny }: Config) => hostRules({ allow, deny, own: ownAddresses() });

/**
 * The rules for what is written here. They exempt this one host: whether a gateway may call it depends on the gateway's own
 * configuration, which this process need not have, and the gateway checks the address of every call.
 */
function ownRules(url: string, config: Config): HostRules {
  const host = URL.parse(url)?.hostname.replace(/^\[|\]$/g, "") ?? "";
  const { allowHosts, denyHosts: deny } = config;
  return attempt(() => hostRules({ allow: [...allowHosts, host], deny, own: ownAddresses() })) ?? rulesOf(config);
}

function urlProblems(url: string, config: Config): readonly string[] {
  if (url === "") return [];
  try {
    checkFacilitatorUrl(url, ownRules(url, config));
    return [];
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    return [flagged(error.message)];
  }
}

async function set(config: Config, store: Store, keyring: Keyring, request: ChosenFacilitator): Promise<string> {
  const { tenant, url } = request;
  const stored = () => storeBundle(config, store, keyring, request);
  // Another run may store the first credential of this name at the same moment; then this one finds it.
  const { id, change } = await stored().catch((error) => {
    if (error instanceof Fault && error.kind === "conflict") return stored();
    throw error;
  });
  const current = await findSettlementConfig(store.read, tenant);
  const isSame = current?.facilitator_url === url && current.facilitator_credential_ref === id;
  const deps = { store, clock: store.clock, rules: ownRules(url, config) };
  const pointed = { facilitator_url: url, facilitator_credential_ref: id };
  if (!isSame) await patchSettlementConfig(deps, tenant, pointed);
  const looked = { network: config.network, url, tls: clientIdentity(request.bundle), header: null, tenants: [tenant] };
  const outbound = createOutbound({ rules: deps.rules, extraCa: config.extraCa });
  for (const problem of await facilitatorProblems(looked, outbound)) {
    if (problem !== null) process.stderr.write(`warning: ${url}: ${printable(problem.text)}; ${problem.advice}\n`);
  }
  const done = isSame && change === "kept" ? "already settles" : "settles";
  return `${tenant} ${done} at ${url}, with the bundle in credential ${id} (${change})\n`;
}

/**
 * Stores the bundle under a name for the facilitator's host: each has a credential of its own, since payments that are open stay with
 * the facilitator that they were sent to, and with its credential. `change` is new, rotated or kept.
 */
async function storeBundle(config: Config, store: Store, keyring: Keyring, chosen: ChosenFacilitator) {
  const { tenant, url, bundle } = chosen;
  const options = { store, clock: store.clock, keyring, uses: [], credentialsMax: config.quotas.credentials };
  const credentials = createCredentialService(options);
  const caller: Caller = { tenant, user: "", scopes: new Set() };
  const name = nameFor(new URL(url).host);
  for await (const row of credentials.list(caller)) {
    if (row.name !== name) continue;
    const must = "must be managed and of auth_type none, or be removed";
    if (row.source !== "managed" || row.auth_type !== "none")
      throw new StartupProblem(`the credential ${JSON.stringify(name)} of ${tenant} ${must}`);
    const stored = await findSecret(store.read, tenant, row.id);
    if (stored?.sealed != null) {
      const { sealed, key_number, version } = stored;
      const secret = await keyring.openSecret(tenant, secretIdentity(tenant, row.id, version), { sealed, key_number });
      if (Buffer.from(bundle).equals(secret)) return { id: row.id, change: "kept" };
    }
    await credentials.rotate(caller, row.id, { plaintext: bundle });
    return { id: row.id, change: "rotated" };
  }
  const created = await credentials.create(caller, { name, auth_type: "none", source: "managed", plaintext: bundle });
  return { id: created.id, change: "new" };
}

/** A name that fits, and differs from host to host. */
function nameFor(host: string): string {
  const name = `facilitator ${host}`;
  if (name.length <= MAX.nameCharacters) return name;
  const digest = new Bun.CryptoHasher("sha256").update(host).digest("hex").slice(0, 16);
  return `${name.slice(0, MAX.nameCharacters - 17)} ${digest}`;
}
