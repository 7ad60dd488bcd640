// An MCP server whose every call needs a session, and who leaves some messages without an answer. It counts the
// connections on which something waits for one.
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo, Socket } from "node:net";

export interface SlowServer {
  readonly url: string;
  /** How often each method has come so far; DELETE is one too. */
  seen(method: string): number;
  /** Connections now that wait for an answer of this method, and the most there have been. */
  waiting(method: string): { readonly now: number; readonly most: number };
  stop(): Promise<void>;
}

interface Message {
  readonly id?: unknown;
  readonly method: string;
}

/** @param isLeft whether the message gets no answer, the `count`th of its method */
export async function startSlowServer(isLeft: (method: string, count: number) => boolean): Promise<SlowServer> {
  const seen: string[] = [];
  const waiting = new Map<string, Set<Socket>>();
  const most = new Map<string, number>();
  const countOf = (method: string) => seen.filter((each) => each === method).length;

  function leave(method: string, { socket }: IncomingMessage): void {
    const sockets = waiting.get(method) ?? new Set<Socket>();
    waiting.set(method, sockets.add(socket));
    most.set(method, Math.max(most.get(method) ?? 0, sockets.size));
    socket.once("close", () => sockets.delete(socket));
  }

  function answer({ id, method }: Message, session: unknown, response: ServerResponse): void {
    const isOpening = method === "initialize";
    if (isOpening) response.setHeader("mcp-session-id", `s${countOf(method)}`);
    if (id === undefined) response.writeHead(202).end();
    else if (!isOpening && session === undefined) response.writeHead(400).end();
    else {
      const result = isOpening ? { protocolVersion: "2025-11-25", capabilities: {} } : { session };
      response.setHeader("content-type", "application/json").end(JSON.stringify({ jsonrpc: "2.0", id, result }));
    }
  }

  const server = createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    const message: Message = body === "" ? { method: "DELETE" } : JSON.parse(body);
    const count = seen.push(message.method) && countOf(message.method);
    if (isLeft(message.method, count)) leave(message.method, request);
    else answer(message, request.headers["mcp-session-id"], response);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/`,
    seen: countOf,
    waiting: (method) => ({ now: waiting.get(method)?.size ?? 0, most: most.get(method) ?? 0 }),
    stop: async () => {
      server.close();
      server.closeAllConnections();
    },
  };
}
