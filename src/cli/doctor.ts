// `tollgate doctor`: tries what the configuration names, as the service would use it, and changes nothing. What each check
// looks at stands in doctor/; what is good and what is not, in doctor/rules and doctor/node-rules.

import { unknownVariables } from "../config/raw.ts";
import { type Config, type FacilitatorConfig, processEnvironment, VARIABLES } from "../config.ts";
import { createOutbound } from "../http/outbound.ts";
import { fitOf } from "../storage/schema-fit.ts";
import { chainClockFindings, lookAtNodes, nodesFindings, signerFindings, walletFindings } from "./doctor/chain.ts";
import { collectorFindings } from "./doctor/collector.ts";
import {
  announcementFindings,
  databaseChecks,
  keyFindings,
  notLookedAt,
  type Opening,
  openDatabase,
  orNull,
  usableMasterKeys,
} from "./doctor/database.ts";
import { FACILITATORS_MS_MAX, facilitatorFindings } from "./doctor/facilitators.ts";
import { type Check, type Finding, findings, isHealthy, report, runChecks, warning } from "./doctor/findings.ts";
import { issuerFindings, secretsDirFindings, vaultFindings } from "./doctor/servers.ts";
import { tlsFindings } from "./doctor/tls.ts";

interface Examination {
  readonly isHealthy: boolean;
  /** For standard output. */
  readonly text: string;
}

export async function examine(config: Config): Promise<Examination> {
  const { facilitator } = config;
  const opening = openDatabase(config);
  try {
    const service = facilitator === null ? gatewayChecks(config, opening) : facilitatorChecks(facilitator, opening);
    const first: Check = { what: "configuration", look: async () => configurationFindings(config) };
    const found = await runChecks([first, ...service, ...collectorChecks(facilitator ?? config)]);
    return { isHealthy: isHealthy(found), text: report(found) };
  } finally {
    await orNull(opening).then((database) => database?.close());
  }
}

/** That it is good has been told before: the command does not get here with another one. */
function configurationFindings({ mode }: Config): Finding[] {
  const unknown = unknownVariables(processEnvironment, VARIABLES).map((text) => warning(text, "unset or correct it"));
  return findings("configuration", unknown, `good for the ${mode}`);
}

function collectorChecks({ tracing }: Pick<Config, "tracing">): Check[] {
  return tracing === null ? [] : [{ what: "trace collector", look: () => collectorFindings(tracing) }];
}

function gatewayChecks(config: Config, opening: Opening): Check[] {
  const { identity, secretsDir, vault, listenUrl, extraCa } = config;
  const trusted = createOutbound({ rules: null, extraCa });
  const facilitators: Check = {
    what: "facilitators",
    after: opening,
    msMax: FACILITATORS_MS_MAX,
    async look() {
      const database = await opening.catch(() => undefined);
      if (database === undefined) return notLookedAt("facilitators", "the database");
      const fit = database === null ? "none" : fitOf(database.schema);
      if (database === null || fit === "none") return findings("facilitators", [], "no tenant has one yet");
      if (fit !== "same" && fit !== "newer") return notLookedAt("facilitators", "a schema that fits this program");
      const masterKeys = usableMasterKeys(config);
      if (masterKeys === null) return notLookedAt("facilitators", "the master key");
      return facilitatorFindings({ config, database, masterKeys, trusted });
    },
  };
  return [
    ...databaseChecks(config, opening),
    ...(listenUrl === null ? [] : [{ what: "announcements", look: () => announcementFindings(listenUrl) }]),
    {
      what: "keys",
      after: opening,
      look: async () => {
        const database = await opening.catch(() => undefined);
        return database === undefined ? notLookedAt("keys", "the database") : keyFindings(config, database);
      },
      advice: "restore the master key from where it is kept: without it no secret opens, and no service starts",
    },
    { what: "issuer", look: () => issuerFindings(identity.oidc, trusted) },
    ...(secretsDir === null ? [] : [{ what: "secrets directory", look: () => secretsDirFindings(secretsDir) }]),
    ...(vault === null ? [] : [{ what: "vault", look: () => vaultFindings(vault, trusted) }]),
    facilitators,
  ];
}

function facilitatorChecks({ tls, rpcUrls, signers, limits, ...place }: FacilitatorConfig, opening: Opening): Check[] {
  const outbound = createOutbound({ rules: null, extraCa: null });
  const nodes = lookAtNodes(rpcUrls, outbound);
  return [
    ...databaseChecks(place, opening),
    { what: "TLS files", look: () => tlsFindings(tls) },
    { what: "RPC endpoints", after: nodes, look: () => nodesFindings(nodes, limits.batch) },
    { what: "chain clock", after: nodes, look: () => chainClockFindings(nodes) },
    { what: "wallets", after: nodes, look: () => walletFindings(signers, limits.gasLowWaterWei, nodes) },
    ...(signers.kind === "local" ? [] : [{ what: "remote signer", look: () => signerFindings(signers, outbound) }]),
  ];
}
