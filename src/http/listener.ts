// The port of the gateway, protected against floods of connections. Bun's server accepts a connection as long as there is a file
// descriptor, and tells us of none. A flood would leave no descriptor for upstream calls and the database; and where there are
// many descriptors, 16 KiB of an unfinished head on each connection would fill the memory. So when descriptors run short, the
// holder of most connections loses some, the longest unanswered first, since an honest client sends its request within
// milliseconds. The holder of a connection is the tenant whose token came last on it, since behind one proxy all clients share
// an address. Connections without a token are held by their network, or, where no network has much more than others, by all
// strangers together. The port is closed, and with it idle connections, only if none can be ended: all carry calls in flight,
// or no system library was found. Bun allows 12 s for a first head, and the idle timeout for later ones (measured).
import { closeSync, openSync, readFileSync } from "node:fs";
import { listenProblem } from "../core/startup.ts";
import { MAX } from "../kernel/limits.ts";
import {
  connectionsAt,
  endConnection,
  enlargeBacklog,
  type OpenConnection,
  peerName,
  refuseHandshakes,
} from "./bun/socket-options.ts";
import type { PortAddress } from "./http1.ts";

/** If the process may open fewer files than MAX.openFiles, one of this many is reserved for upstreams, database and files. */
const RESERVED_PART = 8;
/** One of this many must be free before the port opens again, so that it does not open for a single connection. */
const REOPEN_PART = 64;
/** Descriptors that a sweep opens to find out how many are in use: 48 take 0.3 ms, and 8 are enough while most are free. */
const [PROBES, PROBES_IN_CALM] = [48, 8];
/** When fewer than one of this many is free, connections are ended; at twice that, their holders are counted. */
const MARGIN_PART = 16;
/** Descriptors that are examined together, in 2 ms. */
const WINDOW = 1_024;
/** Windows that a sweep examines while connections are still to be counted or ended; otherwise one. */
const WINDOWS_MAX = 4;
/** A holder loses connections when it has more than this many times the average of the others. */
const MUCH_MORE = 5 / 4;
/**
 * Requests between two sweeps whose tenant is noted, in 0.4 percent of the time; all are noted when more than one of `MARGIN_PART`
 * descriptors is in use, since a burst of calls of which few were noted would look like strangers that send no request.
 */
const NOTES = 256;

export interface ListenerOptions extends Omit<PortAddress, "variable"> {
  /** Whether a free port is taken where another process has this one. */
  readonly orFreePort?: boolean;
  /** Whether other processes of the same user may listen on the port as well (SO_REUSEPORT). */
  readonly reusePort: boolean;
  /** The most descriptors that the process may have open: see `mostOpen`. */
  readonly openMax: number;
  /** A connection is closed after this time without a byte. */
  readonly idleSeconds: number;
  /** @param noteOwner to be called with the tenant of the request before it is answered */
  answer(request: Request, server: Bun.Server<undefined>, noteOwner: NoteOwner): Response | Promise<Response>;
}

type NoteOwner = (request: Request, tenant: string) => void;

export type Listener = ReturnType<typeof listen>;

/** @throws StartupProblem when it can't listen on its address */
export function listen(options: ListenerOptions) {
  const { openMax, log } = options;
  const first = serveFirst(options, noteOwner);
  const port = first.server.port ?? options.port;
  let listening: OpenPort | null = first;
  /** Servers that no longer listen but still have connections. */
  const closing = new Map<Bun.Server<undefined>, Promise<void>>();
  const loggedAt = new Map<string, number>();
  const margin = Math.max(PROBES, Math.ceil(openMax / MARGIN_PART));
  const census = createCensus(port, openMax, margin);
  /** How many descriptors the next sweep opens, and how many requests may be noted before it. */
  let [probes, notes] = [PROBES_IN_CALM, NOTES];

  function noteOwner(request: Request, tenant: string): void {
    if (notes <= 0) return;
    notes--;
    const peer = first.server.requestIP(request);
    if (peer !== null) census.note(peerName(peer), tenant);
  }

  function logRarely(level: "warn" | "error", event: string, fields = {}): void {
    const now = performance.now();
    // Anybody can cause these log lines, so each event is logged once in ten seconds at most.
    if (now - (loggedAt.get(event) ?? Number.NEGATIVE_INFINITY) < 10_000) return;
    loggedAt.set(event, now);
    log[level](event, { open_files_max: openMax, ...fields });
  }

  /** Closes the port and idle connections, in 9 µs each (measured). Responses in flight end their own connections. */
  function close({ server }: OpenPort): void {
    listening = null;
    const stopped = server.stop().finally(() => closing.delete(server));
    closing.set(server, stopped);
  }

  function sweep(): void {
    const free = Math.ceil(openMax / REOPEN_PART);
    const used = leastInUse(listening === null ? Math.max(PROBES, free) : probes);
    const { count, tenant, isCrowded, isRelieved } = census.relieve(used);
    [probes, notes] = used > margin || isCrowded ? [PROBES, Number.POSITIVE_INFINITY] : [PROBES_IN_CALM, NOTES];
    if (count > 0) logRarely("warn", "connections_ended", { count, tenant });
    if (listening === null) {
      if (used <= openMax - free) reopen();
    } else if (used >= openMax && !isRelieved) {
      close(listening);
      logRarely("warn", "connections_refused");
    }
  }

  function reopen(): void {
    try {
      listening = serve(options, port, noteOwner);
    } catch (error) {
      logRarely("error", "listen_failed", { error });
    }
  }

  const sweeping = setInterval(sweep, 50);
  return {
    port,
    /**
     * Leaves a shared port: new connections go to the other processes, and those in its backlog are accepted, which to close the port
     * would reset. A client whose handshake is refused tries again after a second.
     */
    async leave(): Promise<void> {
      if (!options.reusePort || listening === null || listening.descriptor === null) return;
      refuseHandshakes(listening.descriptor);
      // In most networks a handshake that has begun is over by then.
      await Bun.sleep(50);
    },
    /** Stops listening. Resolves when every connection has closed; `now` closes them all. */
    async stop(now: boolean = false): Promise<void> {
      clearInterval(sweeping);
      if (listening !== null) close(listening);
      if (now) for (const server of closing.keys()) void server.stop(true);
      await Promise.all(closing.values());
    },
  };
}

interface OpenPort {
  readonly server: Bun.Server<undefined>;
  /** The listening socket; null when it was not found. */
  readonly descriptor: number | null;
}

function serveFirst(options: ListenerOptions, noteOwner: NoteOwner): OpenPort {
  try {
    return serve(options, options.port, noteOwner);
  } catch (error) {
    if (options.orFreePort !== true) throw error;
    return serve(options, 0, noteOwner);
  }
}

function serve(options: ListenerOptions, port: number, noteOwner: NoteOwner): OpenPort {
  const { host, reusePort, idleSeconds, answer, openMax } = options;
  const from = lowestFree();
  try {
    const server = Bun.serve({
      hostname: host,
      port,
      development: false,
      // Never omitted: with `development: false` Bun would then share the port (measured), so that two gateways that were never
      // meant to share one would answer on it by turns.
      reusePort,
      idleTimeout: idleSeconds,
      // Each route has a limit of its own, with its own error.
      maxRequestBodySize: Number.MAX_SAFE_INTEGER,
      fetch: (request, server) => answer(request, server, noteOwner),
    });
    return { server, descriptor: enlargeBacklog(from, openMax) };
  } catch (cause) {
    const shared = "; gateways of one user share a port when all of them have TOLLGATE_REUSE_PORT=1";
    throw listenProblem(host, port, "TOLLGATE_PORT", cause, shared);
  }
}

/** The number that the next opened descriptor will get. */
function lowestFree(): number {
  const descriptor = openSync("/dev/null", "r");
  closeSync(descriptor);
  return descriptor;
}

/** The most descriptors for connections. Bun has raised the system's limit as far as it may; that of macOS is above ours. */
export function mostOpen(): number {
  try {
    const limit = /^Max open files +(\d+)/m.exec(readFileSync("/proc/self/limits", "utf8"))?.[1] ?? "Infinity";
    return Math.min(MAX.openFiles, Math.floor(Number(limit) * (1 - 1 / RESERVED_PART)));
  } catch {
    return MAX.openFiles;
  }
}

/**
 * A lower bound of the descriptors in use: a new one gets the lowest free number, so all numbers below the last probe, except the
 * probes, are in use. A probe takes 3 µs; counting 15,000 descriptors took 40 ms (measured).
 */
function leastInUse(probes: number): number {
  const opened: number[] = [];
  try {
    while (opened.length < probes) opened.push(openSync("/dev/null", "r"));
  } catch {
    return Number.POSITIVE_INFINITY;
  } finally {
    for (const descriptor of opened) closeSync(descriptor);
  }
  return (opened.at(-1) ?? 0) + 1 - probes;
}

/** The prefix of a holder that is a tenant. No network's name begins with it. */
const TENANT = "=";
const isTenant = (holder: string): boolean => holder.startsWith(TENANT);

type HeldConnection = OpenConnection & { readonly holder: string };

/** Which holders lose connections, how many at most, and the tenant, if a single one has much more than others. */
type Eviction = Readonly<{ has(holder: string): boolean; most: number; tenant?: string }>;

/** @param holders one for each connection */
function chooseEviction(holders: readonly string[], margin: number): Eviction {
  const tenants = countsOf(holders.filter(isTenant));
  const networks = countsOf(holders.filter((holder) => !isTenant(holder)));
  const isOfTenant = tenants.held > networks.all;
  const { most, held } = isOfTenant ? tenants : networks;
  // A tenant's average includes strangers, so that even the only tenant makes room for newcomers.
  const average = isOfTenant
    ? (holders.length - held) / (tenants.by.size + networks.by.size)
    : (networks.all - held) / (networks.by.size - 1);
  // Without the second condition a caller with thirty connections would lose them to thousands of networks with one each.
  if (held > average * MUCH_MORE && held >= margin) {
    const its = { has: (holder: string) => holder === most, most: held - average };
    return isOfTenant ? { ...its, tenant: most.slice(TENANT.length) } : its;
  }
  const large = networks.all < margin ? tenants.all / Math.max(1, tenants.by.size) : Number.POSITIVE_INFINITY;
  return { has: (holder) => (tenants.by.get(holder) ?? large) >= large, most: holders.length };
}

function countsOf(holders: readonly string[]) {
  const by = new Map<string, number>();
  for (const holder of holders) by.set(holder, (by.get(holder) ?? 0) + 1);
  const [most, held] = [...by].reduce((largest, each) => (each[1] > largest[1] ? each : largest), ["", 0]);
  return { all: holders.length, by, most, held };
}

/** Ends at most `count` connections, but not the newer half, since callers may just have come. @returns how many */
function evict(seen: readonly HeldConnection[], count: number, { has, most, tenant }: Eviction): number {
  // An unanswered request of a tenant may be a call in flight; a stranger's complete request is answered at once.
  const isCall = ({ holder, isUnanswered }: HeldConnection) => isTenant(holder) && isUnanswered;
  const theirs = seen.filter((each) => has(each.holder) && (tenant !== undefined || !isCall(each)));
  const sorted = theirs.sort((a, b) => Number(isCall(a)) - Number(isCall(b)) || b.unansweredMs - a.unansweredMs);
  const ended = sorted.slice(0, Math.ceil(Math.min(count, most, theirs.length / 2)));
  for (const connection of ended) endConnection(connection);
  return ended.length;
}

/**
 * Counts who holds the connections: a tenant, or the strangers of a network. All descriptors are too many for one sweep, so they are
 * examined window by window. No connection is ended before all windows have been examined.
 */
function createCensus(port: number, openMax: number, margin: number) {
  /** The holders of the connections in each window. */
  const windows: string[][] = [];
  const windowCount = Math.ceil(openMax / WINDOW);
  let next = 0;
  let crowdedAt = Number.NEGATIVE_INFINITY;
  /** How many windows in a row had nothing to end. */
  let fruitless = 0;
  /** The tenants of connections by peer: those noted or seen since the last full count, and those from before it. */
  let [owners, earlier] = [new Map<string, string>(), new Map<string, string>()];

  function holderOf({ peer, network }: OpenConnection): string {
    const owner = owners.get(peer) ?? earlier.get(peer);
    if (owner !== undefined) owners.set(peer, owner);
    return owner ?? network;
  }

  function seeNext(): HeldConnection[] {
    const seen = connectionsAt(port, next * WINDOW, WINDOW).map((each) => ({ ...each, holder: holderOf(each) }));
    windows[next] = seen.map(({ holder }) => holder);
    next = (next + 1) % windowCount;
    // All open connections have been seen by now.
    if (next === 0) [owners, earlier] = [new Map(), owners];
    return seen;
  }

  /** Forgets the counts. When many tenants are noted, it goes on counting, to forget the tenants of closed connections. */
  function reset() {
    fruitless = 0;
    if (owners.size > openMax) seeNext();
    else {
      windows.length = 0;
      next = 0;
    }
    return { count: 0, tenant: undefined, isCrowded: false, isRelieved: true };
  }

  return {
    /** Notes the tenant of the latest request on a connection. */
    note: (peer: string, tenant: string): void => void owners.set(peer, TENANT + tenant),
    /** Ends connections if too many are open. @returns how many, whose (if one tenant's), and whether more can be ended */
    relieve(used: number) {
      if (used > openMax - 2 * margin) crowdedAt = performance.now();
      // Just after descriptors were freed, low numbers are free and `used` is far too low.
      if (performance.now() - crowdedAt > 1_000) return reset();
      const excess = used - (openMax - margin);
      const examined = excess > 0 || windows.length < windowCount ? Math.min(WINDOWS_MAX, windowCount) : 1;
      const seen = Array.from({ length: examined }, seeNext).flat();
      if (excess <= 0 || windows.length < windowCount) return { count: 0, isCrowded: true, isRelieved: true };
      const eviction = chooseEviction(windows.flat(), margin);
      const count = evict(seen, excess, eviction);
      fruitless = count > 0 ? 0 : fruitless + examined;
      return { count, tenant: eviction.tenant, isCrowded: true, isRelieved: fruitless < windowCount };
    },
  };
}

/** A host as it is written in a URL: IPv6 addresses in brackets. */
export const hostPart = (host: string): string => (host.includes(":") ? `[${host}]` : host);
