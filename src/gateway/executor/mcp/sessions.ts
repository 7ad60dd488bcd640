// The sessions that transactional calls open at MCP servers, up to protocol version 2025-11-25; later versions have none. A
// session is opened once per key, however many calls wait for it. It is closed when it has been idle for long, when the server
// refuses it, or when its tenant has too many; but one in use only when the worker stops.
import { VERSION } from "../../../core/startup.ts";
import type { Answer } from "../../../http/client/exchange.ts";
import { MAX } from "../../../kernel/limits.ts";
import { createFairQueue, createFairShare, enter } from "../../../kernel/share.ts";
import { endsWithin, Stop, type StopSignal, unlessAborted, untilFirst } from "../../../kernel/wait.ts";
import { isEventStream } from "../../../wire/event-stream.ts";
import { encodeRpc } from "../../../wire/jsonrpc.ts";
import { SESSION_HEADER, VERSION_HEADER } from "../../../wire/mcp-headers.ts";
import { type CredentialHeader, credentialHeaders, newTrace } from "../../upstream/headers.ts";
import { type CallContext, readStart, send, type Upstreams } from "../call.ts";
import { readMessage, readStreamAnswer } from "./response.ts";

export const MCP_HEADERS: ReadonlyArray<[string, string]> = [
  ["accept", "application/json, text/event-stream"],
  ["content-type", "application/json"],
];

/** Not 0, which some servers take for a missing id. */
const INITIALIZE_ID = 1;
/** The deadline of requests that no call waits for, including the wait for a slot. */
const SIDE_TIMEOUT_MS = 5000;

/** Visible ASCII, as the protocol demands for session IDs. */
const TOKEN = /^[\x21-\x7e]{1,1024}$/;

const encoder = new TextEncoder();

export interface SessionTarget {
  readonly tenant: string;
  readonly url: string;
  readonly credential: CredentialHeader | null;
  /** The protocol version to offer. */
  readonly offer: string;
  /** `Via` of the call that opens the session, so that a loop back to this gateway is detected. */
  readonly via: string | null;
}

export interface Opened {
  /** Null when the server keeps no sessions. */
  readonly id: string | null;
  /** The protocol version that was negotiated. */
  readonly version: string;
}

export interface Session extends Opened {
  readonly key: string;
  readonly target: SessionTarget;
  /** A new request id, unique within the session. */
  nextId(): number;
  running: number;
  usedAt: number;
  readonly openedAt: number;
  /** Whether new calls no longer get it. It is closed when the last call that uses it has ended. */
  isRetired: boolean;
}

const DEFAULT_LIMITS = {
  sessions_max: MAX.mcpSessions,
  idle_ms: 600_000,
  /** How long to believe that a server has no sessions after it has opened none. */
  sessionless_ms: 60_000,
  /** How long a server may take to open a session. */
  open_ms: 30_000,
};
export type SessionLimits = Readonly<typeof DEFAULT_LIMITS>;

function createSession(key: string, target: SessionTarget, opened: Opened): Session {
  let last = INITIALIZE_ID;
  const now = performance.now();
  return { ...opened, key, target, nextId: () => ++last, running: 0, usedAt: now, openedAt: now, isRetired: false };
}

export function createSessions(wire: Pick<McpWire, "open" | "close">, limits: SessionLimits = DEFAULT_LIMITS) {
  /** By key, those that new calls get, in the order of last use, the longest unused first. */
  const current = new Map<string, Session>();
  /** With those that are retired and still used. */
  const notClosed = new Set<Session>();
  const share = createFairShare({ size: limits.sessions_max });
  const openings = createOpenings(limits.open_ms, open);
  const closing = new Set<Promise<void>>();

  function currentOf(key: string): Session | null {
    const session = current.get(key);
    if (session === undefined) return null;
    const age = performance.now() - session.openedAt;
    if (session.id === null && age > limits.sessionless_ms) {
      retire(session, true);
      return null;
    }
    return session;
  }

  function retire(session: Session, isForgotten: boolean): void {
    if (current.get(session.key) === session) {
      current.delete(session.key);
      share.giveBack(session.target.tenant);
    }
    if (isForgotten) notClosed.delete(session);
    session.isRetired = true;
    closeUnused(session);
  }

  function closeUnused(session: Session): void {
    if (session.isRetired && session.running === 0) close(session);
  }

  function close(session: Session): void {
    if (!notClosed.delete(session) || session.id === null) return;
    const closed = wire.close(session.target, session).finally(() => closing.delete(closed));
    closing.add(closed);
  }

  async function closeAll(): Promise<void> {
    const last = Promise.allSettled(openings.all());
    for (const session of notClosed) close(session);
    await last;
    for (const session of notClosed) close(session);
    await Promise.allSettled(closing);
  }

  async function open(key: string, target: SessionTarget, signal: StopSignal): Promise<Session | null> {
    const opened = await wire.open(target, signal);
    if (opened === null) return null;
    const session = createSession(key, target, opened);
    notClosed.add(session);
    if (signal.aborted) {
      close(session);
      return null;
    }
    while (share.take(target.tenant) !== null) {
      const evicted = leastRecentFor(target.tenant, current);
      if (evicted !== null) retire(evicted, false);
    }
    current.set(key, session);
    return session;
  }

  return {
    /** The session of a key, which may just be opening; null when there is none. */
    async find(key: string, target: SessionTarget, signal: StopSignal): Promise<Session | null> {
      return openings.has(key) ? openings.join(key, target, signal) : currentOf(key);
    },
    /**
     * A new session in place of `refused`. Calls that were refused together share it: the first one opens it.
     * @param isForgotten whether the server has forgotten `refused`, so that there is nothing to close
     */
    async renew(key: string, target: SessionTarget, refused: Session | null, isForgotten: boolean, signal: StopSignal) {
      if (openings.has(key)) return openings.join(key, target, signal);
      const session = currentOf(key);
      if (session !== null && session !== refused) return session;
      if (session !== null) retire(session, isForgotten);
      return openings.join(key, target, signal);
    },
    /** Does `work` in a session, which is not closed meanwhile. */
    async use<T>(session: Session | null, work: () => Promise<T>): Promise<T> {
      if (session === null) return work();
      const { key } = session;
      session.running++;
      try {
        return await work();
      } finally {
        session.running--;
        session.usedAt = performance.now();
        // Moves the session to the end of the order of use.
        if (current.get(key) === session && current.delete(key)) current.set(key, session);
        closeUnused(session);
      }
    },
    /** Closes the sessions that have been idle for too long. */
    sweep() {
      const oldest = performance.now() - limits.idle_ms;
      for (const session of current.values()) {
        if (session.running === 0 && session.usedAt <= oldest) retire(session, false);
      }
    },
    /** Closes all sessions, even those in use; resolves when the servers have been told, or after `timeoutMs`. */
    close: async (timeoutMs: number) => void (await endsWithin(timeoutMs, closeAll())),
  };
}

/** Sessions that are being opened. Their connections need no limit, since each has a waiting call, which holds a slot. */
function createOpenings(ms: number, open: (...of: [string, SessionTarget, StopSignal]) => Promise<Session | null>) {
  const openings = new Map<string, { session: Promise<Session | null>; stop: Stop; waiting: number }>();
  return {
    has: (key: string) => openings.has(key),
    all: () => [...openings.values()].map(({ session }) => session),
    /**
     * Waits for the session of a key. The first call to wait starts the opening; it is given up when no call waits any more.
     * @throws the signal's reason; the opening goes on for the other calls
     */
    async join(key: string, target: SessionTarget, signal: StopSignal): Promise<Session | null> {
      const stop = new Stop();
      const opening = openings.get(key) ?? {
        session: untilFirst([stop], (either) => open(key, target, either), ms),
        stop,
        waiting: 0,
      };
      openings.set(key, opening);
      opening.waiting++;
      try {
        return await unlessAborted(signal, opening.session);
      } finally {
        if (--opening.waiting === 0) {
          openings.delete(key);
          opening.stop.abort("cancelled");
        }
      }
    },
  };
}

export type Sessions = ReturnType<typeof createSessions>;

/** The tenant's session that was used least recently, or that of any tenant if this one has none. */
function leastRecentFor(tenant: string, current: ReadonlyMap<string, Session>): Session | null {
  const all = [...current.values()];
  return all.find(({ target }) => target.tenant === tenant) ?? all[0] ?? null;
}

/** Sends a session's own requests: `initialize`, `notifications/initialized`, `notifications/cancelled` and DELETE. */
export function createMcpWire({ outbound, settings, memory }: Upstreams) {
  const slots = createFairQueue(createFairShare({ size: MAX.mcpSideRequests }));

  /** Runs a step with memory for its response. For the share of that memory each URL counts as an agent. */
  async function withMemory<T>(
    signal: StopSignal,
    { tenant, url }: SessionTarget,
    step: (context: CallContext) => Promise<T>,
  ): Promise<T> {
    const hold = memory.hold(tenant, url, signal);
    const bounded = { ...settings, max_response_bytes: Math.min(settings.max_response_bytes, MAX.initializeBytes) };
    try {
      return await step({ outbound, settings: bounded, signal, trace: newTrace(), hold });
    } finally {
      hold.release();
    }
  }

  /** Runs a step that no call waits for. Rejects, without running it, if the tenant gets no slot for it in time. */
  async function inBackground(target: SessionTarget, step: (context: CallContext) => Promise<void>): Promise<void> {
    const signal = AbortSignal.timeout(SIDE_TIMEOUT_MS);
    const { tenant, url } = target;
    await enter(slots, { tenant, agent: url, amount: 1 }, signal);
    await withMemory(signal, target, step).finally(() => slots.giveBack(tenant, url, 1));
  }

  /** Never rejects. @param message null to delete the session */
  const tell = (target: SessionTarget, session: Opened, message: object | null): Promise<void> =>
    inBackground(target, (context) => sendAndDrain(context, target, session, message)).catch(() => {});

  return {
    /** Null when the server could not be initialized. May still resolve with a session after the signal. Never rejects. */
    open: (target: SessionTarget, signal: StopSignal): Promise<Opened | null> =>
      withMemory(signal, target, (context) => initialize(context, target)).catch(() => null),
    /** Never rejects. */
    close: (target: SessionTarget, session: Opened) => tell(target, session, null),
    /**
     * Tells the server that nobody waits for a request, which a closed connection does not mean in MCP. Never rejects.
     * @param requestId the id as it was sent, JSON text
     */
    abandon(target: SessionTarget, session: Opened, requestId: string) {
      const params = { requestId: JSON.parse(requestId) as unknown };
      return tell(target, session, { method: "notifications/cancelled", params });
    },
  };
}

export type McpWire = ReturnType<typeof createMcpWire>;

async function initialize(context: CallContext, target: SessionTarget): Promise<Opened | null> {
  const clientInfo = { name: "tollgate", version: VERSION };
  const params = { protocolVersion: target.offer, capabilities: {}, clientInfo };
  const response = await sendTo(context, target, null, { id: INITIALIZE_ID, method: "initialize", params });
  const version = readNegotiated(await readAnswer(context, response));
  const id = response.headers.get(SESSION_HEADER);
  if (!response.ok || version === null || (id !== null && !TOKEN.test(id))) return null;
  const opened: Opened = { id, version };
  // A failure is ignored: the session exists all the same, and has to be closed later.
  await sendAndDrain(context, target, opened, { method: "notifications/initialized" }).catch(() => {});
  return opened;
}

/** @param message null to delete the session */
async function sendAndDrain(context: CallContext, target: SessionTarget, session: Opened, message: object | null) {
  await readStart(context, await sendTo(context, target, session, message), 0);
}

function sendTo(context: CallContext, target: SessionTarget, session: Opened | null, message: object | null) {
  return send(context, {
    url: target.url,
    method: message === null ? "DELETE" : "POST",
    headers: [...(message === null ? [] : MCP_HEADERS), ...sessionHeaders(session), ...targetHeaders(target)],
    body: message && encodeRpc(message),
  });
}

function targetHeaders({ via, credential }: SessionTarget): Array<[string, string]> {
  return [...(via === null ? [] : [["via", via] as [string, string]]), ...credentialHeaders(credential)];
}

export function sessionHeaders(session: Opened | null): Array<[string, string]> {
  if (session === null) return [];
  const version: [string, string] = [VERSION_HEADER, session.version];
  return session.id === null ? [version] : [version, [SESSION_HEADER, session.id]];
}

/** The message in response to `initialize`; empty if it is none. */
async function readAnswer(context: CallContext, response: Answer): Promise<Uint8Array> {
  const wireId = String(INITIALIZE_ID);
  const isEvents = isEventStream(response);
  const message = await (isEvents ? readStreamAnswer : readMessage)(context, response, {
    wireId,
    callerId: encoder.encode(wireId),
    captureBytes: MAX.initializeBytes,
    isHashed: false,
    dropsOthers: isEvents,
  });
  return message.answer() === null ? new Uint8Array() : message.body().start;
}

function readNegotiated(message: Uint8Array): string | null {
  if (message.length === 0) return null;
  const { result } = JSON.parse(new TextDecoder().decode(message)) as {
    result?: { protocolVersion?: unknown };
  };
  const version = result?.protocolVersion;
  return typeof version === "string" && TOKEN.test(version) ? version : null;
}
