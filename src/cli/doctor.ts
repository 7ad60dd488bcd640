// `tollgate doctor`: tries everything that the configuration names, as the service would use it, and changes nothing. This file
// lists the checks of each service; the checks themselves are in doctor/.
import type { Config, FacilitatorConfig } from "../config.ts";
import { createOutbound } from "../http/client/outbound.ts";
import { LIMITS } from "../kernel/limits.ts";
import type { CommandVerdict } from "./command-line.ts";
import { chainClockFindings, nodesFindings, queryNodes, walletFindings } from "./doctor/chain.ts";
import { afterOpening, databaseChecks, keyFindings, type Opening, openDatabase } from "./doctor/database.ts";
import type { Check, Finding } from "./doctor/findings.ts";
import {
  certificateProblems,
  findings,
  isHealthy,
  report,
  runChecks,
  SECOND_CHECK_MS_MAX,
  warning,
} from "./doctor/findings.ts";
import { FACILITATORS_MS_MAX, facilitatorFindings, issuerFindings, vaultFindings } from "./doctor/servers.ts";

type Examined = CommandVerdict & { readonly document: object };

/** Runs all checks. The verdict holds unless the service would refuse work. @param unread a warning for each unread variable */
export async function examine(config: Config, unread: readonly string[]): Promise<Examined> {
  const { facilitator, mode } = config;
  const opening = openDatabase(config);
  try {
    const service = facilitator === null ? gatewayChecks(config, opening) : facilitatorChecks(facilitator, opening);
    // The configuration itself is valid; otherwise the command would have ended earlier.
    const problems = unread.map((text) => warning(text, "unset or correct it"));
    const found = await runChecks(service);
    const all = [...findings("configuration", problems, `good for the ${mode}`), ...found];
    const holds = isHealthy(all);
    return { holds, text: report(all), document: { healthy: holds, checks: all.map(documented) } };
  } finally {
    const database = await opening.catch(() => null);
    await database?.close();
  }
}

function documented({ what, state, text, advice, mib }: Finding) {
  return { check: what, state, message: text, advice, ...(mib && { mib }) };
}

function gatewayChecks(config: Config, opening: Opening): Check[] {
  const trusted = createOutbound({ rules: null, extraCa: config.extraCa });
  const { vault } = config;
  const advice = "restore the master key from your copy: without it no secret can be read, and no gateway starts";
  const keys = { what: "keys", advice };
  const facilitators = { what: "facilitators", msMax: FACILITATORS_MS_MAX };
  return [
    ...databaseChecks("gateway", config, opening),
    afterOpening(keys, opening, (database) => keyFindings(config, database)),
    { what: "memory", run: async () => [memoryFinding()] },
    { what: "issuer", run: () => issuerFindings(config.identity.oidc, trusted) },
    ...(vault === null ? [] : [{ what: "vault", run: () => vaultFindings(vault, trusted) }]),
    afterOpening(facilitators, opening, (database) => facilitatorFindings(config, database, trusted)),
  ];
}

/** Adds up the memory budgets, all of which a busy process may use at the same time. */
function memoryFinding(): Finding {
  const budgets = Object.values(LIMITS.Memory).map(({ what, size }) => [what, size / 1024 ** 2] as const);
  const together = budgets.reduce((sum, [, mib]) => sum + mib, 0);
  const text = `up to ${together} MiB on top of the program itself (see tollgate help operations)`;
  return { what: "memory", state: "ok", text, advice: null, mib: Object.fromEntries(budgets) };
}

function facilitatorChecks(config: FacilitatorConfig, opening: Opening): Check[] {
  const nodes = queryNodes(config.network, config.rpcUrls, createOutbound({ rules: null, extraCa: null }));
  const msMax = SECOND_CHECK_MS_MAX;
  return [
    ...databaseChecks("facilitator", config, opening),
    { what: "TLS files", run: async () => tlsFindings(config.tls) },
    { what: "RPC endpoints", msMax, run: () => nodesFindings(nodes) },
    { what: "chain clock", msMax, run: () => chainClockFindings(nodes) },
    { what: "wallets", msMax, run: () => walletFindings(config, nodes) },
  ];
}

/** Judges the expiry of the certificates of the mutual-TLS port. The configuration has checked that files and key match. */
function tlsFindings({ cert, clientCa }: FacilitatorConfig["tls"]): Finding[] {
  const check = (what: string, pem: string, advice: string) =>
    findings(what, certificateProblems("a certificate", pem, advice), "good for 14 days and more");
  return [
    ...check("server certificate", cert, "renew it in TOLLGATE_TLS_CERT_FILE; no restart is needed"),
    ...check("client CA", clientCa, "add the next one to TOLLGATE_CLIENT_CA_FILE in time"),
  ];
}
