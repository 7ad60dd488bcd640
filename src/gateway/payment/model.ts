// The shapes of the settlement configuration on the wire.
import { type Static, Type } from "@sinclair/typebox";
import type { Tables } from "../../../db/schema.ts";
import { formatDateTime } from "../../core/time.ts";

export type SettlementConfigRow = Tables["settlementConfigs"]["$inferSelect"];

const fields = {
  facilitator_url: Type.String({
    description: "An https URL and no local or private host; payments are sent to `/settle` below it.",
  }),
  facilitator_credential_ref: Type.String({
    description:
      "ID of a credential of the tenant. A PEM bundle (client certificate, private key, optionally the server's CA) is the TLS client identity; anything else is sent by its `auth_type`.",
  }),
};

export const SettlementConfigPatch = Type.Partial(Type.Object(fields), {
  $id: "SettlementConfigPatch",
  additionalProperties: false,
  description: "An absent key leaves the value; the first configuration must give both.",
});
export type SettlementConfigPatch = Static<typeof SettlementConfigPatch>;

const dateTime = Type.String({ format: "date-time" });

export const SettlementConfig = Type.Object(
  { ...fields, created_at: dateTime, updated_at: dateTime },
  { $id: "SettlementConfig", additionalProperties: false },
);

export function settlementConfigView(row: SettlementConfigRow): Static<typeof SettlementConfig> {
  return {
    facilitator_url: row.facilitator_url,
    facilitator_credential_ref: row.facilitator_credential_ref,
    created_at: formatDateTime(row.created_at),
    updated_at: formatDateTime(row.updated_at),
  };
}
