// The upstream sessions of MCP servers: opened once per key however many calls wait for it, kept while they
// are used, closed when idle, forgotten or too many of their tenant. A session is never shared by two keys.
import { endsWithin } from "../../../concurrency/deadline.ts";
import { createFairShare } from "../../../concurrency/fair-share.ts";

/** Where a session lives, and by whose authority. */
export interface SessionTarget {
  readonly tenant: string;
  readonly url: string;
  readonly credential: { readonly name: string; readonly value: string } | null;
  /** The protocol version to offer. */
  readonly offer: string;
  /** Of the call that opens it, so that a session that leads back here is part of its loop. */
  readonly via: string | null;
}

/** What `initialize` came to. */
export interface Opened {
  /** Null when the server keeps no sessions. */
  readonly id: string | null;
  /** The protocol version that was negotiated. */
  readonly version: string;
}

export interface Session extends Opened {
  /** An id for the next request: none comes twice in a session. */
  nextId(): number;
}

export interface SessionWire {
  /** Null when the server could not be initialized. Never rejects. */
  open(target: SessionTarget): Promise<Opened | null>;
  /** Never rejects. */
  close(target: SessionTarget, session: Opened): Promise<void>;
}

export interface SessionLimits {
  readonly sessions_max: number;
  readonly idle_ms: number;
  /** For how long a server that opened no session counts as one without. */
  readonly sessionless_ms: number;
}

export interface Sessions {
  /** The session of a key, after the one that is just being opened; null when there is none. */
  find(key: string): Promise<Session | null>;
  /**
   * A new session in place of `refused`. Calls that were refused together share one: whoever comes later
   * gets what the first opened.
   *
   * @param gone the server has forgotten `refused`, so there is nothing to close
   */
  renew(key: string, target: SessionTarget, refused: Session | null, gone: boolean): Promise<Session | null>;
  /** While a call uses a session it is not closed. */
  use<T>(session: Session | null, work: () => Promise<T>): Promise<T>;
  /** Closes what has been idle for too long. */
  sweep(): void;
  /** Closes all, used or not; resolves when the servers know, or after `timeoutMs`. */
  close(timeoutMs: number): Promise<void>;
}

interface KeptSession {
  readonly key: string;
  readonly target: SessionTarget;
  readonly session: Session;
  running: number;
  usedAt: number;
  readonly openedAt: number;
  /** No longer offered to calls; closed when the last one that uses it has ended. */
  isRetired: boolean;
}

const DEFAULT_LIMITS: SessionLimits = { sessions_max: 1000, idle_ms: 600_000, sessionless_ms: 60_000 };

function createEntry(key: string, target: SessionTarget, opened: Opened): KeptSession {
  // 1 was the id of `initialize`.
  let last = 1;
  const session: Session = { ...opened, nextId: () => ++last };
  const now = performance.now();
  return { key, target, session, running: 0, usedAt: now, openedAt: now, isRetired: false };
}

export function createSessions(wire: SessionWire, limits: SessionLimits = DEFAULT_LIMITS): Sessions {
  /** In the order of last use, the longest unused first. */
  const entries = new Map<string, KeptSession>();
  const bySession = new Map<Session, KeptSession>();
  const share = createFairShare({ size: limits.sessions_max });
  const opening = new Map<string, Promise<Session | null>>();
  const closing = new Set<Promise<void>>();

  function current(key: string): KeptSession | null {
    const entry = entries.get(key);
    if (entry === undefined) return null;
    const age = performance.now() - entry.openedAt;
    if (entry.session.id === null && age > limits.sessionless_ms) {
      retire(entry, true);
      return null;
    }
    return entry;
  }

  function retire(entry: KeptSession, gone: boolean): void {
    if (entries.get(entry.key) === entry) {
      entries.delete(entry.key);
      share.giveBack(entry.target.tenant);
    }
    if (gone) bySession.delete(entry.session);
    entry.isRetired = true;
    closeUnused(entry);
  }

  function closeUnused(entry: KeptSession): void {
    if (entry.isRetired && entry.running === 0) closeEntry(entry);
  }

  function closeEntry(entry: KeptSession): void {
    if (!bySession.delete(entry.session) || entry.session.id === null) return;
    const closed = wire.close(entry.target, entry.session).finally(() => closing.delete(closed));
    closing.add(closed);
  }

  async function closeAll(): Promise<void> {
    const last = Promise.allSettled(opening.values());
    for (const entry of bySession.values()) closeEntry(entry);
    await last;
    for (const entry of bySession.values()) closeEntry(entry);
    await Promise.allSettled(closing);
  }

  async function open(key: string, target: SessionTarget): Promise<Session | null> {
    const opened = await wire.open(target);
    opening.delete(key);
    if (opened === null) return null;
    const entry = createEntry(key, target, opened);
    while (share.take(target.tenant) !== null) {
      const oldest = oldestFor(target.tenant, entries);
      if (oldest !== null) retire(oldest, false);
    }
    entries.set(key, entry);
    bySession.set(entry.session, entry);
    return entry.session;
  }

  return {
    async find(key) {
      return current(key)?.session ?? (await opening.get(key)) ?? null;
    },
    renew(key, target, refused, gone) {
      const under = opening.get(key);
      if (under !== undefined) return under;
      const entry = current(key);
      if (entry !== null && entry.session !== refused) return Promise.resolve(entry.session);
      if (entry !== null) retire(entry, gone);
      const opened = open(key, target);
      opening.set(key, opened);
      return opened;
    },
    async use(session, work) {
      const entry = session === null ? undefined : bySession.get(session);
      if (entry === undefined) return work();
      entry.running++;
      try {
        return await work();
      } finally {
        entry.running--;
        entry.usedAt = performance.now();
        // Moved to the end of the order of use.
        if (entries.get(entry.key) === entry && entries.delete(entry.key)) entries.set(entry.key, entry);
        closeUnused(entry);
      }
    },
    sweep() {
      const oldest = performance.now() - limits.idle_ms;
      for (const entry of entries.values()) {
        if (entry.running === 0 && entry.usedAt <= oldest) retire(entry, false);
      }
    },
    close: async (timeoutMs) => void (await endsWithin(timeoutMs, closeAll())),
  };
}

/** The longest unused one of the tenant, or of all when it has none. */
function oldestFor(tenant: string, entries: ReadonlyMap<string, KeptSession>): KeptSession | null {
  const all = [...entries.values()];
  return all.find(({ target }) => target.tenant === tenant) ?? all[0] ?? null;
}
