// The HTTP side of the settlement configuration.

import { routes } from "../../http/elysia.ts";
import { bodyReader } from "../../http/input.ts";
import { json } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { createSettlementConfigService, type SettlementConfigDeps } from "./config.ts";
import { SettlementConfigPatch, settlementConfigView } from "./model.ts";
import { get, patch } from "./openapi.ts";

const readPatch = bodyReader(SettlementConfigPatch);

export function settlementRoutes(deps: SettlementConfigDeps) {
  const service = createSettlementConfigService(deps);
  return routes()
    .get(
      "/v1/settlement/config",
      async ({ request }) => json("ok", settlementConfigView(await service.get(scopeOf(request).caller))),
      { detail: get },
    )
    .patch(
      "/v1/settlement/config",
      async ({ request }) => {
        const body = await readPatch(request);
        return json("ok", settlementConfigView(await service.patch(scopeOf(request).caller, body)));
      },
      { parse: "none", detail: patch },
    );
}
