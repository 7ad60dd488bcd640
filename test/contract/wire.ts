// A client on the bare socket, for what no proper HTTP client sends: half requests, slow ones, broken framing.
import type { Socket } from "bun";

export interface WireAnswer {
  readonly status: number;
  readonly head: string;
  readonly body: string;
}

export interface Wire {
  send(text: string | Uint8Array): Promise<void>;
  /** Ends this side of the connection; the other may go on. */
  halfClose(): void;
  /** All that came until the gateway closed the connection, or until `enough` of it is there. */
  received(enough?: (text: string) => boolean): Promise<string>;
  close(): void;
}

const RECEIVE_MS_MAX = 15_000;

export async function connect(url: string): Promise<Wire> {
  const { hostname, port } = new URL(url);
  let text = "";
  let closed = false;
  let drained = Promise.withResolvers<void>();
  const watches = new Set<() => void>();
  const look = () => {
    for (const watch of watches) watch();
  };
  const socket: Socket = await Bun.connect({
    hostname,
    port: Number(port),
    allowHalfOpen: true,
    socket: {
      data(_, bytes) {
        text += bytes.toString("latin1");
        look();
      },
      drain() {
        drained.resolve();
      },
      end(peer) {
        closed = true;
        peer.end();
        look();
      },
      close() {
        closed = true;
        drained.resolve();
        look();
      },
      error() {
        closed = true;
        look();
      },
    },
  });
  return {
    async send(message) {
      let rest = typeof message === "string" ? Buffer.from(message, "latin1") : message;
      while (rest.length > 0 && !closed) {
        drained = Promise.withResolvers();
        const written = socket.write(rest);
        if (written < 0) return;
        rest = rest.subarray(written);
        if (rest.length > 0) await drained.promise;
      }
      socket.flush();
    },
    halfClose: () => void socket.shutdown(),
    received(enough = () => false) {
      const { promise, resolve, reject } = Promise.withResolvers<string>();
      const watch = () => {
        if (closed || enough(text)) resolve(text);
      };
      const timer = setTimeout(() => reject(new Error(`nothing more came after: ${text}`)), RECEIVE_MS_MAX);
      watches.add(watch);
      watch();
      return promise.finally(() => {
        clearTimeout(timer);
        watches.delete(watch);
      });
    },
    close: () => socket.terminate(),
  };
}

export function parseAnswer(text: string): WireAnswer {
  const [head = "", ...rest] = text.split("\r\n\r\n");
  return { status: Number(/^HTTP\/1\.1 (\d{3})/.exec(head)?.[1] ?? 0), head, body: rest.join("\r\n\r\n") };
}

/** One exchange: everything that came back until the connection closed or an answer was whole. */
export async function exchange(url: string, ...pieces: (string | Uint8Array)[]): Promise<WireAnswer> {
  const wire = await connect(url);
  for (const piece of pieces) await wire.send(piece);
  const text = await wire.received(isWhole);
  wire.close();
  return parseAnswer(text);
}

export function isWhole(text: string): boolean {
  const { status, head, body } = parseAnswer(text);
  if (status === 0 || !text.includes("\r\n\r\n")) return false;
  const length = /^content-length: *(\d+)/im.exec(head)?.[1];
  return length === undefined ? status === 401 || status === 204 : body.length >= Number(length);
}
