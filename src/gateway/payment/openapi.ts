// How the settlement configuration is documented.
import { operation } from "../../http/openapi.ts";
import { SettlementConfig, SettlementConfigPatch } from "./model.ts";

const EXAMPLE = {
  facilitator_url: "https://facilitator.example.com:8443",
  facilitator_credential_ref: "cred_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
  created_at: "2026-11-21T10:00:00.000Z",
  updated_at: "2026-11-21T10:00:00.000Z",
};

const config = {
  status: "ok",
  description: "The configuration.",
  schema: SettlementConfig,
  example: EXAMPLE,
} as const;

export const get = operation({
  tag: "Settlement",
  summary: "Read the settlement configuration",
  responses: [config],
  errors: ["not_found"],
});

export const patch = operation({
  tag: "Settlement",
  summary: "Configure settlement",
  description:
    "From now on payments of the tenant's calls are collected through this facilitator before the call is made. " +
    "Payments that are open already stay with the facilitator that they were sent to.",
  body: {
    schema: SettlementConfigPatch,
    example: {
      facilitator_url: EXAMPLE.facilitator_url,
      facilitator_credential_ref: EXAMPLE.facilitator_credential_ref,
    },
  },
  responses: [config],
  errors: ["forbidden", "invalid_request", "payload_too_large"],
});
