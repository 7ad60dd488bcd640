// A request to an agent's streaming path, from the caller's end: whose session it names, its admission, the upstream,
// and the connection, which stays open however long either side is silent.
import { Fault } from "../../core/fault.ts";
import type { Protocol } from "../../core/states.ts";
import { leadsBack } from "../streaming/response-headers.ts";
import type {
  AskedCall,
  AskedStream,
  OpenedCall,
  OpenedConnection,
  StreamCall,
  StreamRequest,
} from "../streaming/service.ts";
import type { CallerEnd, Streams } from "../streaming/streams.ts";
import type { SessionIds, SessionIdsOf } from "./session-id.ts";

const SESSION_HEADER = "mcp-session-id";

export interface StreamHandlerDeps {
  readonly streams: Streams;
  /** Where callers find the gateway; null: where they asked. */
  readonly publicUrl: string | null;
  readonly sessionIdsOf: SessionIdsOf;
  findAgent(
    tenant: string,
    agentId: string,
  ): Bun.MaybePromise<{ readonly id: string; readonly protocol: Protocol } | null>;
  /** From the checks to a call that is to be made now. @throws Fault */
  admit(call: StreamCall): Promise<{ readonly opened: OpenedCall; readonly body: Uint8Array }>;
  /** @throws Fault */
  admitConnection(request: StreamRequest, method: OpenedConnection["method"]): Promise<OpenedConnection>;
}

export interface StreamHandler {
  call(asked: AskedCall, end: CallerConnection): Promise<Response>;
  connect(asked: AskedStream, method: OpenedConnection["method"], end: CallerConnection): Promise<Response>;
}

/** The caller's end, as far as the request does not say it. */
export type CallerConnection = Omit<CallerEnd, "gone">;

export function createStreamHandler(deps: StreamHandlerDeps): StreamHandler {
  const { streams, publicUrl, admit, admitConnection } = deps;
  const publicHost = publicUrl === null ? null : new URL(publicUrl).host;
  return {
    async call(asked, ends) {
      const leave = streams.enter();
      try {
        const { ids, session } = await sessionOf(deps, asked, "POST");
        const { opened, body } = await admit({ ...asked, session });
        const response = await streams.call(opened, body, { ...ends, gone: asked.signal });
        seal(ids, response);
        keepAway(response, [publicHost, asked.headers.get("host")]);
        return response;
      } finally {
        leave();
      }
    },
    async connect(asked, method, ends) {
      const { ids, session } = await sessionOf(deps, asked, method);
      const opened = await admitConnection({ ...asked, session }, method);
      const response = await streams.connect(opened, { ...ends, gone: asked.signal });
      seal(ids, response);
      keepAway(response, [publicHost, asked.headers.get("host")]);
      return response;
    },
  };
}

interface NamedSession {
  /** Null when the agent has no sessions that the gateway knows of. */
  readonly ids: SessionIds | null;
  /** The upstream's ID of the one that the request names. */
  readonly session: string | null;
}

/**
 * A session that is not its caller's behaves as one that is gone: an MCP client then opens its own. Events are told
 * apart within a session only, so a stream is resumed in one.
 *
 * @throws Fault `not_found`
 */
async function sessionOf(
  { findAgent, sessionIdsOf }: StreamHandlerDeps,
  { caller, agentId, headers }: AskedStream,
  method: string,
): Promise<NamedSession> {
  const agent = await findAgent(caller.tenant, agentId);
  if (agent?.protocol !== "mcp") return { ids: null, session: null };
  const { tenant, user } = caller;
  const ids = await sessionIdsOf({ tenant, agentId: agent.id, user });
  const sealed = headers.get(SESSION_HEADER);
  const session = sealed === null ? null : ids.toUpstream(sealed);
  const needsOne = sealed !== null || (method === "GET" && headers.has("last-event-id"));
  if (needsOne && session === null) throw new Fault("not_found", "no such session");
  return { ids, session };
}

/** Names the session in the answer as the caller is to name it. */
function seal(ids: SessionIds | null, { headers }: Response): void {
  const id = headers.get(SESSION_HEADER);
  if (ids === null || id === null) return;
  const sealed = ids.toCaller(id);
  if (sealed === null) headers.delete(SESSION_HEADER);
  else headers.set(SESSION_HEADER, sealed);
}

/** Takes out a redirect to the gateway itself. */
function keepAway(response: Response, hosts: readonly (string | null)[]): void {
  const location = response.headers.get("location");
  const known = hosts.filter((host) => host !== null);
  if (location !== null && leadsBack(location, known)) response.headers.delete("location");
}
