// A tenant's settlement configuration, from its routes to the database: the facilitator that collects, and its credential.
import { type Static, Type } from "@sinclair/typebox";
import { and, eq, gt, isNotNull, isNull, sql } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Caller } from "../../core/call.ts";
import { Fault, invalidField } from "../../core/fault.ts";
import { type HostRules, writtenUrlProblem } from "../../core/host.ts";
import { checkText } from "../../core/text.ts";
import { type Clock, formatDateTime } from "../../core/time.ts";
import { routes } from "../../http/elysia.ts";
import { bodyReader, optional, shape, timestamp } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";
import { json } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { MAX } from "../../kernel/limits.ts";
import { GIVEN_KEY, preparedRow, type Reader, type Store } from "../../storage/store.ts";
import { type CredentialUses, holdCredential, mayGoTo, NOT_ALLOWED } from "../credentials/service.ts";
import { facilitatorOf } from "./store.ts";

const byTenant = preparedRow(({ db, tables: { settlementConfigs: t } }) =>
  db.select().from(t).where(eq(t.tenant, GIVEN_KEY.tenant)),
);

export const findSettlementConfig = (reader: Reader, tenant: string) => byTenant(reader, { tenant });

export const configOfCredential: CredentialUses = async (reader, { tenant, credentialId }, after) => {
  const config = await findSettlementConfig(reader, tenant);
  if (config?.facilitator_credential_ref !== credentialId || after !== "") return [];
  return [{ id: tenant, url: config.facilitator_url, name: "the settlement configuration" }];
};

const nextFacilitator = preparedRow(({ db, tables: { payments: t } }) => {
  const usesIt = and(eq(t.tenant, GIVEN_KEY.tenant), eq(t.facilitator_credential_ref, sql.placeholder("ref")));
  // A collected payment becomes final without the credential. `settle_request` tells that a payment is open: if the condition
  // were on `next_attempt_at`, Postgres would rate the index of due payments as equally good.
  const isUnsettled = and(isNotNull(t.settle_request), isNull(t.final_at));
  const facilitator = facilitatorOf(t);
  return db
    .select({ id: facilitator, url: t.facilitator_url })
    .from(t)
    .where(and(usesIt, isUnsettled, gt(facilitator, sql.placeholder("after"))))
    .orderBy(facilitator)
    .limit(1);
});

/** The facilitators of a credential's open payments, each found by its own look-up: thousands of payments may go to one. */
export const settlementsOfCredential: CredentialUses = async (reader, { tenant, credentialId: ref }, after, limit) => {
  const found: { readonly id: string; readonly url: string | null }[] = [];
  while (found.length < limit) {
    const next = await nextFacilitator(reader, { tenant, ref, after: found.at(-1)?.id ?? after });
    if (next === null) break;
    found.push(next);
  }
  return found.map((each) => ({ ...each, name: "a payment that is being settled" }));
};

export interface SettlementConfigDeps {
  readonly store: Store;
  readonly clock: Clock;
  readonly rules: HostRules;
}

/** @throws Fault `invalid_request`, naming the field */
export function patchSettlementConfig(deps: SettlementConfigDeps, tenant: string, body: SettlementConfigPatch) {
  const { store, clock, rules } = deps;
  if (body.facilitator_url !== undefined) checkFacilitatorUrl(body.facilitator_url, rules);
  const ref = body.facilitator_credential_ref;
  if (ref === "") throw invalidField("facilitator_credential_ref", "must not be empty");
  return store.write(async (tx) => {
    await tx.lock(`settlement:${tenant}`);
    const current = await findSettlementConfig(tx, tenant);
    if (Object.keys(body).length === 0 && current !== null) return current;
    const next = merged(current, body, tenant, clock.now());
    const held = await holdCredential(tx, tenant, next.facilitator_credential_ref);
    if (held === null) throw invalidField("facilitator_credential_ref", "names no credential of this tenant");
    if (!mayGoTo(held, next.facilitator_url)) {
      const field = body.facilitator_url === undefined ? "facilitator_credential_ref" : "facilitator_url";
      throw invalidField(field, NOT_ALLOWED);
    }
    const { tenant: _tenant, created_at: _created_at, ...changes } = next;
    const { settlementConfigs: t } = tx.tables;
    await tx.db.insert(t).values(next).onConflictDoUpdate({ target: t.tenant, set: changes });
    return next;
  });
}

/** @throws Fault `invalid_request` */
export function checkFacilitatorUrl(text: string, rules: HostRules): void {
  const refuse = (reason: string) => invalidField("facilitator_url", reason);
  if (text === "") throw refuse("must not be empty");
  checkText("facilitator_url", text, { min: 0, max: Number.POSITIVE_INFINITY });
  const problem = writtenUrlProblem(text, rules, "https");
  if (problem !== null) throw refuse(problem);
  if (/[?#]/.test(text)) throw refuse("must have no query and no fragment");
  if (/\/settle\/*$/.test(text)) throw refuse("must be the base URL, without /settle");
}

function merged(current: SettlementConfigRow | null, body: SettlementConfigPatch, tenant: string, now: number) {
  const need = (field: keyof SettlementConfigPatch) => {
    const value = body[field] ?? current?.[field];
    if (value === undefined) throw invalidField(field, "required in the first configuration");
    return value;
  };
  return {
    tenant,
    facilitator_url: need("facilitator_url"),
    facilitator_credential_ref: need("facilitator_credential_ref"),
    created_at: current?.created_at ?? now,
    updated_at: now,
  };
}

export type SettlementConfigRow = Tables["settlementConfigs"]["$inferSelect"];

const fields = {
  facilitator_url: Type.String({
    description: "An https URL without a local or private host; payments are sent to `/settle` below it.",
    "x-bounds": { format: "uri", maxLength: MAX.urlCharacters },
  }),
  facilitator_credential_ref: Type.String({
    description:
      "ID of a credential of the tenant. A PEM bundle (client certificate, private key, optionally the server's CA) is the TLS client identity; anything else is sent by its `auth_type`.",
  }),
};

const SettlementConfigPatch = shape("SettlementConfigPatch", optional(fields), {
  description: "A missing key keeps its value; the first configuration must give both.",
});
type SettlementConfigPatch = Static<typeof SettlementConfigPatch>;

const SettlementConfig = shape("SettlementConfig", {
  ...fields,
  created_at: timestamp("When it was first set."),
  updated_at: timestamp("When it was last changed."),
});

function shownConfig({ tenant: _tenant, created_at, updated_at, ...row }: SettlementConfigRow): Response {
  const times = { created_at: formatDateTime(created_at), updated_at: formatDateTime(updated_at) };
  return json("ok", { ...row, ...times } satisfies Static<typeof SettlementConfig>);
}

const EXAMPLE = {
  facilitator_url: "https://facilitator.example.com:8443",
  facilitator_credential_ref: "cred_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
};
const written = "2026-11-21T10:00:00.000Z";
const example = { ...EXAMPLE, created_at: written, updated_at: written };
const answer = { description: "The configuration.", schema: SettlementConfig, example };

const get = operation({
  tag: "Settlement",
  summary: "Get the settlement configuration",
  response: answer,
  errors: ["not_found"],
});

const patch = operation({
  tag: "Settlement",
  summary: "Update the settlement configuration",
  description:
    "From now on payments of the tenant's calls are collected through this facilitator before the call is made. " +
    "Payments that are open already stay with the facilitator that they were sent to.",
  body: { schema: SettlementConfigPatch, example: EXAMPLE },
  response: answer,
  errors: ["forbidden", "invalid_request", "payload_too_large"],
});

const readPatch = bodyReader(SettlementConfigPatch, { resource: SettlementConfig });

export function settlementRoutes(deps: SettlementConfigDeps) {
  const tenantOf = (request: Request) => scopeOf<Caller>(request).caller.tenant;
  return routes()
    .patch(
      "/v1/settlement/config",
      async ({ request }) =>
        shownConfig(await patchSettlementConfig(deps, tenantOf(request), await readPatch(request))),
      { parse: "none", detail: patch },
    )
    .get(
      "/v1/settlement/config",
      async ({ request }) => {
        const config = await findSettlementConfig(deps.store.read, tenantOf(request));
        if (config === null) throw new Fault("not_found", "no settlement configuration");
        return shownConfig(config);
      },
      { detail: get },
    );
}
