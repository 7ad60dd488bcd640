// The two services of the demo, each set up as an operator sets it up: by the variables, the commands of the private CA
// and of the accounts, in directories of its own.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Hex } from "viem";
import { FACILITATOR_PORT, GATEWAY_PORT } from "../../config/rules.ts";
import { FACILITATOR } from "../../config/variables.ts";
import { type Config, loadConfig } from "../../config.ts";
import type { Log } from "../../core/log.ts";
import { silentMeters } from "../../core/meters.ts";
import { type RunningFacilitator, startFacilitator } from "../../facilitator/start.ts";
import { startGateway } from "../../gateway/start.ts";
import { runAccount } from "../account.ts";
import { openMasterKeys } from "../open.ts";
import { runPki } from "../pki.ts";
import { mintToken } from "../token.ts";
import { DemoProblem } from "./problem.ts";

const HOST = "127.0.0.1";
/** The facilitator's account, and the name in the certificate of its client. */
const CLIENT = "gateway";
/** No work of the demo takes longer, and nobody waits for it after Ctrl-C. */
const DRAIN_MS = 1000;
const TOKEN_HOURS = 12;

export type Certificates = Awaited<ReturnType<typeof makeCertificates>>;

/** @returns paths of PEM files, but for the bundle */
export async function makeCertificates(dir: string) {
  await runPki({ dir, wanted: { kind: "ca" } });
  await runPki({ dir, wanted: { kind: "server", hosts: [HOST, "localhost"] } });
  await runPki({ dir, wanted: { kind: "client", name: CLIENT } });
  return {
    server: join(dir, "server.crt"),
    serverKey: join(dir, "server.key"),
    ca: join(dir, "ca.crt"),
    client: join(dir, `${CLIENT}.crt`),
    /** PEM: the gateway's client certificate and key, and the CA of the facilitator. */
    bundle: readFileSync(join(dir, `${CLIENT}.pem`), "utf8"),
  };
}

export interface FacilitatorNeeds {
  readonly dir: string;
  readonly certificates: Certificates;
  readonly rpcUrl: string;
  /** Pays the gas. */
  readonly signerKey: Hex;
}

export async function startDemoFacilitator(needs: FacilitatorNeeds, log: Log): Promise<RunningFacilitator> {
  const { dir, certificates, rpcUrl, signerKey } = needs;
  const config = configured("facilitator", {
    TOLLGATE_DATA_DIR: dir,
    TOLLGATE_PORT: portNear(FACILITATOR_PORT),
    TOLLGATE_OPEN_PORT: portNear(FACILITATOR.TOLLGATE_OPEN_PORT.fallback),
    TOLLGATE_TLS_CERT_FILE: certificates.server,
    TOLLGATE_TLS_KEY_FILE: certificates.serverKey,
    TOLLGATE_CLIENT_CA_FILE: certificates.ca,
    TOLLGATE_RPC_URLS: rpcUrl,
    TOLLGATE_SIGNER_KEY: signerKey,
  });
  if (config.facilitator === null) throw new DemoProblem("the facilitator is not configured");
  const certificate = readFileSync(certificates.client, "utf8");
  const account = { name: CLIENT, certificate, maxPerTransaction: null, dailyCeiling: null };
  await runAccount(config, { command: "account add", account }, log);
  return startFacilitator(config.facilitator, log, silentMeters);
}

export async function startDemoGateway(dir: string, log: Log) {
  const config = configured("gateway", {
    TOLLGATE_DATA_DIR: dir,
    TOLLGATE_PORT: portNear(GATEWAY_PORT),
    // The sample agents and the facilitator are on this machine, which the host rules would refuse.
    TOLLGATE_ALLOW_HOSTS: HOST,
  });
  const { keys } = openMasterKeys(config, log);
  const { url, stop } = await startGateway(config, keys, log, silentMeters);
  return {
    url,
    stop,
    mintToken(tenant: string, user: string) {
      const ttlSeconds = TOKEN_HOURS * 3600;
      return mintToken(config, { tenant, user, scope: "invocations:read_body", ttlSeconds }, log);
    },
  };
}

/** Ignores the environment of the demo's own process. */
function configured(mode: "gateway" | "facilitator", variables: Readonly<Record<string, string>>): Config {
  const all = { TOLLGATE_MODE: mode, TOLLGATE_HOST: HOST, TOLLGATE_DRAIN_MS: String(DRAIN_MS), ...variables };
  const { config, problems } = loadConfig("serve", new Map(), all, false);
  if (config === null) throw new DemoProblem(problems.join("; "));
  return config;
}

/** The usual port, or a free one if it is taken. */
function portNear(usual: number): string {
  try {
    // Without reusePort, since a shared port could be opened even though it is taken.
    const trial = Bun.serve({ hostname: HOST, port: usual, reusePort: false, fetch: () => Response.error() });
    void trial.stop(true);
    return String(usual);
  } catch {
    return "0";
  }
}
