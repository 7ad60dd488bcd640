// Servers on bare sockets, with and without TLS, that note the bytes they get, and the outbound that is tried on them.
import { expect } from "bun:test";
import net from "node:net";
import tls from "node:tls";
import { hostRules } from "../../../src/core/host.ts";
import { OutboundError } from "../../../src/http/client/exchange.ts";
import { createOutbound, type OutboundOptions, type OutboundRequest } from "../../../src/http/client/outbound.ts";
import { OTHER_SERVER, SERVER, TEST_CA } from "./certificates.ts";

const OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
export const LOOPBACK = hostRules({ allow: ["127.0.0.0/8", "::1"] });

/** What is to be closed after a test. */
export const closers: Array<() => unknown> = [];
export async function closeServers(): Promise<void> {
  for (const close of closers.splice(0)) await close();
}

export interface Heard {
  /** Heads and bodies as they came, one entry for each request. */
  readonly requests: string[];
  /** Numbers of the connections that the requests came on. */
  readonly connections: number[];
}

export type Answer = (socket: net.Socket, request: string, count: number) => void;

/** A server that shows the bytes it gets. Requests must fit what their Content-Length says. */
export async function raw(answer: Answer, host = "127.0.0.1"): Promise<Heard & { port: number }> {
  const heard = { requests: [] as string[], connections: [] as number[] };
  let opened = 0;
  const server = net.createServer((socket) => {
    const connection = ++opened;
    listen(socket, connection, heard, answer);
  });
  return { ...heard, port: await bind(server, host) };
}

export function listen(socket: net.Socket, connection: number, heard: Heard, answer: Answer): void {
  closers.push(() => socket.destroy());
  let text = "";
  socket.on("error", () => {});
  socket.on("data", (data) => {
    text += data.toString("latin1");
    const end = text.indexOf("\r\n\r\n");
    const length = Number(/content-length: (\d+)/i.exec(text)?.[1] ?? 0);
    if (end < 0 || text.length < end + 4 + length) return;
    const request = text;
    text = "";
    heard.requests.push(request);
    heard.connections.push(connection);
    answer(socket, request, heard.requests.length);
  });
}

export async function bind(server: net.Server, host: string): Promise<number> {
  const { promise, resolve, reject } = Promise.withResolvers<void>();
  server.once("error", reject);
  server.listen(0, host, resolve);
  await promise;
  closers.push(() => server.close());
  return (server.address() as net.AddressInfo).port;
}

export const answerOk: Answer = (socket) => socket.write(OK);

export function outboundOf(options: Partial<OutboundOptions> = {}) {
  return createOutbound({ rules: LOOPBACK, extraCa: null, ...options });
}

/** Resolves every name to these addresses. */
export function to(...addresses: string[]): Pick<OutboundOptions, "lookup"> {
  return { lookup: async () => addresses.map((address) => ({ address })) };
}

export function post(parts: Partial<OutboundRequest> = {}): OutboundRequest {
  return { method: "POST", headers: [], body: null, signal: AbortSignal.timeout(5000), ...parts };
}

export const lowerCase = (text: string) => text.toLowerCase();

export async function failure(work: Promise<unknown>): Promise<unknown> {
  return work.then(
    (value) => {
      throw new Error(`it did not fail: ${value}`);
    },
    (error: unknown) => error,
  );
}

export async function kindOf(work: Promise<unknown>): Promise<string> {
  const error = await failure(work);
  expect(error).toBeInstanceOf(OutboundError);
  return error instanceof OutboundError ? error.kind : "";
}

export interface Shown extends Heard {
  /** The SNI and client name of each request's connection. */
  readonly peers: string[];
  readonly port: number;
}

export async function secure(answer: Answer = answerOk): Promise<Shown> {
  const heard = { requests: [] as string[], connections: [] as number[], peers: [] as string[] };
  const names = { [OTHER_SERVER.cert]: /other/ };
  let opened = 0;
  const server = tls.createServer(
    {
      ...SERVER,
      ca: TEST_CA,
      requestCert: true,
      rejectUnauthorized: false,
      SNICallback: (name, done) =>
        done(null, tls.createSecureContext(names[OTHER_SERVER.cert]?.test(name) ? OTHER_SERVER : SERVER)),
    },
    (socket) => {
      const connection = ++opened;
      const peer = `${socket.servername || "-"} ${socket.getPeerCertificate()?.subject?.CN ?? "-"}`;
      listen(socket, connection, heard, (plain, request, count) => {
        heard.peers.push(peer);
        answer(plain, request, count);
      });
    },
  );
  server.on("tlsClientError", () => {});
  return { ...heard, port: await bind(server, "127.0.0.1") };
}
