// The HTTP side of receipts: one by its invocation, and a tenant's in the order of their chain.

import { routes } from "../../http/elysia.ts";
import { page, queryOf } from "../../http/input.ts";
import { json, respondLarge } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { find, JSON_LINES, list } from "./openapi.ts";
import type { Receipts } from "./service.ts";

export function receiptRoutes(receipts: Pick<Receipts, "find" | "page">) {
  return routes()
    .get(
      "/v1/invocations/:id/receipt",
      async ({ request, params }) => json("ok", { receipt: await receipts.find(scopeOf(request).caller, params.id) }),
      { detail: find },
    )
    .get(
      "/v1/receipts",
      async ({ request }) => {
        const { caller } = scopeOf(request);
        const place = page(queryOf(request));
        return respondLarge({ tenant: caller.tenant, request, type: JSON_LINES }, async () => {
          const lines = await receipts.page(caller, place);
          return lines.map((line) => `${line}\n`).join("");
        });
      },
      { detail: list },
    );
}
