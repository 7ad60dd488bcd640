// The HTTP side of policy: reads requests, calls the service, shows the document and the decisions.
import { POLICY_ENTRY_CHARACTERS_MAX } from "../../core/limits.ts";
import { checkText } from "../../core/text.ts";
import { formatDateTime } from "../../core/time.ts";
import { routes } from "../../http/elysia.ts";
import { bodyUser, limitOf, queryOf } from "../../http/input.ts";
import { json, piecesOf, respondJson, respondLarge, SMALL_CHARACTERS } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import type { KnownPolicy } from "./cache.ts";
import { PolicyReplace } from "./document.ts";
import { decisionView, PolicyEvaluate } from "./model.ts";
import { decisions, evaluate, get, put } from "./openapi.ts";
import type { PolicyService } from "./service.ts";

const withReplace = bodyUser(PolicyReplace);
const withEvaluate = bodyUser(PolicyEvaluate);

const NO_POLICY = JSON.stringify({ version: 0, rules: [] });

/** The rules may be long, and all answers share one text of them. So they are not copied into a larger text. */
function* policyPieces({ version, default: action, on_error, rules, ...policy }: KnownPolicy) {
  const updated_at = formatDateTime(policy.updated_at);
  const fields = JSON.stringify({ version, default: action, on_error, updated_at });
  yield `${fields.slice(0, -1)},"rules":`;
  yield* piecesOf(rules);
  yield "}";
}

export function policyRoutes(service: PolicyService) {
  return routes()
    .get(
      "/v1/policy",
      async ({ request }) => {
        const { caller } = scopeOf(request);
        return respondLarge({ tenant: caller.tenant, request }, async () => {
          const policy = await service.get(caller);
          if (policy === null) return NO_POLICY;
          const pieces = policyPieces(policy);
          const weight = policy.rules.length;
          return weight <= SMALL_CHARACTERS ? [...pieces].join("") : { weight, pieces };
        });
      },
      { detail: get },
    )
    .put(
      "/v1/policy",
      async ({ request }) => {
        const { caller } = scopeOf(request);
        const { version, updated_at } = await withReplace(request, (document) => service.put(caller, document));
        return json("ok", { version, updated_at: formatDateTime(updated_at) });
      },
      { parse: "none", detail: put },
    )
    .get(
      "/v1/policy/decisions",
      async ({ request }) => {
        const { caller } = scopeOf(request);
        const limit = limitOf(queryOf(request));
        return respondJson({ tenant: caller.tenant, request }, async () => {
          const rows = await service.newest(caller, limit);
          return { data: rows.map(decisionView), limit };
        });
      },
      { detail: decisions },
    )
    .post(
      "/v1/policy/evaluate",
      async ({ request }) => {
        const { caller } = scopeOf(request);
        const verdict = await withEvaluate(request, ({ mcp_tool = null, ...body }) => {
          if (mcp_tool !== null) {
            checkText("mcp_tool", mcp_tool, { min: 1, max: POLICY_ENTRY_CHARACTERS_MAX, controls: true });
          }
          const { agent_id, body_bytes = 0, rate_per_min: rate = 1, document = null } = body;
          return service.dryRun(caller, { agent_id, mcp_tool, body_bytes, rate, document });
        });
        return json("ok", verdict);
      },
      { parse: "none", detail: evaluate },
    );
}
