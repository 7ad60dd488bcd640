// The HTTP side of agents: reads requests, calls the service, shows views.
import { invalidField } from "../../core/fault.ts";
import { TAG_CHARACTERS_MAX } from "../../core/limits.ts";
import { AGENT_STATUSES, PROTOCOLS } from "../../core/states.ts";
import { textProblem } from "../../core/text.ts";
import { routes } from "../../http/elysia.ts";
import { bodyReader, oneOf, page, type Query, queryOf } from "../../http/input.ts";
import { empty, jsonList, respondJson } from "../../http/responses.ts";
import { scopeOf } from "../../http/server.ts";
import { AgentCreate, AgentPatch, agentView } from "./model.ts";
import { create, get, list, patch, remove } from "./openapi.ts";
import type { AgentFilter } from "./pages.ts";
import { type AgentDeps, createAgentService } from "./service.ts";

/** Limits the cost of one search. */
const SEARCH_CHARACTERS_MAX = 256;

const readCreate = bodyReader(AgentCreate, { freeField: "metadata" });
const readPatch = bodyReader(AgentPatch, { freeField: "metadata" });

function textParameter(query: Query, name: string, max: number): string | null {
  const value = query.get(name);
  if (value === null) return null;
  const problem = textProblem(value, { min: 0, max, controls: true });
  if (problem !== null) throw invalidField(name, problem);
  return value;
}

function filterOf(request: Request): AgentFilter {
  const query = queryOf(request);
  return {
    ...page(query),
    status: oneOf(query, "status", AGENT_STATUSES),
    protocol: oneOf(query, "protocol", PROTOCOLS),
    tag: textParameter(query, "tag", TAG_CHARACTERS_MAX),
    q: textParameter(query, "q", SEARCH_CHARACTERS_MAX),
  };
}

export function agentRoutes(deps: AgentDeps) {
  const service = createAgentService(deps);

  /** Reads the agent again even after a write, so that an answer which waits for memory holds none. */
  function shown(request: Request, id: string, status: "ok" | "created" = "ok"): Promise<Response> {
    const { caller } = scopeOf(request);
    const { tenant } = caller;
    return respondJson({ tenant, request, status }, async () => agentView(await service.get(caller, id)));
  }

  return routes()
    .post(
      "/v1/agents",
      async ({ request }) => {
        const body = await readCreate(request);
        const { id } = await service.create(scopeOf(request).caller, body);
        return shown(request, id, "created");
      },
      { parse: "none", detail: create },
    )
    .get(
      "/v1/agents",
      async ({ request }) => {
        const filter = filterOf(request);
        const { limit, offset } = filter;
        const { caller } = scopeOf(request);
        const { rows, total } = await service.list(caller, filter, request.signal);
        const rest = { total, limit, offset };
        return jsonList({ tenant: caller.tenant, request }, { name: "data", rows, view: agentView, rest });
      },
      { detail: list },
    )
    .get("/v1/agents/:id", ({ request, params }) => shown(request, params.id), { detail: get })
    .patch(
      "/v1/agents/:id",
      async ({ request, params }) => {
        const body = await readPatch(request);
        const { id } = await service.patch(scopeOf(request).caller, params.id, body);
        return shown(request, id);
      },
      { parse: "none", detail: patch },
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
