// What the contracts of paid calls share: the price of an agent and a payment of it, the facilitator a tenant has its
// payments collected by, what an answer tells of a settlement, and waiting for what comes of one.
import { afterAll, expect } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { newPayer, type PaymentOptions, signPayment } from "../support/chain/payments.ts";
import { TEST_CA } from "../support/http/certificates.ts";
import type { Answer, Json, Tenant } from "./contract.ts";

export const PAY_TO = "0x52908400098527886E0F7030069857D2E4169EE7";
export const PRICING = { amount: "1000", asset: "USDC", network: "base", pay_to: PAY_TO };

/** A payment of that price by a payer of its own. */
export const pay = (options: Partial<PaymentOptions> = {}) =>
  signPayment(newPayer(), { to: PAY_TO, value: 1000n, ...options });

/** The path of a file with the CA of the stand-ins, which is gone after the tests of the file that calls this. */
export function writeCaFile(): string {
  const directory = mkdtempSync(join(tmpdir(), "tollgate-priced-"));
  afterAll(() => rmSync(directory, { recursive: true }));
  const path = join(directory, "ca.pem");
  writeFileSync(path, TEST_CA);
  return path;
}

/** Has the tenant's payments collected there from now on, and gives the ID of the credential for it. */
export async function settleBy(tenant: Tenant, url: string, credential: object = {}): Promise<string> {
  const { id: facilitator_credential_ref } = await tenant.credential(credential);
  const json = { facilitator_url: url, facilitator_credential_ref };
  expect((await tenant.send("PATCH", "/v1/settlement/config", { json })).status).toBe(200);
  return facilitator_credential_ref;
}

/** What an answer tells of the settlement. */
export const settlementTold = (answer: Answer, name = "x-payment-response"): Json =>
  JSON.parse(Buffer.from(answer.headers.get(name) ?? "", "base64").toString());

/** Looks until it is as it should be; the test's own time limit ends it. */
export async function eventually(look: () => Promise<Json>, fits: (view: Json) => boolean): Promise<Json> {
  for (;;) {
    const view = await look();
    if (fits(view)) return view;
    await Bun.sleep(50);
  }
}
