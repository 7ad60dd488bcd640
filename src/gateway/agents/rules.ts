// What the fields of an agent may hold, alone and together. Pure: what a caller sent becomes what is stored,
// or a Fault that names the field.
import { invalidField } from "../../core/fault.ts";
import { checkWrittenUrl, type HostRules } from "../../core/host.ts";
import {
  DESCRIPTION_CHARACTERS_MAX,
  METADATA_BYTES_MAX,
  NAME_CHARACTERS_MAX,
  TAG_CHARACTERS_MAX,
  TAGS_MAX,
} from "../../core/limits.ts";
import { checkText } from "../../core/text.ts";
import { type AgentCreate, type AgentPatch, type AgentRow, decodePricing, encodeTags, type Pricing } from "./model.ts";

const NAME = { min: 1, max: NAME_CHARACTERS_MAX };
const TAG = { min: 1, max: TAG_CHARACTERS_MAX };
const DESCRIPTION = { min: 0, max: DESCRIPTION_CHARACTERS_MAX, controls: true };

/** Enough for the tools of any known server. The row is read for each call, so it must stay small. */
const TOOLS_MAX = 500;
const TOOL_NAME = { min: 1, max: 128 };
const UINT256_MAX = 2n ** 256n - 1n;
/** It is sent as a header. */
const PROTOCOL_VERSION = /^[\x21-\x7e]{1,64}$/;

/** The columns that a caller sets. */
export type AgentFields = Pick<
  AgentRow,
  | "name"
  | "description"
  | "tags"
  | "metadata"
  | "upstream_url"
  | "credential_ref"
  | "suspended"
  | "invocation_rate_limit"
  | "invocation_burst"
  | "emit_receipts"
  | "capture_body"
  | "protocol"
  | "mcp_transport"
  | "mcp_protocol_version"
  | "pricing"
>;

const DEFAULTS: Omit<AgentFields, "name"> = {
  description: "",
  tags: null,
  metadata: "{}",
  upstream_url: null,
  credential_ref: null,
  suspended: false,
  invocation_rate_limit: null,
  invocation_burst: null,
  emit_receipts: false,
  capture_body: true,
  protocol: "http",
  mcp_transport: null,
  mcp_protocol_version: null,
  pricing: null,
};

/** @throws Fault `invalid_request` */
export function createdFields(body: AgentCreate, rules: HostRules): AgentFields {
  const fields = { ...DEFAULTS, ...givenFields(body, rules), name: checkedName(body.name) };
  checkTogether(fields);
  return fields;
}

/**
 * The columns that a PATCH changes.
 *
 * @throws Fault `invalid_request`, also when the agent that would result is not valid as a whole
 */
export function patchedFields(row: AgentFields, body: AgentPatch, rules: HostRules): Partial<AgentFields> {
  const { name, ...others } = body;
  const fields = { ...givenFields(others, rules), ...(name !== undefined && { name: checkedName(name) }) };
  checkTogether({ ...row, ...fields });
  return fields;
}

function checkedName(given: string): string {
  const name = given.trim();
  checkText("name", name, NAME);
  return name;
}

type Given = Omit<AgentPatch, "name" | "tags"> & Pick<AgentCreate, "tags">;

function givenFields(body: Given, rules: HostRules): Partial<AgentFields> {
  const { tags, metadata, pricing, ...plain } = body;
  if (plain.description !== undefined) checkText("description", plain.description, DESCRIPTION);
  if (plain.upstream_url != null) checkUrl(plain.upstream_url, rules);
  if (plain.mcp_protocol_version != null) checkProtocolVersion(plain.mcp_protocol_version);
  return {
    ...plain,
    ...(tags !== undefined && { tags: tags === null ? null : storedTags(tags) }),
    ...(metadata !== undefined && { metadata: storedMetadata(metadata) }),
    ...(pricing !== undefined && { pricing: pricing === null ? null : storedPricing(pricing) }),
  };
}

function checkUrl(url: string, rules: HostRules): void {
  checkText("upstream_url", url, { min: 0, max: Number.POSITIVE_INFINITY });
  const checked = checkWrittenUrl(url, rules);
  if (!checked.ok) throw invalidField("upstream_url", checked.reason);
}

function checkProtocolVersion(version: string): void {
  if (PROTOCOL_VERSION.test(version)) return;
  throw invalidField("mcp_protocol_version", "must be 1 to 64 visible ASCII characters");
}

function storedTags(tags: readonly string[]): string {
  if (tags.length > TAGS_MAX) throw invalidField("tags", `must be at most ${TAGS_MAX}`);
  for (const [index, tag] of tags.entries()) checkText(`tags.${index}`, tag, TAG);
  return encodeTags(tags);
}

/** Any values: JSON writes U+0000 and lone surrogates as escapes, so they can be stored and come back. */
function storedMetadata(metadata: Record<string, unknown>): string {
  const json = JSON.stringify(metadata);
  if (Buffer.byteLength(json) <= METADATA_BYTES_MAX) return json;
  throw invalidField("metadata", `must be at most ${METADATA_BYTES_MAX} bytes as JSON`);
}

function storedPricing(pricing: Pricing): string {
  checkAmount("pricing.amount", pricing.amount);
  const tools = Object.entries(pricing.tools ?? {});
  if (tools.length > TOOLS_MAX) throw invalidField("pricing.tools", `must be at most ${TOOLS_MAX}`);
  for (const [name, amount] of tools) {
    checkText("pricing.tools", name, TOOL_NAME);
    checkAmount(`pricing.tools.${name}`, amount);
  }
  return JSON.stringify(pricing);
}

function checkAmount(field: string, amount: string): void {
  if (BigInt(amount) > UINT256_MAX) throw invalidField(field, "must fit into 256 bits");
}

function checkTogether(agent: AgentFields): void {
  if (agent.protocol === "mcp") {
    if (agent.mcp_transport === null) throw invalidField("mcp_transport", "required when protocol is mcp");
    return;
  }
  if (agent.mcp_transport !== null) {
    throw invalidField("mcp_transport", "must be absent or null when protocol is http");
  }
  if (decodePricing(agent.pricing)?.tools !== undefined) {
    throw invalidField("pricing.tools", "only possible when protocol is mcp");
  }
}
