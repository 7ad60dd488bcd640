// The port of the gateway. Bun's server accepts every connection for which there is a descriptor, and reports none. A
// flood of them would leave no descriptor for upstream calls and the database; and where there are many descriptors, 16
// KiB of an unfinished head on each would fill the memory. So near a part of them the address with most connections loses
// some, and above it the port is closed until there is room, which closes idle connections too. Bun allows 12 s for a first head, and the silence limit for later ones (measured).
import { closeSync, openSync, readFileSync } from "node:fs";
import type { Log } from "../core/log.ts";
import { listenProblem } from "../core/startup.ts";
import { connectionsAt, endConnection, letMoreWait, refuseHandshakes } from "./socket-options.ts";

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
/** With so few descriptors left, some connections are ended before the port has to be closed. */
const NEARLY_FULL = 48;
/** Descriptors of one look, which takes a few milliseconds. */
const LOOKED_AT = 2_048;
/** One in so many of the connections that one address has in a look: more come in the time until the next one. */
const ENDED_PART = 2;
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
  /** The first descriptor of the next look at connections. */
  let lookedAt = 0;

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

  /** Few descriptors are left: whoever holds most connections loses some, the longest silent first. */
  function relieve(): boolean {
    const connections = connectionsAt(port, lookedAt, LOOKED_AT);
    lookedAt = lookedAt + LOOKED_AT < openMax ? lookedAt + LOOKED_AT : 0;
    const byAddress = Map.groupBy(connections, ({ address }) => address);
    // Behind one proxy all connections have its address, and callers who hold few can't be told from others.
    if (byAddress.size < 2) return false;
    const most = [...byAddress.values()].reduce((one, other) => (other.length > one.length ? other : one));
    const ended = most.toSorted((a, b) => b.silentMs - a.silentMs).slice(0, Math.ceil(most.length / ENDED_PART));
    for (const connection of ended) endConnection(connection);
    tell("warn", "connections_ended", { count: ended.length });
    return true;
  }

  function look(): void {
    const isRelieved = !areFree(NEARLY_FULL, openMax) && relieve();
    if (listening === null) reopen();
    else if (!isRelieved && !areFree(1, openMax)) {
      close(listening);
      tell("warn", "connections_refused");
    }
  }

  function reopen(): void {
    if (!areFree(Math.ceil(openMax / FREED_PART), openMax)) return;
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
      // Left out, `development: false` makes Bun share the port with whoever else does so (measured): two gateways that
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
 * Whether so many descriptors below this number are free. A new descriptor gets the lowest free number, so nothing has to
 * be counted: counting took 40 ms for 15,000, and this takes 3 µs each (measured).
 */
function areFree(count: number, below: number): boolean {
  const opened: number[] = [];
  try {
    while (opened.length < count && (opened.at(-1) ?? -1) < below) opened.push(openSync("/dev/null", "r"));
  } catch {
    return false;
  } finally {
    for (const descriptor of opened) closeSync(descriptor);
  }
  return (opened.at(-1) ?? below) < below;
}
