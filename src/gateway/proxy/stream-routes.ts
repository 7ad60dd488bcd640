// The routes of the streaming path.
import { Fault } from "../../core/fault.ts";
import { CAPTURE_BYTES_MAX, PROXY_BODY_BYTES_MAX } from "../../core/limits.ts";
import { routes } from "../../http/elysia.ts";
import { readBody as readWhole } from "../../http/intake.ts";
import { scopeOf } from "../../http/server.ts";
import type { CallBody } from "../../wire/body.ts";
import type { AskedStream, OpenedConnection } from "../streaming/service.ts";
import type { StreamHandler } from "./stream-handler.ts";
import { endSession, listen, streamCall } from "./stream-openapi.ts";

const METHODS = ["POST", "GET", "DELETE"];

export function streamRoutes(path: StreamHandler) {
  return routes()
    .post("/v1/proxy/:id/stream", ({ request, params }) => call(path, request, params.id), {
      parse: "none",
      detail: streamCall,
    })
    .get("/v1/proxy/:id/stream", ({ request, params }) => connect(path, request, params.id, "GET"), {
      detail: listen,
    })
    .delete("/v1/proxy/:id/stream", ({ request, params }) => connect(path, request, params.id, "DELETE"), {
      parse: "none",
      detail: endSession,
    });
}

async function call(path: StreamHandler, request: Request, agentId: string): Promise<Response> {
  const { scope, streamed, over } = startOf(request, agentId);
  const { note, caller, holdOpen } = scope;
  const { promise: until, resolve: sent } = Promise.withResolvers<void>();
  const { promise: ending, resolve: endBy } = Promise.withResolvers<() => void>();
  async function readBody(): Promise<CallBody> {
    const held = { until, endBy: ending, storedMax: CAPTURE_BYTES_MAX };
    const body = await readWhole(request, caller.tenant, PROXY_BODY_BYTES_MAX, held);
    // From here on only the timeouts of the exchange limit the connection.
    holdOpen(true);
    return body;
  }
  try {
    return await path.call({ ...streamed, readBody, note }, { sent, endBy, over });
  } catch (error) {
    sent();
    over();
    throw error;
  }
}

async function connect(
  path: StreamHandler,
  request: Request,
  agentId: string,
  method: OpenedConnection["method"],
): Promise<Response> {
  const { scope, streamed, over } = startOf(request, agentId);
  scope.holdOpen(true);
  try {
    if (scope.method === "HEAD") {
      throw new Fault("method_not_allowed", "this route has other methods", { allow: METHODS });
    }
    return await path.connect(streamed, method, { sent() {}, endBy() {}, over });
  } catch (error) {
    over();
    throw error;
  }
}

function startOf(request: Request, agentId: string) {
  const scope = scopeOf(request);
  const { caller, requestId, holdOpen } = scope;
  const streamed: AskedStream = {
    caller,
    agentId,
    headers: request.headers,
    requestId,
    signal: request.signal,
  };
  return { scope, streamed, over: () => holdOpen(false) };
}
