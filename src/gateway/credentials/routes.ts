// The HTTP side of credentials: reads requests, calls the service, shows metadata.

import { routes } from "../../http/elysia.ts";
import { bodyReader } from "../../http/input.ts";
import { empty, json, jsonList } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { CredentialCreate, CredentialRotate, credentialView } from "./model.ts";
import { create, get, list, remove, rotate } from "./openapi.ts";
import { type CredentialDeps, createCredentialService } from "./service.ts";

const readCreate = bodyReader(CredentialCreate);
const readRotate = bodyReader(CredentialRotate);

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
        const { caller } = scopeOf(request);
        const rows = () => service.list(caller);
        return jsonList({ tenant: caller.tenant, request }, { name: "credentials", rows, view: credentialView });
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
