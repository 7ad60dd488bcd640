// Upstreams for tests: plain ones answered by a function, ones that misbehave on the bare socket, and a proxy
// that records what passes. All on free loopback ports.

export interface Upstream {
  readonly url: string;
  readonly port: number;
  stop(): Promise<void>;
}

export function startUpstream(handler: (request: Request) => Response | Promise<Response>): Upstream {
  const server = Bun.serve({ hostname: "127.0.0.1", port: 0, idleTimeout: 0, fetch: handler });
  return {
    url: `http://127.0.0.1:${server.port}/`,
    port: Number(server.port),
    stop: () => server.stop(true),
  };
}

export interface RawConnection {
  write(text: string | Uint8Array): void;
  end(): void;
  /** Ends with a reset instead of a proper close. */
  reset(): void;
}

export interface RawUpstream extends Upstream {
  /** Connections so far. */
  readonly connections: () => number;
}

/** @param onRequest called once per connection, with the first bytes that come */
export function startRawUpstream(onRequest: (connection: RawConnection, bytes: Uint8Array) => void): RawUpstream {
  let connections = 0;
  const server = Bun.listen<{ asked: boolean }>({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      open(socket) {
        connections++;
        socket.data = { asked: false };
      },
      data(socket, bytes) {
        if (socket.data.asked) return;
        socket.data.asked = true;
        onRequest(
          {
            write: (text) => void socket.write(text),
            end: () => void socket.end(),
            reset: () => socket.terminate(),
          },
          bytes,
        );
      },
      error() {},
    },
  });
  return {
    url: `http://127.0.0.1:${server.port}/`,
    port: server.port,
    connections: () => connections,
    stop: async () => server.stop(true),
  };
}

export interface Recorded {
  readonly method: string;
  readonly headers: Headers;
  readonly body: string;
  status: number;
}

export interface RecordingProxy extends Upstream {
  readonly requests: Recorded[];
  /** Where requests go from now on. */
  forwardTo(url: string): void;
  /** The next request that fits, or one that has come already. */
  seen(fits: (request: Recorded) => boolean): Promise<Recorded>;
}

/** Passes every request on to `target` and keeps what it was; 502 when nobody is there. */
export function startRecordingProxy(target: string): RecordingProxy {
  const requests: Recorded[] = [];
  const watches = new Set<(request: Recorded) => void>();
  let destination = target;
  const upstream = startUpstream(async (request) => {
    const body = await request.text();
    const recorded: Recorded = { method: request.method, headers: request.headers, body, status: 0 };
    requests.push(recorded);
    for (const watch of watches) watch(recorded);
    const response = await fetch(destination, {
      method: request.method,
      headers: request.headers,
      body: body === "" ? null : body,
      signal: request.signal,
      redirect: "manual",
    }).catch(() => new Response("the target is away", { status: 502 }));
    recorded.status = response.status;
    return new Response(response.body, response);
  });
  function forwardTo(url: string): void {
    destination = url;
  }
  function seen(fits: (request: Recorded) => boolean): Promise<Recorded> {
    const known = requests.find(fits);
    if (known !== undefined) return Promise.resolve(known);
    const { promise, resolve } = Promise.withResolvers<Recorded>();
    const watch = (request: Recorded) => {
      if (!fits(request)) return;
      watches.delete(watch);
      resolve(request);
    };
    watches.add(watch);
    return promise;
  }
  return { ...upstream, requests, forwardTo, seen };
}
