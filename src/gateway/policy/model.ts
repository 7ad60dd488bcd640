// What the API takes and shows of policy beside the document itself: a call to try, verdicts, versions and decisions.
import { type Static, Type } from "@sinclair/typebox";
import { idTime } from "../../core/id.ts";
import { PROTOCOLS } from "../../core/states.ts";
import { formatDateTime } from "../../core/time.ts";
import { nullable } from "../../http/input.ts";
import type { DecisionRow } from "./decisions.ts";
import { Action, PolicyReplace } from "./document.ts";

const count = (least: number, description: string) =>
  Type.Optional(
    Type.Integer({
      minimum: least,
      maximum: Number.MAX_SAFE_INTEGER,
      description,
      "x-expected": `an integer of at least ${least}`,
    }),
  );

export const PolicyEvaluate = Type.Object(
  {
    agent_id: Type.String({ description: "The agent that would be called." }),
    mcp_tool: Type.Optional(
      nullable(Type.String({ description: "The tool of a `tools/call`, of an mcp agent." }), "a tool's name"),
    ),
    body_bytes: count(0, "Size of the request body; 0 when left out."),
    rate_per_min: count(0, "The observed rate, with this call; 1 when left out."),
    document: Type.Optional(PolicyReplace),
  },
  { $id: "PolicyEvaluate", additionalProperties: false },
);

const verdict = {
  action: Action,
  matched_rule: Type.Union([Type.Integer(), Type.Null()], {
    description: "Position of the rule that decided, from 1; null when `default` or `on_error` did.",
  }),
  reason: Type.String(),
};

export const PolicyVerdict = Type.Object(verdict, { $id: "PolicyVerdict", additionalProperties: false });

export const PolicyVersion = Type.Object(
  { version: Type.Integer(), updated_at: Type.String({ format: "date-time" }) },
  { $id: "PolicyVersion", additionalProperties: false },
);

const PolicyDecision = Type.Object(
  {
    id: Type.String({ description: "`pdec_<uuidv7>`" }),
    agent_id: Type.String(),
    protocol: Type.Union(PROTOCOLS.map((protocol) => Type.Literal(protocol))),
    mcp_tool: Type.Union([Type.String(), Type.Null()]),
    ...verdict,
    created_at: Type.String({ format: "date-time" }),
  },
  { $id: "PolicyDecision", additionalProperties: false },
);

export const PolicyDecisions = Type.Object(
  { data: Type.Array(PolicyDecision), limit: Type.Integer() },
  { $id: "PolicyDecisions", additionalProperties: false },
);

export function decisionView(row: DecisionRow): Static<typeof PolicyDecision> {
  const { id, agent_id, protocol, mcp_tool, action, matched_rule, reason } = row;
  const created_at = formatDateTime(idTime(id));
  return { id, agent_id, protocol, mcp_tool, action, matched_rule, reason, created_at };
}
