// The port of the gateway. Bun's server accepts every connection for which there is a descriptor, and reports none. A
// flood of them would leave no descriptor for upstream calls and the database; and where there are many descriptors, 16
// KiB of an unfinished head on each would fill the memory. So near a part of them the address with most connections loses
// some. The port is closed, which closes idle connections too, only where no address holds much more than others: behind
// one proxy all connections have its address, and callers who hold few can't be told from others. Bun allows 12 s for a
// first head, and the silence limit for later ones (measured).
import { closeSync, openSync, readFileSync } from "node:fs";
import type { Log } from "../core/log.ts";
import { listenProblem } from "../core/startup.ts";
import {
  connectionsAt,
  endConnection,
  letMoreWait,
  type OpenConnection,
  refuseHandshakes,
} from "./bun/socket-options.ts";

/**
 * With this many descriptors in use, callers' and upstream ones together, no connection is accepted. All calls and
 * streams that may run take 28,672; unfinished heads on all of these take 512 MiB (16 KiB each, measured).
 */
const OPEN_MAX = 32_768;
/** If the process may open fewer, one in so many is kept for upstream calls, the database and files. */
const KEPT_PART = 8;
const LOOK_MS = 50;
/** A handshake that has begun ends in this time, in most networks. */
const HANDSHAKE_MS = 50;
/** One in so many must be free before the port opens again, so that it does not open for a single connection. */
const FREED_PART = 64;
/** So many are opened to see how many are in use, which takes 0.5 ms; fewer are opened between two looks. */
const PROBED = 48;
/** When fewer than one in so many are left, the address that holds most loses as many; twice as early they are counted. */
const ZONE_PART = 16;
/** Descriptors in a window. To look at one takes 2 ms. */
const WINDOW = 1_024;
/** Of one look, while more has to be known or ended. */
const WINDOWS_MAX = 4;
/** How many times as many as the others have on average an address holds before it loses any. */
const MUCH_MORE = 5 / 4;
/** Anybody can cause these log lines, so each is written this often at most. */
const LOG_EVERY_MS = 10_000;

export interface ListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** Whether other processes of the same user may listen on the port as well (SO_REUSEPORT). */
  readonly reusePort: boolean;
  /** After so long without a byte a connection is closed. */
  readonly idleSeconds: number;
  readonly answer: (request: Request, server: Bun.Server<undefined>) => Response | Promise<Response>;
  readonly log: Log;
}

export type Listener = ReturnType<typeof listen>;

/** @throws StartupProblem when it can't have its address */
export function listen(options: ListenerOptions) {
  const { log } = options;
  const openMax = mostOpen();
  const first = serve(options, options.port);
  const port = first.server.port ?? options.port;
  let listening: OpenPort | null = first;
  /** Servers that no longer listen but still have connections. */
  const closing = new Map<Bun.Server<undefined>, Promise<void>>();
  const toldAt = new Map<string, number>();
  const zone = Math.max(PROBED, Math.ceil(openMax / ZONE_PART));
  const census = createCensus(port, openMax, zone);

  function tell(level: "warn" | "error", event: string, fields = {}): void {
    const now = performance.now();
    if (now - (toldAt.get(event) ?? Number.NEGATIVE_INFINITY) < LOG_EVERY_MS) return;
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
    const used = leastInUse(listening === null ? Math.max(PROBED, freed) : PROBED);
    const crowded = used > openMax - 2 * zone ? census.relieve(used - (openMax - zone)) : census.forget();
    if (crowded.ended > 0) tell("warn", "connections_ended", { count: crowded.ended });
    if (listening === null) {
      if (used <= openMax - freed) reopen();
    } else if (used >= openMax && !crowded.isRelieved) {
      close(listening);
      tell("warn", "connections_refused");
    }
  }

  function reopen(): void {
    try {
      listening = serve(options, port);
    } catch (error) {
      tell("error", "listen_failed", { error });
    }
  }

  const looking = setInterval(look, LOOK_MS);
  return {
    port,
    /**
     * Where others share the port: from now on new connections are theirs, and those that have come here are accepted. To
     * close the port would reset those that still wait. A client whose handshake is refused tries again after a second.
     */
    async leave(): Promise<void> {
      if (!options.reusePort || listening === null || listening.descriptor === null) return;
      refuseHandshakes(listening.descriptor);
      await Bun.sleep(HANDSHAKE_MS);
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

function serve(options: ListenerOptions, port: number): OpenPort {
  const from = lowestFree();
  const server = serving(options, port);
  return { server, descriptor: letMoreWait(from, mostOpen()) };
}

function serving({ host, reusePort, idleSeconds, answer }: ListenerOptions, port: number): Bun.Server<undefined> {
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
      fetch: answer,
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
function mostOpen(): number {
  const limit = /^Max open files +(\d+)/m.exec(readLimits())?.[1];
  return limit === undefined ? OPEN_MAX : Math.min(OPEN_MAX, Math.floor(Number(limit) * (1 - 1 / KEPT_PART)));
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

/**
 * Who holds how many connections. All descriptors are too many for one look, so they are counted by windows, and each
 * window's last count stands until the next one.
 */
function createCensus(port: number, openMax: number, zone: number) {
  const windows: Map<string, number>[] = [];
  const total = new Map<string, number>();
  const windowCount = Math.ceil(openMax / WINDOW);
  let next = 0;

  function add(address: string, count: number): void {
    const sum = (total.get(address) ?? 0) + count;
    if (sum === 0) total.delete(address);
    else total.set(address, sum);
  }

  /** Counts the next window, and tells its connections. */
  function countNext(): OpenConnection[] {
    const window = next;
    next = (next + 1) % windowCount;
    for (const [address, held] of windows[window] ?? []) add(address, -held);
    const connections = connectionsAt(port, window * WINDOW, WINDOW);
    const byAddress = Map.groupBy(connections, ({ address }) => address);
    windows[window] = new Map([...byAddress].map(([address, its]) => [address, its.length]));
    for (const [address, held] of windows[window]) add(address, held);
    return connections;
  }

  /** The address that holds most, and how many more than others on average. Null where that is little. */
  function most(): { address: string; more: number } | null {
    let all = 0;
    let [address, held] = ["", 0];
    for (const [each, its] of total) {
      all += its;
      if (its > held) [address, held] = [each, its];
    }
    const average = (all - held) / (total.size - 1);
    // Without the second condition a caller with thirty would lose them to thousands of addresses with one each.
    return total.size > 1 && held > average * MUCH_MORE && held >= zone ? { address, more: held - average } : null;
  }

  /** Ends so many of the connections at most, the longest silent first. @returns how many */
  function endSome(connections: OpenConnection[], count: number): number {
    const largest = most();
    if (largest === null || count <= 0) return 0;
    const its = connections
      .filter(({ address }) => address === largest.address)
      .sort((a, b) => b.silentMs - a.silentMs);
    const ended = its.slice(0, Math.ceil(Math.min(count, largest.more)));
    for (const connection of ended) endConnection(connection);
    return ended.length;
  }

  return {
    /** @returns how many connections were ended, and whether an address can lose some or not all are counted yet */
    relieve(excess: number) {
      let ended = 0;
      for (let looked = 0; looked < Math.min(WINDOWS_MAX, windowCount); looked++) {
        ended += endSome(countNext(), excess - ended);
        if (windows.length === windowCount && ended >= excess) break;
      }
      return { ended, isRelieved: windows.length < windowCount || most() !== null };
    },
    forget() {
      windows.length = 0;
      total.clear();
      next = 0;
      return { ended: 0, isRelieved: false };
    },
  };
}

/** A host as it stands in a URL. */
export function hostPart(host: string): string {
  return host.includes(":") ? `[${host}]` : host;
}
