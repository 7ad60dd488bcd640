// Gateways that share a Postgres database, and a tenant of theirs whose payments a stand-in for a facilitator collects.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { type FacilitatorStandIn, startFacilitatorStandIn } from "../chain/facilitator-stand-in.ts";
import { openPayingTenant, type PayingTenant } from "../chain/paying.ts";
import { TEST_CA } from "../http/certificates.ts";
import { newMasterKey } from "../keys.ts";
import { startPostgres } from "../stores/postgres.ts";
import { type Gateway, type GatewayOptions, startGateway } from "./gateway.ts";
import { temporaryRoot } from "./process.ts";

export interface Replicas extends AsyncDisposable {
  readonly databaseUrl: string;
  readonly facilitator: FacilitatorStandIn;
  /** One more gateway on the database. */
  start(options?: Pick<GatewayOptions, "env" | "port" | "program">): Promise<Gateway>;
  tenant(gateway: Gateway): Promise<PayingTenant>;
}

/** @param at an empty database; a new one of Postgres 18 unless it is given */
export async function openReplicas(at?: string): Promise<Replicas> {
  await using stack = new AsyncDisposableStack();
  const databaseUrl = at ?? (await (await startPostgres()).freshDatabase());
  const facilitator = startFacilitatorStandIn();
  stack.defer(() => facilitator.stop());
  const caFile = join(temporaryRoot(), "stand-in-ca.pem");
  writeFileSync(caFile, TEST_CA);
  const shared = {
    DATABASE_URL: databaseUrl,
    TOLLGATE_MASTER_KEY: newMasterKey(),
    TOLLGATE_CA_FILE: caFile,
    TOLLGATE_SETTLE_WAIT_MS: "2000",
  };
  const owned = stack.move();
  return {
    databaseUrl,
    facilitator,
    start: async ({ env, ...program } = {}) =>
      owned.use(await startGateway({ env: { ...shared, ...env }, ...program })),
    tenant: (gateway) => openPayingTenant(gateway, { url: facilitator.url, client: { bundle: "of-nobody" } }),
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}
