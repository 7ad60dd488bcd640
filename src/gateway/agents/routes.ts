// The HTTP routes of agents and their documentation.
import { Type } from "@sinclair/typebox";
import type { Caller } from "../../core/call.ts";
import { invalidField, overQuota } from "../../core/fault.ts";
import { AGENT_STATUSES, PROTOCOLS } from "../../core/states.ts";
import { textProblem } from "../../core/text.ts";
import { routes } from "../../http/elysia.ts";
import { bodyReader, choiceOf, PAGE_QUERY, page, queryOf } from "../../http/input.ts";
import { idParameter, type Operation, operation } from "../../http/openapi.ts";
import { empty } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { MAX } from "../../kernel/limits.ts";
import type { Network } from "../../x402/network.ts";
import type { AgentFilter } from "./lists.ts";
import { type AgentRow, agentCreate, agentPage, agentPatch, agentShape, agentView } from "./model.ts";
import { type AgentDeps, createAgentService } from "./service.ts";

const CREATED = {
  name: "weather",
  description: "Forecasts for any place.",
  tags: ["weather"],
  metadata: { team: "maps" },
  upstream_url: "https://weather.example.com/mcp",
  protocol: "mcp",
  mcp_transport: "streamable_http",
};
const EXAMPLE = {
  id: "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f",
  ...CREATED,
  status: "active",
  suspended: false,
  created_by: "alice",
  created_at: "2026-11-21T10:00:00.000Z",
  updated_at: "2026-11-21T10:00:00.000Z",
  credential_ref: null,
  invocation_rate_limit: null,
  invocation_burst: null,
  emit_receipts: false,
  capture_body: true,
  mcp_protocol_version: null,
  pricing: null,
};

const agentId = { id: idParameter("agt", "The agent's ID, `agt_<uuidv7>`.") };
const agent = (network: Network) => ({ schema: agentShape(network), example: EXAMPLE });

const create = (network: Network) =>
  operation({
    tag: "Agents",
    summary: "Create an agent",
    description:
      "Put the URL of your own service in place of `upstream_url`: nothing answers at that of the examples, so their calls fail. [First call](docs/start#an-agent) has a small service to try. Without an `upstream_url` the agent is `pending` and takes no calls. Defaults: `protocol` is `http`, `capture_body` is true and `emit_receipts` is false.",
    body: {
      schema: agentCreate(network),
      examples: {
        http: { name: "my-agent", upstream_url: "https://your-agent.example.com/run", emit_receipts: true },
        mcp: CREATED,
      },
    },
    response: { status: "created", description: "The agent.", ...agent(network) },
    errors: ["forbidden", "invalid_request", "conflict", "payload_too_large", "over_limit"],
    answers: {
      over_limit: {
        description: "The tenant has reached its limit of agents, deleted ones not counted.",
        example: overQuota(10_000, "agents, deleted ones not counted").message,
      },
    },
  });

const list = (network: Network) =>
  operation({
    tag: "Agents",
    summary: "List agents",
    description: "Newest first. Inactive agents are left out unless `status=inactive` asks for them.",
    query: {
      ...PAGE_QUERY,
      status: { description: "Only this status.", schema: Type.Unsafe({ type: "string", enum: AGENT_STATUSES }) },
      protocol: { description: "Only this protocol.", schema: Type.Unsafe({ type: "string", enum: PROTOCOLS }) },
      tag: { description: "Only agents with this tag.", schema: Type.String({ maxLength: MAX.tagCharacters }) },
      q: {
        description: "Only agents whose name or description contains this text, ignoring case.",
        schema: Type.String({ maxLength: MAX.searchCharacters }),
      },
    },
    response: {
      description: "A page of agents.",
      schema: agentPage(network),
      example: { data: [EXAMPLE], total: 1, limit: 20, offset: 0 },
    },
    errors: ["invalid_request"],
  });

const get = (network: Network) =>
  operation({
    tag: "Agents",
    summary: "Get an agent",
    path: agentId,
    response: { description: "The agent.", ...agent(network) },
    errors: ["not_found"],
  });

const patch = (network: Network) =>
  operation({
    tag: "Agents",
    summary: "Update an agent",
    description: "An inactive agent is a 404. Setting a rate field refills the bucket.",
    path: agentId,
    body: {
      schema: agentPatch(network),
      examples: {
        limit: { invocation_rate_limit: 5, invocation_burst: 10 },
        suspend: { suspended: true },
        clear: { upstream_url: null },
      },
    },
    response: { description: "The updated agent.", ...agent(network) },
    errors: ["forbidden", "invalid_request", "not_found", "conflict", "payload_too_large"],
  });

const remove = operation({
  tag: "Agents",
  summary: "Delete an agent",
  description:
    "The agent becomes inactive: its record stays, and its name becomes free. Deleting it again has no effect.",
  path: agentId,
  response: { status: "empty", description: "The agent is inactive." },
  errors: ["forbidden", "not_found"],
});

function textParameter(query: URLSearchParams, name: string, max: number): string | null {
  const value = query.get(name);
  if (value === null) return null;
  const problem = textProblem(value, { min: 0, max, controls: true });
  if (problem !== null) throw invalidField(name, problem);
  return value;
}

function filterOf(request: Request, list: Operation): AgentFilter {
  const query = queryOf(request, list);
  return {
    ...page(query),
    status: choiceOf(query, "status", AGENT_STATUSES),
    protocol: choiceOf(query, "protocol", PROTOCOLS),
    tag: textParameter(query, "tag", MAX.tagCharacters),
    q: textParameter(query, "q", MAX.searchCharacters),
  };
}

const DERIVED = [["status", "is read-only: it follows from upstream_url, and a DELETE makes it inactive"]] as const;
const SET_LATER = (["suspended", "invocation_rate_limit", "invocation_burst"] as const).map(
  (field) => [field, "is set by a PATCH of the agent, once it exists"] as const,
);

export function agentRoutes({ network, ...deps }: AgentDeps & { readonly network: Network }) {
  const read = { freeField: "metadata", resource: agentShape(network) };
  const readCreate = bodyReader(agentCreate(network), { ...read, elsewhere: new Map([...DERIVED, ...SET_LATER]) });
  const readPatch = bodyReader(agentPatch(network), { ...read, elsewhere: new Map(DERIVED) });
  const service = createAgentService(deps);
  const listed = list(network);

  /** @param read is called when the response may use memory */
  function shown(request: Request, read: (caller: Caller) => AgentRow | Promise<AgentRow>, status?: "created") {
    const { caller, responses } = scopeOf(request);
    const { tenant } = caller;
    return responses.respondJson({ tenant, request, status: status ?? "ok" }, async () =>
      agentView(await read(caller)),
    );
  }

  return routes()
    .post(
      "/v1/agents",
      async ({ request }) => {
        const body = await readCreate(request);
        const created = await service.create(scopeOf(request).caller, body);
        // Not read again: if that read failed, a durable write would be reported as refused.
        return shown(request, () => created, "created");
      },
      { parse: "none", detail: create(network) },
    )
    .get(
      "/v1/agents",
      async ({ request }) => {
        const filter = filterOf(request, listed);
        const { caller, responses } = scopeOf(request);
        const { rows, total } = await service.list(caller, filter, request.signal);
        const rest = { total, limit: filter.limit, offset: filter.offset };
        return responses.jsonList({ tenant: caller.tenant, request }, { name: "data", rows, view: agentView, rest });
      },
      { detail: listed },
    )
    .get("/v1/agents/:id", ({ request, params }) => shown(request, (caller) => service.get(caller, params.id)), {
      detail: get(network),
    })
    .patch(
      "/v1/agents/:id",
      async ({ request, params }) => {
        const body = await readPatch(request);
        const changed = await service.patch(scopeOf(request).caller, params.id, body);
        return shown(request, () => changed);
      },
      { parse: "none", detail: patch(network) },
    )
    .delete(
      "/v1/agents/:id",
      async ({ request, params }) => {
        await service.remove(scopeOf(request).caller, params.id);
        return empty();
      },
      { parse: "none", detail: remove },
    );
}
