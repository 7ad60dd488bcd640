// A credential in the API. A secret goes in and never comes out: the view is metadata, and is made without reading the secret.
import { type Static, Type } from "@sinclair/typebox";
import type { Tables } from "../../../db/schema.ts";
import { ALLOWED_HOSTS_MAX } from "../../core/host.ts";
import { formatDateTime } from "../../core/time.ts";
import { nullable, shape, timestamp } from "../../http/input.ts";
import { MAX } from "../../kernel/limits.ts";

export type CredentialRow = Omit<Tables["credentials"]["$inferSelect"], "sealed" | "key_number">;

const AuthType = Type.Union([Type.Literal("bearer"), Type.Literal("api_key"), Type.Literal("none")], {
  description: "`bearer`: `Authorization: Bearer S`; `api_key`: `X-API-Key: S`; `none`: nothing is sent.",
  "x-expected": "bearer, api_key or none",
});
const Source = Type.Union([Type.Literal("managed"), Type.Literal("vault")], {
  description: "`managed`: stored in the gateway, encrypted; `vault`: read from a secrets store.",
  "x-expected": "managed or vault",
});
const HOSTS = `1 to ${ALLOWED_HOSTS_MAX} host names`;
const AllowedHosts = nullable(
  Type.Array(Type.String({ "x-expected": "a host name" }), {
    minItems: 1,
    maxItems: ALLOWED_HOSTS_MAX,
    description: `The only hosts that the secret may go to: ${HOSTS}, \`*.\` before one for the names under it; null for any.`,
    "x-expected": HOSTS,
  }),
  HOSTS,
);
const secretFields = {
  plaintext: Type.Optional(
    Type.String({
      description: `The secret, 1 to ${MAX.plaintextBytes} bytes; required when source is \`managed\`.`,
      "x-bounds": { minLength: 1, maxLength: MAX.plaintextBytes },
      writeOnly: true,
    }),
  ),
  vault_ref: Type.Optional(
    Type.String({
      description: `\`path#key\` below the tenant's own prefix, at most ${MAX.vaultRefCharacters} characters; required when source is \`vault\`.`,
      "x-bounds": { minLength: 1, maxLength: MAX.vaultRefCharacters },
    }),
  ),
};

const CredentialName = Type.String({
  description: `1 to ${MAX.nameCharacters} characters, unique within the tenant.`,
  "x-bounds": { minLength: 1, maxLength: MAX.nameCharacters },
});

export const CredentialCreate = shape("CredentialCreate", {
  name: CredentialName,
  auth_type: AuthType,
  source: Source,
  ...secretFields,
  allowed_hosts: Type.Optional(AllowedHosts),
});
export type CredentialCreate = Static<typeof CredentialCreate>;

export const CredentialRotate = shape(
  "CredentialRotate",
  { ...secretFields, allowed_hosts: Type.Optional(AllowedHosts) },
  {
    description:
      "Set `plaintext` or `vault_ref`, by the credential's source. Without `allowed_hosts` the list stays as it is.",
  },
);
export type CredentialRotate = Static<typeof CredentialRotate>;

export const Credential = shape("Credential", {
  id: Type.String({ description: "`cred_<uuidv7>`" }),
  name: CredentialName,
  auth_type: AuthType,
  source: Source,
  masked_hint: Type.Optional(
    Type.String({ description: "`…` and the last four characters; only when source is `managed`." }),
  ),
  vault_ref: Type.Optional(
    Type.String({ description: "Where the secret is, `path#key`; only when source is `vault`." }),
  ),
  allowed_hosts: AllowedHosts,
  version: Type.Integer({ minimum: 1, description: "Starts at 1 and grows by one with each rotation." }),
  created_at: timestamp("When it was stored."),
  updated_at: timestamp("When it was last rotated."),
});

export const CredentialList = shape("CredentialList", {
  credentials: Type.Array(Credential, { description: "All credentials of the tenant." }),
});

/** Decodes the stored list of allowed hosts; null allows any host. */
export const decodeHosts = (stored: string | null): string[] | null => JSON.parse(stored ?? "null");

export function credentialView(row: CredentialRow): Static<typeof Credential> {
  return {
    id: row.id,
    name: row.name,
    auth_type: row.auth_type,
    source: row.source,
    ...(row.masked_hint !== null && { masked_hint: row.masked_hint }),
    ...(row.vault_ref !== null && { vault_ref: row.vault_ref }),
    allowed_hosts: decodeHosts(row.allowed_hosts),
    version: row.version,
    created_at: formatDateTime(row.created_at),
    updated_at: formatDateTime(row.updated_at),
  };
}
