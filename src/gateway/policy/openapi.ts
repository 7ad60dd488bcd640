// How the operations on the policy are documented.
import { PAGE_LIMIT_DEFAULT } from "../../core/limits.ts";
import { LIMIT_QUERY } from "../../http/input.ts";
import { operation } from "../../http/openapi.ts";
import { Policy, PolicyReplace } from "./document.ts";
import { PolicyDecisions, PolicyEvaluate, PolicyVerdict, PolicyVersion } from "./model.ts";

const AGENT_ID = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
const DOCUMENT = {
  default: "allow",
  on_error: "deny",
  rules: [
    { action: "deny", match: { tools: ["delete_*", "drop_table"] } },
    { action: "allow", match: { agents: [AGENT_ID], tools: ["read_*"] } },
    { action: "warn", match: { max_body_bytes: 1_048_576 } },
    { action: "deny", match: { rate_per_min: 600 } },
  ],
};
const VERSION = { version: 3, updated_at: "2026-11-21T10:00:00.000Z" };
const VERDICT = { action: "deny", matched_rule: 1, reason: "rule 1: deny" };

export const get = operation({
  tag: "Policy",
  summary: "Read the policy",
  description: "A tenant without a policy has version 0 and no rules, and its calls are not judged.",
  responses: [{ status: "ok", description: "The document.", schema: Policy, example: { ...DOCUMENT, ...VERSION } }],
  errors: [],
});

export const put = operation({
  tag: "Policy",
  summary: "Replace the policy",
  description:
    "The whole document, also with no rules. Rules are tried in order, the first that matches decides, else `default`. `deny` refuses the call, `warn` lets it pass with a header that says why.",
  body: { schema: PolicyReplace, example: DOCUMENT },
  responses: [{ status: "ok", description: "It is in force.", schema: PolicyVersion, example: VERSION }],
  errors: ["forbidden", "invalid_request", "payload_too_large"],
});

export const decisions = operation({
  tag: "Policy",
  summary: "List policy decisions",
  description: "Newest first: one for every call that the policy judged, whatever it said.",
  query: LIMIT_QUERY,
  responses: [
    {
      status: "ok",
      description: "The newest decisions.",
      schema: PolicyDecisions,
      example: {
        data: [
          {
            id: "pdec_019aa4d9-1f00-7c3e-8a51-6f2d3c4b5a69",
            agent_id: AGENT_ID,
            protocol: "mcp",
            mcp_tool: "delete_file",
            ...VERDICT,
            created_at: "2026-11-21T10:07:12.000Z",
          },
        ],
        limit: PAGE_LIMIT_DEFAULT,
      },
    },
  ],
  errors: ["invalid_request"],
});

export const evaluate = operation({
  tag: "Policy",
  summary: "Try the policy",
  description:
    "What the policy would say of a call, or what `document` would say if it were the policy. Nothing is counted or recorded.",
  body: {
    schema: PolicyEvaluate,
    examples: {
      stored: { agent_id: "agt_…", mcp_tool: "delete_file", body_bytes: 240, rate_per_min: 12 },
      document: { agent_id: "agt_…", mcp_tool: "delete_file", document: DOCUMENT },
    },
  },
  responses: [{ status: "ok", description: "The verdict.", schema: PolicyVerdict, example: VERDICT }],
  errors: ["invalid_request", "not_found", "payload_too_large"],
});
