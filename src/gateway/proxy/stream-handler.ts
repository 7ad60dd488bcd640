// A request to an agent's streaming path, from the caller's end: whose session it names, its admission, the upstream,
// and the connection, which stays open however long either side is silent.
import { Fault } from "../../core/fault.ts";
import { leadsBack } from "../streaming/response-headers.ts";
import type { AskedCall, AskedStream, OpenedConnection } from "../streaming/service.ts";
import type { CallerEnd, Streams } from "../streaming/streams.ts";
import { type AdmitStreamOptions, admitConnection, admitStream } from "./admit-stream.ts";
import type { SessionIds, SessionIdsOf } from "./session-id.ts";

const SESSION_HEADER = "mcp-session-id";

export interface StreamHandlerDeps {
  readonly streams: Streams;
  /** The URL at which callers reach the gateway; null to use the host of the request. */
  readonly publicUrl: string | null;
  readonly sessionIdsOf: SessionIdsOf;
  /** Web origins whose pages may use mcp agents, beside the gateway's own. */
  readonly allowedOrigins: readonly string[];
  /** The port on which callers reach this process. */
  port(): number;
  readonly admission: AdmitStreamOptions;
}

/** The caller's end, without what the request itself has. */
export type CallerConnection = Omit<CallerEnd, "callerSignal">;

export function createStreamHandler(deps: StreamHandlerDeps) {
  const { streams, publicUrl, admission } = deps;
  const publicHost = publicUrl === null ? null : new URL(publicUrl).host;
  return {
    async call(asked: AskedCall, connection: CallerConnection): Promise<Response> {
      const leave = streams.enter();
      try {
        const { ids, session } = await sessionOf(deps, asked, "POST");
        const { opened, body } = await admitStream(admission, { ...asked, session });
        admission.meters.accepted();
        const response = await streams.call(opened, body, { ...connection, callerSignal: asked.signal });
        seal(ids, response);
        keepAway(response, [publicHost, asked.headers.get("host")]);
        return response;
      } finally {
        leave();
      }
    },
    async connect(
      asked: AskedStream,
      method: OpenedConnection["method"],
      connection: CallerConnection,
    ): Promise<Response> {
      const { ids, session } = await sessionOf(deps, asked, method);
      const opened = await admitConnection(admission, { ...asked, session }, method);
      const response = await streams.connect(opened, { ...connection, callerSignal: asked.signal });
      seal(ids, response);
      keepAway(response, [publicHost, asked.headers.get("host")]);
      return response;
    },
  };
}

export type StreamHandler = ReturnType<typeof createStreamHandler>;

interface NamedSession {
  /** Null when the agent has no sessions that the gateway knows of. */
  readonly ids: SessionIds | null;
  /** The upstream's ID of the one that the request names. */
  readonly session: string | null;
}

/**
 * A session of another caller is answered like an unknown one (404), so that an MCP client opens its own. Event IDs are
 * unique only within a session, so resuming a stream needs one.
 *
 * @throws Fault `not_found`
 */
async function sessionOf(
  deps: StreamHandlerDeps,
  { caller, agentId, headers }: AskedStream,
  method: string,
): Promise<NamedSession> {
  const { admission, sessionIdsOf } = deps;
  const agent = await admission.findAgent(caller.tenant, agentId);
  if (agent?.protocol !== "mcp") return { ids: null, session: null };
  checkOrigin(deps, headers.get("origin"));
  const { tenant, user } = caller;
  const ids = await sessionIdsOf({ tenant, agentId: agent.id, user });
  const sealed = headers.get(SESSION_HEADER);
  const session = sealed === null ? null : ids.toUpstream(sealed);
  const needsOne = sealed !== null || (method === "GET" && headers.has("last-event-id"));
  if (needsOne && session === null) throw new Fault("not_found", "no such session");
  return { ids, session };
}

/**
 * MCP demands this against DNS rebinding, which forges the request's own host.
 *
 * @throws Fault `denied` for a page of another origin
 */
function checkOrigin({ publicUrl, allowedOrigins, port }: StreamHandlerDeps, origin: string | null): void {
  if (origin === null || allowedOrigins.includes(origin)) return;
  const own = publicUrl === null ? OWN_HOSTS.map((host) => `http://${host}:${port()}`) : [new URL(publicUrl).origin];
  if (own.some((each) => new URL(each).origin === origin)) return;
  throw new Fault("denied", "Origin: not among TOLLGATE_ALLOWED_ORIGINS");
}

const OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]"];

/** Replaces the session ID of the answer by the sealed one for the caller. */
function seal(ids: SessionIds | null, { headers }: Response): void {
  const id = headers.get(SESSION_HEADER);
  if (ids === null || id === null) return;
  const sealed = ids.toCaller(id);
  if (sealed === null) headers.delete(SESSION_HEADER);
  else headers.set(SESSION_HEADER, sealed);
}

/** Removes a redirect to the gateway itself. */
function keepAway(response: Response, hosts: readonly (string | null)[]): void {
  const location = response.headers.get("location");
  const known = hosts.filter((host) => host !== null);
  if (location !== null && leadsBack(location, known)) response.headers.delete("location");
}
