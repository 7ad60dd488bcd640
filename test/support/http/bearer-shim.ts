// For clients that can send no token: a loopback server that passes every request on to one URL with the token in it,
// and changes nothing else, the Host header included.

export interface BearerShim {
  readonly url: string;
  stop(): Promise<void>;
}

export function startBearerShim(target: string, token: string, port: number): BearerShim {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port,
    idleTimeout: 0,
    async fetch(request) {
      const headers = new Headers(request.headers);
      headers.set("authorization", `Bearer ${token}`);
      const {
        status,
        headers: answered,
        body,
      } = await fetch(target, {
        method: request.method,
        headers,
        body: request.body === null ? null : await request.bytes(),
        signal: request.signal,
        redirect: "manual",
        decompress: false,
      });
      return new Response(body, { status, headers: answered });
    },
  });
  return { url: `http://127.0.0.1:${server.port}/mcp`, stop: () => server.stop(true) };
}
