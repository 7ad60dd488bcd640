// The routes of the history.

import { routes } from "../../http/elysia.ts";
import { queryOf } from "../../http/input.ts";
import { respondJson } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import type { Reader } from "../../storage/store.ts";
import { findInvocation, readHistory } from "./history.ts";
import { listItem } from "./model.ts";
import { list, read } from "./openapi.ts";
import { detailAnswer } from "./views.ts";

export function invocationRoutes(reader: Reader) {
  return routes()
    .get(
      "/v1/invocations",
      async ({ request }) => {
        const { tenant } = scopeOf(request).caller;
        return respondJson({ tenant, request }, async () => {
          const { rows, ...rest } = await readHistory(reader, tenant, queryOf(request), request.signal);
          return { data: rows.map(listItem), ...rest };
        });
      },
      { detail: list },
    )
    .get(
      "/v1/invocations/:id",
      async ({ request, params }) => {
        const { caller } = scopeOf(request);
        const row = await findInvocation(reader, caller.tenant, params.id);
        return detailAnswer(reader, request, row);
      },
      { detail: read },
    );
}
