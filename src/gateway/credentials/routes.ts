// The HTTP routes of credentials and their documentation.
import { overQuota } from "../../core/fault.ts";
import { routes } from "../../http/elysia.ts";
import { bodyReader, queryOf } from "../../http/input.ts";
import { idParameter, operation } from "../../http/openapi.ts";
import { empty, json } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { Credential, CredentialCreate, CredentialList, CredentialRotate, credentialView } from "./model.ts";
import { type CredentialDeps, createCredentialService } from "./service.ts";

const EXAMPLE = {
  id: "cred_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
  name: "weather key",
  auth_type: "bearer",
  source: "managed",
  masked_hint: "…x7Qp",
  allowed_hosts: ["*.example.com"],
  version: 1,
  created_at: "2026-11-21T10:00:00.000Z",
  updated_at: "2026-11-21T10:00:00.000Z",
};

const credentialId = { id: idParameter("cred", "The credential's ID, `cred_<uuidv7>`.") };
const credential = { schema: Credential, example: EXAMPLE };

const create = operation({
  tag: "Credentials",
  summary: "Create a credential",
  description: "The secret is encrypted before it is stored and is never shown again.",
  body: {
    schema: CredentialCreate,
    examples: {
      managed: {
        name: "weather key",
        auth_type: "bearer",
        source: "managed",
        plaintext: "a-secret-that-ends-in-x7Qp",
        allowed_hosts: ["*.example.com"],
      },
      vault: { name: "search key", auth_type: "api_key", source: "vault", vault_ref: "search/api#key" },
    },
  },
  response: { status: "created", description: "The credential's metadata.", ...credential },
  errors: ["forbidden", "invalid_request", "conflict", "payload_too_large", "over_limit"],
  answers: {
    over_limit: {
      description: "The tenant has reached its limit of credentials.",
      example: overQuota(1_000, "credentials").message,
    },
  },
});

const list = operation({
  tag: "Credentials",
  summary: "List credentials",
  description: "All credentials of the tenant, newest first; metadata only.",
  response: { description: "The credentials.", schema: CredentialList, example: { credentials: [EXAMPLE] } },
  errors: [],
});

const get = operation({
  tag: "Credentials",
  summary: "Get a credential",
  description: "Its metadata: the secret is never shown.",
  path: credentialId,
  response: { description: "The credential's metadata.", ...credential },
  errors: ["not_found"],
});

const rotate = operation({
  tag: "Credentials",
  summary: "Rotate a credential",
  description:
    "Replaces the secret; calls made from now on carry the new one. A list of `allowed_hosts` is refused if it leaves out the " +
    "host of a live agent, of the settlement configuration or of an open payment.",
  path: credentialId,
  body: {
    schema: CredentialRotate,
    examples: { managed: { plaintext: "a-new-secret-that-ends-in-m2Rt" }, vault: { vault_ref: "search/api-2#key" } },
  },
  response: {
    description: "The credential's metadata, with the next version.",
    schema: Credential,
    example: { ...EXAMPLE, masked_hint: "…m2Rt", version: 2 },
  },
  errors: ["forbidden", "invalid_request", "not_found", "conflict", "payload_too_large"],
  answers: {
    conflict: {
      example: 'allowed_hosts: must include the host of the agent "weather" (agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f)',
    },
  },
});

const remove = operation({
  tag: "Credentials",
  summary: "Delete a credential",
  description: "Refused while a live agent, the settlement configuration, an open payment or paid call uses it.",
  path: credentialId,
  response: { status: "empty", description: "The credential is deleted, and its name is free." },
  errors: ["forbidden", "not_found", "conflict"],
  answers: {
    conflict: { example: 'the credential is in use by the agent "weather" (agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f)' },
  },
});

const readCreate = bodyReader(CredentialCreate, { resource: Credential });
const readRotate = bodyReader(CredentialRotate, { resource: Credential });

export function credentialRoutes(deps: CredentialDeps) {
  const service = createCredentialService(deps);
  return routes()
    .post(
      "/v1/credentials",
      async ({ request }) => {
        const body = await readCreate(request);
        return json("created", credentialView(await service.create(scopeOf(request).caller, body)));
      },
      { parse: "none", detail: create },
    )
    .get(
      "/v1/credentials",
      ({ request }) => {
        const { caller, responses } = scopeOf(request);
        queryOf(request, list);
        const rows = () => service.list(caller);
        return responses.jsonList(
          { tenant: caller.tenant, request },
          { name: "credentials", rows, view: credentialView },
        );
      },
      { detail: list },
    )
    .get(
      "/v1/credentials/:id",
      async ({ request, params }) => json("ok", credentialView(await service.get(scopeOf(request).caller, params.id))),
      { detail: get },
    )
    .put(
      "/v1/credentials/:id",
      async ({ request, params }) => {
        const body = await readRotate(request);
        return json("ok", credentialView(await service.rotate(scopeOf(request).caller, params.id, body)));
      },
      { parse: "none", detail: rotate },
    )
    .delete(
      "/v1/credentials/:id",
      async ({ request, params }) => {
        await service.remove(scopeOf(request).caller, params.id);
        return empty();
      },
      { parse: "none", detail: remove },
    );
}
