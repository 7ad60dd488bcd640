// `tollgate doctor`: tries what the configuration names, as the service would use it, and changes nothing. Here stands what is
// looked at; the checks themselves are in doctor/.
import { type Config, type FacilitatorConfig, processEnvironment, unknownVariables } from "../config.ts";
import { createOutbound } from "../http/client/outbound.ts";
import { LIMITS } from "../kernel/limits.ts";
import { chainClockFindings, lookAtNodes, nodesFindings, walletFindings } from "./doctor/chain.ts";
import { afterOpening, databaseChecks, keyFindings, type Opening, openDatabase } from "./doctor/database.ts";
import {
  type Check,
  certificateProblems,
  type Finding,
  findings,
  isHealthy,
  report,
  runChecks,
  SECOND_CHECK_MS_MAX,
  warning,
} from "./doctor/findings.ts";
import { FACILITATORS_MS_MAX, facilitatorFindings, issuerFindings, vaultFindings } from "./doctor/servers.ts";

/** The report is for standard output; the service would refuse work where the outcome is not healthy. */
export async function examine(config: Config): Promise<{ readonly isHealthy: boolean; readonly text: string }> {
  const { facilitator, mode } = config;
  const opening = openDatabase(config);
  try {
    const service = facilitator === null ? gatewayChecks(config, opening) : facilitatorChecks(facilitator, opening);
    // A bad configuration has ended the command before.
    const unknown = unknownVariables(processEnvironment);
    const problems = unknown.map((text) => warning(text, "unset or correct it"));
    const found = await runChecks(service);
    const all = [...findings("configuration", problems, `good for the ${mode}`), ...found];
    return { isHealthy: isHealthy(all), text: report(all) };
  } finally {
    await opening.then(
      (database) => database?.close(),
      () => {},
    );
  }
}

function gatewayChecks(config: Config, opening: Opening): Check[] {
  const trusted = createOutbound({ rules: null, extraCa: config.extraCa });
  const { vault } = config;
  const keys = {
    what: "keys",
    advice: "restore the master key from where it is kept: without it no secret opens, and no service starts",
  };
  const facilitators = { what: "facilitators", msMax: FACILITATORS_MS_MAX };
  return [
    ...databaseChecks(config, opening),
    afterOpening(keys, opening, (database) => keyFindings(config, database)),
    { what: "memory", look: async () => findings("memory", [], memoryText()) },
    { what: "issuer", look: () => issuerFindings(config.identity.oidc, trusted) },
    ...(vault === null ? [] : [{ what: "vault", look: () => vaultFindings(vault, trusted) }]),
    afterOpening(facilitators, opening, (database) => facilitatorFindings(config, database, trusted)),
  ];
}

/** The budgets of memory, which a busy process may come to together. */
function memoryText(): string {
  const budgets = Object.values(LIMITS.Memory).map(({ what, size }) => ({ what, mib: size / 1024 ** 2 }));
  const together = budgets.reduce((sum, { mib }) => sum + mib, 0);
  return `at most ${together} MiB beside the program: ${budgets.map(({ what, mib }) => `${mib} for ${what}`).join(", ")}`;
}

function facilitatorChecks(config: FacilitatorConfig, opening: Opening): Check[] {
  const nodes = lookAtNodes(config.network, config.rpcUrls, createOutbound({ rules: null, extraCa: null }));
  const msMax = SECOND_CHECK_MS_MAX;
  return [
    ...databaseChecks(config, opening),
    { what: "TLS files", look: async () => tlsFindings(config.tls) },
    { what: "RPC endpoints", msMax, look: () => nodesFindings(nodes) },
    { what: "chain clock", msMax, look: () => chainClockFindings(nodes) },
    { what: "wallets", msMax, look: () => walletFindings(config, nodes) },
  ];
}

/** Of the mutual-TLS port. That the files are PEM and belong together, the configuration has judged. */
function tlsFindings({ cert, clientCa }: FacilitatorConfig["tls"]): Finding[] {
  const look = (what: string, pem: string, advice: string) =>
    findings(what, certificateProblems("a certificate", pem, advice), "good for 14 days and more");
  return [
    ...look("server certificate", cert, "renew it in TOLLGATE_TLS_CERT_FILE, without a restart"),
    ...look("client CA", clientCa, "put the next one beside it in TOLLGATE_CLIENT_CA_FILE in time"),
  ];
}
