// The port of the gateway. Bun's server accepts every connection for which there is a descriptor, and reports none. A
// flood of them would leave no descriptor for upstream calls and the database; and where there are many descriptors, 16
// KiB of an unfinished head on each would fill the memory. So near a part of them the holder of most connections loses
// some, the longest unanswered first: who comes to make a request sends it within milliseconds. A holder is a tenant, of
// the connections on which its token came last, since behind one proxy all have its address; those without a token are
// held by the strangers of their network, and by all strangers together where no network has much more than others. The
// port is closed, which closes idle connections too, only where nothing can be ended: calls under way take everything, or
// no system library was found. Bun allows 12 s for a first head, and the silence limit for later ones (measured).
import { closeSync, openSync, readFileSync } from "node:fs";
import type { Log } from "../core/log.ts";
import { listenProblem } from "../core/startup.ts";
import { MAX } from "../kernel/limits.ts";
import {
  connectionsAt,
  endConnection,
  letMoreWait,
  type OpenConnection,
  peerName,
  refuseHandshakes,
} from "./bun/socket-options.ts";

/** If the process may open fewer, one in so many is kept for upstream calls, the database and files. */
const KEPT_PART = 8;
/** One in so many must be free before the port opens again, so that it does not open for a single connection. */
const FREED_PART = 64;
/** Descriptors that a look opens to find out how many are in use: 48 take 0.3 ms, and 8 are enough while most are free. */
const [PROBED, PROBED_IN_CALM] = [48, 8];
/** When fewer than one in so many are left, the holder of most loses as many; twice as early they are counted. */
const ZONE_PART = 16;
/** Descriptors in a window. To look at one takes 2 ms. */
const WINDOW = 1_024;
/** Of one look, while more has to be known or ended, else one. */
const WINDOWS_MAX = 4;
/** How many times as many as the others have on average a holder has before it loses any. */
const MUCH_MORE = 5 / 4;
/**
 * Of so many requests between two looks it is noted whose they are; of all, when more descriptors are in use than one in
 * `ZONE_PART`. To note one takes 0.7 µs (measured), so that these take 0.4 percent of the time. A burst of calls of which
 * few were noted would look like strangers that send no request.
 */
const NOTED = 256;

export interface ListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** Whether other processes of the same user may listen on the port as well (SO_REUSEPORT). */
  readonly reusePort: boolean;
  /** Most descriptors that the process may have open: see `mostOpen`. */
  readonly openMax: number;
  /** After so long without a byte a connection is closed. */
  readonly idleSeconds: number;
  /** @param owned tells the tenant of a request that is not answered yet */
  readonly answer: (request: Request, server: Bun.Server<undefined>, owned: Owned) => Response | Promise<Response>;
  readonly log: Log;
}

type Owned = (request: Request, tenant: string) => void;

export type Listener = ReturnType<typeof listen>;

/** @throws StartupProblem when it can't have its address */
export function listen(options: ListenerOptions) {
  const { openMax, log } = options;
  const first = serve(options, options.port, owned);
  const port = first.server.port ?? options.port;
  let listening: OpenPort | null = first;
  /** Servers that no longer listen but still have connections. */
  const closing = new Map<Bun.Server<undefined>, Promise<void>>();
  const toldAt = new Map<string, number>();
  const zone = Math.max(PROBED, Math.ceil(openMax / ZONE_PART));
  const census = createCensus(port, openMax, zone);
  /** How many descriptors the next look opens, and how many requests may be noted before it. */
  let [probed, notes] = [PROBED_IN_CALM, NOTED];

  function owned(request: Request, tenant: string): void {
    if (notes <= 0) return;
    notes--;
    const peer = first.server.requestIP(request);
    if (peer !== null) census.note(peerName(peer), tenant);
  }

  function tell(level: "warn" | "error", event: string, fields = {}): void {
    const now = performance.now();
    // Anybody can cause these log lines, so each is written this often at most.
    if (now - (toldAt.get(event) ?? Number.NEGATIVE_INFINITY) < 10_000) return;
    toldAt.set(event, now);
    log[level](event, { open_files_max: openMax, ...fields });
  }

  /** What is under way goes on, and its answer ends its connection. The idle ones are closed now, in 9 µs each (measured). */
  function close({ server }: OpenPort): void {
    listening = null;
    closing.set(
      server,
      server.stop().finally(() => closing.delete(server)),
    );
  }

  function look(): void {
    const freed = Math.ceil(openMax / FREED_PART);
    const used = leastInUse(listening === null ? Math.max(PROBED, freed) : probed);
    const { count, tenant, isCrowded, isRelieved } = census.relieve(used);
    [probed, notes] = used > zone || isCrowded ? [PROBED, Number.POSITIVE_INFINITY] : [PROBED_IN_CALM, NOTED];
    if (count > 0) tell("warn", "connections_ended", { count, tenant });
    if (listening === null) {
      if (used <= openMax - freed) reopen();
    } else if (used >= openMax && !isRelieved) {
      close(listening);
      tell("warn", "connections_refused");
    }
  }

  function reopen(): void {
    try {
      listening = serve(options, port, owned);
    } catch (error) {
      tell("error", "listen_failed", { error });
    }
  }

  const looking = setInterval(look, 50);
  return {
    port,
    /**
     * Where others share the port: from now on new connections are theirs, and those that have come here are accepted. To
     * close the port would reset those that still wait. A client whose handshake is refused tries again after a second.
     */
    async leave(): Promise<void> {
      if (!options.reusePort || listening === null || listening.descriptor === null) return;
      refuseHandshakes(listening.descriptor);
      // A handshake that has begun ends in this time, in most networks.
      await Bun.sleep(50);
    },
    /** Listens no more. Resolves when every connection is gone, which `now` sees to. */
    async stop(now: boolean = false): Promise<void> {
      clearInterval(looking);
      if (listening !== null) close(listening);
      if (now) for (const server of closing.keys()) void server.stop(true);
      await Promise.all(closing.values());
    },
  };
}

interface OpenPort {
  readonly server: Bun.Server<undefined>;
  /** Null where none was found. */
  readonly descriptor: number | null;
}

function serve(options: ListenerOptions, port: number, owned: Owned): OpenPort {
  const from = lowestFree();
  const server = serving(options, port, owned);
  return { server, descriptor: letMoreWait(from, options.openMax) };
}

function serving({ host, reusePort, idleSeconds, answer }: ListenerOptions, port: number, owned: Owned) {
  try {
    return Bun.serve({
      hostname: host,
      port,
      development: false,
      // Left out, `development: false` makes Bun share the port with all who do so (measured): two gateways that
      // were never meant to would answer on it by turns.
      reusePort,
      idleTimeout: idleSeconds,
      // Each route has its own limit, and answers as it should when that is passed.
      maxRequestBodySize: Number.MAX_SAFE_INTEGER,
      fetch: (request, server) => answer(request, server, owned),
    });
  } catch (cause) {
    const shared = "; gateways of one user share a port when all of them have TOLLGATE_REUSE_PORT=1";
    throw listenProblem(host, port, "TOLLGATE_PORT", cause, shared);
  }
}

/** A descriptor that is opened now gets this number. */
function lowestFree(): number {
  const descriptor = openSync("/dev/null", "r");
  closeSync(descriptor);
  return descriptor;
}

/** Bun has raised the limit as far as it may. Where nothing tells of one (macOS), it is above ours. */
export function mostOpen(): number {
  const limit = /^Max open files +(\d+)/m.exec(readLimits())?.[1];
  return limit === undefined ? MAX.openFiles : Math.min(MAX.openFiles, Math.floor(Number(limit) * (1 - 1 / KEPT_PART)));
}

function readLimits(): string {
  try {
    return readFileSync("/proc/self/limits", "utf8");
  } catch {
    return "";
  }
}

/**
 * How many descriptors are in use at least. A new one gets the lowest free number, so those below the last of these that
 * are opened are in use: counting all took 40 ms for 15,000, and each of these takes 3 µs (measured).
 */
function leastInUse(probed: number): number {
  const opened: number[] = [];
  try {
    while (opened.length < probed) opened.push(openSync("/dev/null", "r"));
  } catch {
    return Number.POSITIVE_INFINITY;
  } finally {
    for (const descriptor of opened) closeSync(descriptor);
  }
  return (opened.at(-1) ?? 0) + 1 - probed;
}

/** Stands before the tenant in the name of a holder, and in no network. */
const TENANT = "=";
const isTenant = (holder: string): boolean => holder.startsWith(TENANT);

interface HeldConnection extends OpenConnection {
  readonly holder: string;
}

/** Whose connections are ended, how many at most, and the tenant if they are of one that has much more than others. */
interface Losers {
  has(holder: string): boolean;
  readonly most: number;
  readonly tenant?: string;
}

/** @param holders one for each connection */
function losersAmong(holders: readonly string[], zone: number): Losers {
  const tenants = countsOf(holders.filter(isTenant));
  const networks = countsOf(holders.filter((holder) => !isTenant(holder)));
  const isOfTenant = tenants.held > networks.all;
  const { most, held } = isOfTenant ? tenants : networks;
  // A tenant is compared with those who have none yet too, so it makes room even alone.
  const average = isOfTenant
    ? (holders.length - held) / (tenants.by.size + networks.by.size)
    : (networks.all - held) / (networks.by.size - 1);
  // Without the second condition a caller with thirty would lose them to thousands of networks with one each.
  if (held > average * MUCH_MORE && held >= zone) {
    const its = { has: (holder: string) => holder === most, most: held - average };
    return isOfTenant ? { ...its, tenant: most.slice(TENANT.length) } : its;
  }
  const large = networks.all < zone ? tenants.all / Math.max(1, tenants.by.size) : Number.POSITIVE_INFINITY;
  return { has: (holder) => (tenants.by.get(holder) ?? large) >= large, most: holders.length };
}

function countsOf(holders: readonly string[]) {
  const by = new Map<string, number>();
  for (const holder of holders) by.set(holder, (by.get(holder) ?? 0) + 1);
  const [most, held] = [...by].reduce((largest, each) => (each[1] > largest[1] ? each : largest), ["", 0]);
  return { all: holders.length, by, most, held };
}

/** Ends so many of the connections at most, and leaves the newer half, since callers may just have come. @returns how many */
function endSome(seen: readonly HeldConnection[], count: number, { has, most, tenant }: Losers): number {
  // A stranger's whole request has been answered; a tenant's may be a call under way.
  const isCall = ({ holder, isUnanswered }: HeldConnection) => isTenant(holder) && isUnanswered;
  const theirs = seen.filter((each) => has(each.holder) && (tenant !== undefined || !isCall(each)));
  const inTurn = theirs.sort((a, b) => Number(isCall(a)) - Number(isCall(b)) || b.unansweredMs - a.unansweredMs);
  const ended = inTurn.slice(0, Math.ceil(Math.min(count, most, theirs.length / 2)));
  for (const connection of ended) endConnection(connection);
  return ended.length;
}

/**
 * Who holds the connections, a tenant or the strangers of a network. All descriptors are too many for one look, so they
 * are looked at by windows, and what each window showed stands until the next time. Nobody loses any before all were seen.
 */
function createCensus(port: number, openMax: number, zone: number) {
  /** The holder of each connection. */
  const windows: string[][] = [];
  const windowCount = Math.ceil(openMax / WINDOW);
  let next = 0;
  let crowdedAt = Number.NEGATIVE_INFINITY;
  /** So many windows, one after the other, had nothing to end. */
  let barren = 0;
  /** The tenants of connections by their peers: of those noted or seen since all were last counted, and of earlier ones. */
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
    // All that are open have been seen by now.
    if (next === 0) [owners, earlier] = [new Map(), owners];
    return seen;
  }

  /** Forgets the holders. When many tenants are noted, it looks on instead, to forget those of connections that are gone. */
  function rest() {
    barren = 0;
    if (owners.size > openMax) seeNext();
    else {
      windows.length = 0;
      next = 0;
    }
    return { count: 0, tenant: undefined, isCrowded: false, isRelieved: true };
  }

  return {
    /** Notes the tenant whose request came last on a connection. */
    note: (peer: string, tenant: string): void => void owners.set(peer, TENANT + tenant),
    /** @returns how many connections were ended, of which tenant if of one, and whether some can be */
    relieve(used: number) {
      if (used > openMax - 2 * zone) crowdedAt = performance.now();
      // Descriptors that were freed hide for a while how many are in use.
      if (performance.now() - crowdedAt > 1_000) return rest();
      const excess = used - (openMax - zone);
      const looks = excess > 0 || windows.length < windowCount ? Math.min(WINDOWS_MAX, windowCount) : 1;
      const seen = Array.from({ length: looks }, seeNext).flat();
      if (excess <= 0 || windows.length < windowCount) return { count: 0, isCrowded: true, isRelieved: true };
      const losers = losersAmong(windows.flat(), zone);
      const count = endSome(seen, excess, losers);
      barren = count > 0 ? 0 : barren + looks;
      return { count, tenant: losers.tenant, isCrowded: true, isRelieved: barren < windowCount };
    },
  };
}

/** A host as it stands in a URL. */
export function hostPart(host: string): string {
  return host.includes(":") ? `[${host}]` : host;
}
