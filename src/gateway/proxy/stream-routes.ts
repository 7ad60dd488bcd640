// The routes of the streaming path, and a request to it from the caller's end: whose session it names, its admission, the
// upstream, and the connection, which stays open however long either side is silent.

import { createHmac, timingSafeEqual } from "node:crypto";
import { Fault } from "../../core/fault.ts";
import { routes } from "../../http/elysia.ts";
import { scopeOf } from "../../http/server.ts";
import { boundedCache } from "../../kernel/cache.ts";
import { CAPTURE_BYTES_MAX, PROXY_BODY_BYTES_MAX } from "../../kernel/limits.ts";
import type { CallBody } from "../../wire/body.ts";
import { leadsBack } from "../streaming/response-headers.ts";
import type { AskedCall, AskedStream, OpenedConnection } from "../streaming/service.ts";
import type { CallerEnd, Streams } from "../streaming/streams.ts";
import { type AdmitStreamOptions, admitConnection, admitStream } from "./admit-stream.ts";
import { endSession, listen, streamCall } from "./openapi.ts";

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
  const { note, caller, holdOpen, intake } = scope;
  const { promise: until, resolve: sent } = Promise.withResolvers<void>();
  const { promise: ending, resolve: endBy } = Promise.withResolvers<() => void>();
  async function readBody(): Promise<CallBody> {
    const held = { until, endBy: ending, storedMax: CAPTURE_BYTES_MAX };
    const body = await intake.readBody(request, caller.tenant, PROXY_BODY_BYTES_MAX, held);
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

// The owner of an MCP session. The upstream keeps the sessions, and it knows the gateway's credential but not the
// callers. So a caller gets the upstream's session ID with a seal behind it, which binds it to the tenant, the agent
// and the user. It sends both with each request. Nothing is stored: a seal is valid after a restart, on every replica,
// and after a change of the master key.

/** An ID as the protocol allows it, of a length that fits a header. */
const UPSTREAM_ID = /^[\x21-\x7e]{1,1024}$/;
const SEPARATOR = ".";
/** SHA-256 in base64url. */
const SEAL_CHARACTERS = 43;

const KEYS_CACHED_MAX = 10_000;

export interface SessionOwner {
  readonly tenant: string;
  readonly agentId: string;
  readonly user: string;
}

export type SessionIdsOf = (owner: SessionOwner) => Promise<SessionIds>;

/** @param deriveKey the tenant's key for sessions */
export function createSessionIds(deriveKey: (tenant: string) => Promise<Uint8Array>): SessionIdsOf {
  const keys = boundedCache<string, Uint8Array>(KEYS_CACHED_MAX);
  return async (owner) => {
    let key = keys.get(owner.tenant);
    if (key === undefined) {
      key = await deriveKey(owner.tenant);
      keys.set(owner.tenant, key);
    }
    return sessionIds(key, owner);
  };
}

function sessionIds(key: Uint8Array, { tenant, agentId, user }: SessionOwner) {
  const sealOf = (id: string) =>
    createHmac("sha256", key)
      .update(JSON.stringify([tenant, agentId, user, id]))
      .digest("base64url");
  return {
    /** The ID for the caller; null when the upstream's is not valid. */
    toCaller: (id: string) => (UPSTREAM_ID.test(id) ? `${id}${SEPARATOR}${sealOf(id)}` : null),
    /** The ID for the upstream; null when the caller's was not given to this owner. */
    toUpstream(sealed: string): string | null {
      const end = sealed.length - SEAL_CHARACTERS - SEPARATOR.length;
      const id = sealed.slice(0, Math.max(end, 0));
      if (!UPSTREAM_ID.test(id) || sealed[end] !== SEPARATOR) return null;
      const seal = Buffer.from(sealed.slice(end + SEPARATOR.length), "latin1");
      return timingSafeEqual(seal, Buffer.from(sealOf(id), "latin1")) ? id : null;
    },
  };
}

/** Translates the session IDs of one owner between caller and upstream. */
export type SessionIds = ReturnType<typeof sessionIds>;
