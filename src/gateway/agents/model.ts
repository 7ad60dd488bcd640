// An agent in the API and in the database. The schemas check the names and types of the fields that a caller sends; the
// functions after them check the values, each alone and all together, and convert between the API's form and the stored one.
// To add a field, follow `capture_body` through this file, routes.ts, store.ts and db/.
import { type Static, Type } from "@sinclair/typebox";
import type { Tables } from "../../../db/schema.ts";
import { invalidField } from "../../core/fault.ts";
import { type HostRules, urlMeant, writtenUrlProblem } from "../../core/host.ts";
import { AGENT_STATUSES, agentStatus } from "../../core/states.ts";
import { checkText } from "../../core/text.ts";
import { formatDateTime } from "../../core/time.ts";
import { nullable, optional, PAGE_FIELDS, shape, timestamp } from "../../http/input.ts";
import { BURST_DEFAULT, MAX } from "../../kernel/limits.ts";
import type { Network } from "../../x402/network.ts";
import { UINT256_DIGITS_MAX, UINT256_MAX } from "../../x402/types.ts";

export type AgentRow = Tables["agents"]["$inferSelect"];

const PROTOCOL_VERSION_CHARACTERS = 64;
/** Visible ASCII, since the version is sent as a header. */
const PROTOCOL_VERSION = new RegExp(`^[\\x21-\\x7e]{1,${PROTOCOL_VERSION_CHARACTERS}}$`);

const amount = (description: string) =>
  Type.String({
    pattern: "^[0-9]+$",
    maxLength: UINT256_DIGITS_MAX,
    description,
    "x-expected": `a string of 1 to ${UINT256_DIGITS_MAX} digits, in the asset's smallest units: 10000 is 0.01 USDC`,
  });

const pricing = ({ name, token }: Network) =>
  shape(
    "Pricing",
    {
      amount: amount("Price of one call in the asset's smallest units; `0` is free."),
      asset: Type.Literal(token.symbol, { description: "The token.", "x-expected": token.symbol }),
      network: Type.Literal(name, { description: "The chain.", "x-expected": name }),
      pay_to: Type.String({
        pattern: "^0x[0-9a-fA-F]{40}$",
        description: "The operator's payout address.",
        "x-expected": "an address of 0x and 40 hexadecimal digits",
      }),
      tools: Type.Optional(
        // Type.Object rather than Type.Record: a record's key pattern lets keys with line breaks pass unchecked.
        Type.Unsafe<Record<string, string>>(
          Type.Object(
            {},
            {
              additionalProperties: amount("Price of one call of this tool."),
              description: "Prices of single MCP tools, by tool name; only with protocol `mcp`.",
              "x-expected": "an object of tool names and prices",
            },
          ),
        ),
      ),
    },
    { description: "A priced agent is behind the x402 payment gate.", "x-expected": "a pricing object" },
  );

export type Pricing = Static<ReturnType<typeof pricing>>;

const Protocol = Type.Union([Type.Literal("http"), Type.Literal("mcp")], {
  description: "What the upstream speaks: any HTTP, or MCP over streamable HTTP.",
  "x-expected": "http or mcp",
});
const Transport = nullable(
  Type.Literal("streamable_http", { description: "Required with protocol `mcp`, and null with `http`." }),
  "streamable_http",
  { "x-expected": "streamable_http for protocol mcp, or null for http" },
);

const Metadata = Type.Unsafe<Record<string, unknown>>(
  Type.Object({}, { description: "Any values; at most 16 KiB as JSON.", "x-expected": "a JSON object" }),
);

/** The fields that create, update and response share, described for create. */
const settable = (network: Network) => ({
  description: Type.String({
    description: `What the agent does: at most ${MAX.descriptionCharacters} characters.`,
    "x-bounds": { maxLength: MAX.descriptionCharacters },
  }),
  metadata: Metadata,
  upstream_url: nullable(
    Type.String({
      description: "An http or https URL; no local or private host.",
      "x-bounds": { format: "uri", maxLength: MAX.urlCharacters },
    }),
    "a URL",
  ),
  credential_ref: nullable(
    Type.String({ description: "ID of the credential that goes into upstream calls." }),
    "a credential ID",
  ),
  emit_receipts: Type.Boolean({ description: "Emit a trust receipt after each ended invocation." }),
  capture_body: Type.Boolean({ description: "Keep request and response bodies, so that they can be read." }),
  protocol: Protocol,
  mcp_transport: Transport,
  mcp_protocol_version: nullable(
    Type.String({
      description: "The version offered to the MCP server; the newest known one when null.",
      "x-bounds": { minLength: 1, maxLength: PROTOCOL_VERSION_CHARACTERS },
    }),
    "a protocol version",
  ),
  pricing: nullable(pricing(network), "a pricing object", { description: "What a call costs; null for a free agent." }),
});

/** The fields that update and response share. */
const changeable = {
  suspended: Type.Boolean({ description: "A suspended agent stays in the catalog and takes no calls." }),
  invocation_rate_limit: nullable(
    Type.Number({
      exclusiveMinimum: 0,
      description: "Calls per second; null for no limit.",
      "x-expected": "a number above 0",
    }),
    "a number above 0",
  ),
  invocation_burst: nullable(
    Type.Integer({
      minimum: 1,
      maximum: Number.MAX_SAFE_INTEGER,
      description: `Calls that may come at once; ${BURST_DEFAULT} when only the rate is set.`,
      "x-expected": "an integer of at least 1",
    }),
    "an integer of at least 1",
  ),
};

const Name = Type.String({
  description: `1 to ${MAX.nameCharacters} characters, unique among the tenant's agents that are not inactive.`,
  "x-bounds": { minLength: 1, maxLength: MAX.nameCharacters },
});
const Tags = Type.Array(Type.String({ "x-bounds": { minLength: 1, maxLength: MAX.tagCharacters } }), {
  description: `At most ${MAX.tags} tags of 1 to ${MAX.tagCharacters} characters.`,
  "x-expected": "an array of strings",
  "x-bounds": { maxItems: MAX.tags },
});

export const agentCreate = (network: Network) =>
  shape("AgentCreate", {
    name: Name,
    ...optional({ tags: nullable(Tags, "an array of strings"), ...settable(network) }),
  });
export type AgentCreate = Static<ReturnType<typeof agentCreate>>;

export const agentPatch = (network: Network) =>
  shape("AgentPatch", optional({ name: Name, tags: Tags, ...settable(network), ...changeable }), {
    description: "An absent key leaves the value, `null` clears it, a value sets it.",
  });
export type AgentPatch = Static<ReturnType<typeof agentPatch>>;

export const agentShape = (network: Network) =>
  shape("Agent", {
    id: Type.String({ description: "`agt_<uuidv7>`" }),
    name: Name,
    tags: nullable(Tags, "an array of strings"),
    status: Type.Union(
      AGENT_STATUSES.map((status) => Type.Literal(status)),
      { description: "Derived: inactive once deleted, else pending without an upstream URL, else active." },
    ),
    created_by: Type.String({ description: "The user who created it." }),
    created_at: timestamp("When it was created."),
    updated_at: timestamp("When it was last changed."),
    ...settable(network),
    ...changeable,
  });

export const agentPage = (network: Network) =>
  shape("AgentPage", {
    data: Type.Array(agentShape(network), { description: "The agents of this page." }),
    ...PAGE_FIELDS,
  });

/** A string that the stored tags contain if and only if `tag` is one of them. */
export const tagNeedle = (tag: string): string => `\t${JSON.stringify(tag)}`;

export const decodeTags = (stored: string | null): string[] | null => JSON.parse(stored ?? "null");

export const decodePricing = (stored: string | null): Pricing | null => JSON.parse(stored ?? "null");

export function agentView(row: AgentRow): Static<ReturnType<typeof agentShape>> {
  return {
    id: row.id,
    name: row.name,
    description: row.description,
    tags: decodeTags(row.tags),
    metadata: JSON.parse(row.metadata) as Record<string, unknown>,
    status: agentStatus(row),
    suspended: row.suspended,
    created_by: row.created_by,
    created_at: formatDateTime(row.created_at),
    updated_at: formatDateTime(row.updated_at),
    upstream_url: row.upstream_url,
    credential_ref: row.credential_ref,
    invocation_rate_limit: row.invocation_rate_limit,
    invocation_burst: row.invocation_burst,
    emit_receipts: row.emit_receipts,
    capture_body: row.capture_body,
    protocol: row.protocol,
    mcp_transport: row.mcp_transport,
    mcp_protocol_version: row.mcp_protocol_version,
    pricing: decodePricing(row.pricing),
  };
}

const DEFAULTS = {
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
} as const satisfies Partial<AgentRow>;

type AgentFields = Pick<AgentRow, "name" | keyof typeof DEFAULTS>;

/** The columns of a new agent. @throws Fault `invalid_request` */
export function createdFields(body: AgentCreate, rules: HostRules): AgentFields {
  const fields: AgentFields = { ...DEFAULTS, ...givenFields(body, rules), name: checkedName(body.name) };
  checkTogether(fields);
  return fields;
}

/** The columns that a PATCH changes. @throws Fault `invalid_request`, also for fields that contradict each other */
export function patchedFields(row: AgentFields, body: AgentPatch, rules: HostRules): Partial<AgentFields> {
  const { name, ...others } = body;
  const fields = { ...givenFields(others, rules), ...(name !== undefined && { name: checkedName(name) }) };
  checkTogether({ ...row, ...fields });
  return fields;
}

function checkedName(given: string): string {
  const name = given.trim();
  checkText("name", name, { min: 1, max: MAX.nameCharacters });
  return name;
}

type GivenFields = Omit<AgentPatch, "name" | "tags"> & Pick<AgentCreate, "tags">;

function givenFields(body: GivenFields, rules: HostRules): Partial<AgentFields> {
  const { tags, metadata, pricing, ...plain } = body;
  if (plain.description !== undefined) {
    checkText("description", plain.description, { min: 0, max: MAX.descriptionCharacters, controls: true });
  }
  if (plain.upstream_url != null) checkUrl(plain.upstream_url, rules);
  if (plain.mcp_protocol_version != null && !PROTOCOL_VERSION.test(plain.mcp_protocol_version)) {
    throw invalidField("mcp_protocol_version", `must be 1 to ${PROTOCOL_VERSION_CHARACTERS} visible ASCII characters`);
  }
  return {
    ...plain,
    ...(tags !== undefined && { tags: tags === null ? null : storedTags(tags) }),
    ...(metadata !== undefined && { metadata: storedMetadata(metadata) }),
    ...(pricing !== undefined && { pricing: pricing === null ? null : storedPricing(pricing) }),
  };
}

function checkUrl(url: string, rules: HostRules): void {
  checkText("upstream_url", url, { min: 0, max: Number.POSITIVE_INFINITY });
  const problem = writtenUrlProblem(url, rules);
  const meant = urlMeant(url);
  if (problem !== null) throw invalidField("upstream_url", meant === null ? problem : `${problem}: ${meant}`);
}

function storedTags(tags: readonly string[]): string {
  if (tags.length > MAX.tags) throw invalidField("tags", `must be at most ${MAX.tags} tags`);
  for (const [index, tag] of tags.entries()) checkText(`tags.${index}`, tag, { min: 1, max: MAX.tagCharacters });
  // JSON strings contain no raw tabs, so a tab marks where a tag starts: see tagNeedle.
  return JSON.stringify(tags, null, "\t");
}

/** Any values are allowed: JSON escapes U+0000 and lone surrogates, so both databases can store them. */
function storedMetadata(metadata: Record<string, unknown>): string {
  const json = JSON.stringify(metadata);
  if (Buffer.byteLength(json) <= MAX.metadataBytes) return json;
  throw invalidField("metadata", `must be at most ${MAX.metadataBytes} bytes as JSON`);
}

function storedPricing(pricing: Pricing): string {
  checkAmount("pricing.amount", pricing.amount);
  const tools = Object.entries(pricing.tools ?? {});
  if (tools.length > MAX.pricedTools) throw invalidField("pricing.tools", `must be at most ${MAX.pricedTools} tools`);
  for (const [name, amount] of tools) {
    checkText("pricing.tools", name, { min: 1, max: 128 });
    checkAmount(`pricing.tools.${name}`, amount);
  }
  return JSON.stringify(pricing);
}

function checkAmount(field: string, amount: string): void {
  if (BigInt(amount) > UINT256_MAX) throw invalidField(field, "must fit into 256 bits");
}

function checkTogether(agent: AgentFields): void {
  if (agent.protocol === "mcp") {
    if (agent.mcp_transport !== null) return;
    throw invalidField("mcp_transport", "must be streamable_http when protocol is mcp");
  }
  if (agent.mcp_transport !== null) throw invalidField("mcp_transport", "must be absent or null when protocol is http");
  if (decodePricing(agent.pricing)?.tools !== undefined) {
    throw invalidField("pricing.tools", "only possible when protocol is mcp");
  }
}
