// A loopback relay in front of a server, so that a test can take the server away: refuse it, cut its
// connections, or let it fall silent. The server itself is shared and stays as it is.
import type { Socket } from "bun";

export interface Relay {
  readonly port: number;
  /** Connections so far. */
  connections(): number;
  /** Resolves when there have been so many connections. */
  connected(times: number): Promise<void>;
  /** Where new connections lead from now on; open ones stay where they are. */
  leadTo(port: number): void;
  /** Cuts every connection; new ones go through. */
  cut(): void;
  /** From now on what comes waits until the returned function is called, and then goes on. */
  hold(): () => void;
  /** From now on nothing passes, and nothing is refused either. Resolves when the first bytes have not passed. */
  stall(): Promise<void>;
  /** Nothing passes any more through the connections there are, and none is closed, as with a machine that has lost its power. */
  forsake(): void;
  /** Cuts every connection, and listens no more. */
  refuse(): void;
  restore(): void;
  stop(): void;
}

/** Below the ports that systems give to whoever asks for any. */
const [PORT_MIN, PORTS] = [20_000, 12_000];

interface Leg {
  other?: Socket<Leg>;
  early: Buffer[];
  isForsaken?: boolean;
}

export function startRelay(targetPort: number): Relay {
  const legs = new Set<Socket<Leg>>();
  const waiting = new Set<{ readonly times: number; resolve(): void }>();
  let target = targetPort;
  let connections = 0;
  let [silent, held] = [false, false];
  let stalled = Promise.withResolvers<void>();

  const handlers = {
    data(socket: Socket<Leg>, bytes: Buffer) {
      if (silent) stalled.resolve();
      if (silent || socket.data.isForsaken) return;
      // What the other side does not take now waits for its drain.
      socket.data.early.push(Buffer.from(bytes));
      if (socket.data.other !== undefined && !held) flush(socket);
    },
    drain(socket: Socket<Leg>) {
      if (socket.data.other !== undefined && !held) flush(socket.data.other);
    },
    close(socket: Socket<Leg>) {
      legs.delete(socket);
      if (!socket.data.isForsaken) socket.data.other?.end();
    },
    error() {},
  };

  /** Sends on what `from` has received, as far as the other side takes it. */
  function flush(from: Socket<Leg>): void {
    for (;;) {
      const piece = from.data.early.shift();
      if (piece === undefined) return;
      const sent = from.data.other?.write(piece) ?? 0;
      if (sent < piece.length) {
        from.data.early.unshift(piece.subarray(Math.max(sent, 0)));
        return;
      }
    }
  }

  const listen = (port: number) =>
    Bun.listen<Leg>({
      hostname: "127.0.0.1",
      port,
      socket: {
        ...handlers,
        async open(socket) {
          socket.data = { early: [] };
          legs.add(socket);
          connections++;
          for (const each of waiting) if (each.times <= connections) each.resolve();
          const other = await Bun.connect<Leg>({
            hostname: "127.0.0.1",
            port: target,
            data: { other: socket, early: [] },
            socket: handlers,
          }).catch(() => null);
          if (other === null) {
            socket.terminate();
            return;
          }
          legs.add(other);
          socket.data.other = other;
          if (!held) flush(socket);
        },
      },
    });
  /** On a port that nobody is given by chance, since it has to be free again after a while in which it refuses. */
  const listenFirst = (): ReturnType<typeof listen> => {
    try {
      return listen(PORT_MIN + Math.floor(Math.random() * PORTS));
    } catch (error) {
      if ((error as { code?: unknown }).code !== "EADDRINUSE") throw error;
      return listenFirst();
    }
  };
  let listener = listenFirst();
  const { port } = listener;
  const cut = () => {
    for (const leg of legs) leg.terminate();
  };
  const refuse = () => {
    cut();
    listener.stop(true);
  };
  return {
    port,
    connections: () => connections,
    connected(times) {
      const { promise, resolve } = Promise.withResolvers<void>();
      if (connections >= times) return Promise.resolve();
      waiting.add({ times, resolve });
      return promise;
    },
    leadTo(port) {
      target = port;
    },
    cut,
    hold() {
      held = true;
      return () => {
        held = false;
        for (const leg of legs) if (leg.data.other !== undefined) flush(leg);
      };
    },
    stall() {
      silent = true;
      stalled = Promise.withResolvers();
      return stalled.promise;
    },
    forsake() {
      for (const leg of legs) leg.data.isForsaken = true;
    },
    refuse,
    restore() {
      refuse();
      silent = false;
      listener = listen(port);
    },
    stop: refuse,
  };
}
