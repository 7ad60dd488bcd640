// The HTTP routes of the policy, and their bodies other than the policy document itself (document.ts).
import { type Static, Type } from "@sinclair/typebox";
import { idTime } from "../../core/id.ts";
import { PROTOCOLS } from "../../core/states.ts";
import { checkText } from "../../core/text.ts";
import { formatDateTime } from "../../core/time.ts";
import { routes } from "../../http/elysia.ts";
import { LIMIT_FIELD, LIMIT_QUERY, limitOf, nullable, queryOf, shape, timestamp, withBody } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";
import { json, piecesOf, SMALL_CHARACTERS } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { MAX, PAGE_LIMIT_DEFAULT } from "../../kernel/limits.ts";
import type { DecisionRow } from "./decisions.ts";
import { actionField, countField, ENTRY, Policy, PolicyReplace } from "./document.ts";
import type { KnownPolicy, PolicyService } from "./service.ts";

const PolicyEvaluate = shape("PolicyEvaluate", {
  agent_id: Type.String({ description: "The agent that would be called." }),
  mcp_tool: Type.Optional(
    nullable(
      Type.String({
        description: "The tool of a `tools/call`, of an mcp agent.",
        "x-bounds": { minLength: 1, maxLength: MAX.policyEntryCharacters },
      }),
      "a tool's name",
    ),
  ),
  body_bytes: countField(0, "Size of the request body; 0 when left out."),
  rate_per_min: countField(0, "The caller's calls in the last 60 seconds, this one included; 1 if left out."),
  document: Type.Optional(PolicyReplace),
});

const verdict = {
  action: actionField("What happens to the call."),
  matched_rule: Type.Union([Type.Integer({ minimum: 1 }), Type.Null()], {
    description: "Position of the rule that decided, from 1; null when `default` or `on_error` did.",
  }),
  reason: Type.String({ description: "The rule, or the setting, that decided." }),
};

const PolicyVerdict = shape("PolicyVerdict", verdict);

const PolicyVersion = shape("PolicyVersion", {
  version: Type.Integer({ minimum: 1, description: "The version that is in force now." }),
  updated_at: timestamp("When it was replaced."),
});

const PolicyDecision = shape("PolicyDecision", {
  id: Type.String({ description: "`pdec_<uuidv7>`" }),
  agent_id: Type.String({ description: "The agent that was called." }),
  protocol: Type.Union(
    PROTOCOLS.map((protocol) => Type.Literal(protocol)),
    { description: "The agent's protocol." },
  ),
  mcp_tool: Type.Union([Type.String(), Type.Null()], { description: "The tool of a `tools/call`." }),
  ...verdict,
  created_at: timestamp("When it was decided."),
});

const PolicyDecisions = shape("PolicyDecisions", {
  data: Type.Array(PolicyDecision, { description: "The newest decisions." }),
  ...LIMIT_FIELD,
});

function decisionView(row: DecisionRow): Static<typeof PolicyDecision> {
  const { id, agent_id, protocol, mcp_tool, action, matched_rule, reason } = row;
  const created_at = formatDateTime(idTime(id));
  return { id, agent_id, protocol, mcp_tool, action, matched_rule, reason, created_at };
}

const AGENT_ID = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
const WARNING = { action: "warn", match: { max_body_bytes: 1_048_576 } };
const DOCUMENT = {
  default: "allow",
  on_error: "deny",
  rules: [
    { action: "deny", match: { tools: ["delete_*", "drop_table"] } },
    { action: "allow", match: { agents: [AGENT_ID], tools: ["read_*"] } },
    WARNING,
    { action: "deny", match: { rate_per_min: 600 } },
  ],
};
const VERSION = { version: 3, updated_at: "2026-11-21T10:00:00.000Z" };
const VERDICT = { action: "deny", matched_rule: 1, reason: "rule 1: deny" };
const DECISION = {
  id: "pdec_019aa4d9-1f00-7c3e-8a51-6f2d3c4b5a69",
  agent_id: AGENT_ID,
  protocol: "mcp",
  mcp_tool: "delete_file",
  ...VERDICT,
  created_at: "2026-11-21T10:07:12.000Z",
};

const get = operation({
  tag: "Policy",
  summary: "Get the policy",
  description: "A tenant without a policy has version 0 and no rules, and its calls are not judged.",
  response: { description: "The document.", schema: Policy, example: { ...DOCUMENT, ...VERSION } },
  errors: [],
});

const put = operation({
  tag: "Policy",
  summary: "Replace the policy",
  description:
    "Takes the whole document; `rules` may be empty. Rules are tried in order: the first that matches decides, else `default`. `deny` refuses the call, `warn` lets it pass with a header that gives the reason.",
  // Denies nothing, since the page at /swagger offers it to a tenant without a policy.
  body: { schema: PolicyReplace, example: { default: "allow", on_error: "allow", rules: [WARNING] } },
  response: { description: "It is in force.", schema: PolicyVersion, example: VERSION },
  errors: ["forbidden", "invalid_request", "payload_too_large"],
});

const decisions = operation({
  tag: "Policy",
  summary: "List policy decisions",
  description: "Newest first: one for every call that the policy judged, whatever the action.",
  query: LIMIT_QUERY,
  response: {
    description: "The newest decisions.",
    schema: PolicyDecisions,
    example: { data: [DECISION], limit: PAGE_LIMIT_DEFAULT },
  },
  errors: ["invalid_request"],
});

const evaluate = operation({
  tag: "Policy",
  summary: "Evaluate the policy",
  description:
    "How the policy would judge a call, or how `document` would if it were the policy. Nothing is counted or recorded.",
  body: {
    schema: PolicyEvaluate,
    examples: {
      stored: { agent_id: AGENT_ID, mcp_tool: "delete_file", body_bytes: 240, rate_per_min: 12 },
      document: { agent_id: AGENT_ID, mcp_tool: "delete_file", document: DOCUMENT },
    },
  },
  response: { description: "The verdict.", schema: PolicyVerdict, example: VERDICT },
  errors: ["invalid_request", "not_found", "payload_too_large"],
});

const withReplace = withBody(PolicyReplace, { resource: Policy });
const withEvaluate = withBody(PolicyEvaluate);

const NO_POLICY = JSON.stringify({ version: 0, rules: [] });

/** Yields the answer in pieces: the rules may be long, and all answers share one text of them, so it is never copied. */
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
        const { caller, responses } = scopeOf(request);
        return responses.respond({ tenant: caller.tenant, request }, async () => {
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
        const { caller, responses } = scopeOf(request);
        const limit = limitOf(queryOf(request, decisions));
        return responses.respondJson({ tenant: caller.tenant, request }, async () => {
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
          if (mcp_tool !== null) checkText("mcp_tool", mcp_tool, ENTRY);
          const { agent_id, body_bytes = 0, rate_per_min: rate = 1, document = null } = body;
          return service.dryRun(caller, { agent_id, mcp_tool, body_bytes, rate, document });
        });
        return json("ok", verdict);
      },
      { parse: "none", detail: evaluate },
    );
}
