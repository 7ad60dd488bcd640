// A request to an agent's streaming path, from the caller's end: whose session it names, its admission, the upstream,
// and the connection, which stays open however long either side is silent.
import { Fault } from "../../core/fault.ts";
import { leadsBack } from "./headers.ts";
import { type SessionOwners, sessionOwners } from "./owners.ts";
import type { OpenedCall, OpenedConnection, StreamCall, StreamRequest } from "./service.ts";
import type { CallerEnd, Streams } from "./streams.ts";

const SESSION_HEADER = "mcp-session-id";

export interface StreamPathDeps {
  readonly streams: Streams;
  /** Where callers find the gateway; null: where they asked. */
  readonly publicUrl: string | null;
  /** From the checks to a call that is to be made now. @throws Fault */
  admit(call: StreamCall): Promise<{ readonly opened: OpenedCall; readonly body: Uint8Array }>;
  /** @throws Fault */
  admitConnection(request: StreamRequest, method: OpenedConnection["method"]): Promise<OpenedConnection>;
}

export interface StreamPath {
  call(call: StreamCall, end: Ends): Promise<Response>;
  connect(request: StreamRequest, method: OpenedConnection["method"], end: Ends): Promise<Response>;
}

/** The caller's end, as far as the request does not say it. */
export type Ends = Omit<CallerEnd, "gone">;

export function createStreamPath({ streams, publicUrl, admit, admitConnection }: StreamPathDeps): StreamPath {
  const owners = sessionOwners();
  const publicHost = publicUrl === null ? null : new URL(publicUrl).host;
  return {
    async call(call, ends) {
      requireOwner(owners, call);
      const leave = streams.enter();
      try {
        const { opened, body } = await admit(call);
        const response = await streams.call(opened, body, { ...ends, gone: call.signal });
        learn(owners, call, response);
        keepAway(response, [publicHost, call.headers.get("host")]);
        return response;
      } finally {
        leave();
      }
    },
    async connect(request, method, ends) {
      requireOwner(owners, request);
      const opened = await admitConnection(request, method);
      const response = await streams.connect(opened, { ...ends, gone: request.signal });
      learn(owners, request, response);
      keepAway(response, [publicHost, request.headers.get("host")]);
      return response;
    },
  };
}

/**
 * A session of somebody else behaves as one that is gone: an MCP client then opens its own.
 *
 * @throws Fault `not_found`
 */
function requireOwner(owners: SessionOwners, { agentId, headers, caller }: StreamRequest): void {
  const session = headers.get(SESSION_HEADER);
  if (session === null || owners.mayUse(agentId, session, caller.user)) return;
  throw new Fault("not_found", "no such session");
}

function learn(owners: SessionOwners, { agentId, headers, caller }: StreamRequest, response: Response): void {
  if (!response.ok) return;
  const session = response.headers.get(SESSION_HEADER) ?? headers.get(SESSION_HEADER);
  if (session !== null) owners.learn(agentId, session, caller.user);
}

/** Takes out a redirect to the gateway itself. */
function keepAway(response: Response, hosts: readonly (string | null)[]): void {
  const location = response.headers.get("location");
  const known = hosts.filter((host) => host !== null);
  if (location !== null && leadsBack(location, known)) response.headers.delete("location");
}
