// The HTTP client for answers that are passed on as they come, by Node's module. The runtime's `fetch` is several times
// cheaper, but drops what has come of an answer when the connection closes before it was read (measured on Bun
// 1.4.5: 21 of 60 answers closed right after their first part lost it, 42 of 60 when destroyed; here none).
import http from "node:http";
import https from "node:https";
import { IDLE_SECONDS, type Transport, type TransportOptions, type TransportRequest } from "./transport.ts";

/** Of a head. `fetch` takes as much. */
const HEAD_BYTES_MAX = 256 * 1024;
const FINAL_STATUS_MIN = 200;
const STATUS_MAX = 599;
/** Interim answers before the final one, of which honest servers send one or two. */
const INTERIM_MAX = 100;
/** Answers that have no body (RFC 9110), whatever their heads say of one. */
const BODILESS: ReadonlySet<number> = new Set([204, 205, 304]);

class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}

/**
 * What came, in order, before how it ended. Only what is flowing is sure to come before an error, so the answer flows,
 * and is paused while there is something that nobody has taken.
 */
function bodyOf(message: http.IncomingMessage): ReadableStream<Uint8Array> {
  const arrived: Uint8Array[] = [];
  let end: "whole" | "broken" | null = null;
  let notify = () => {};
  const finish = (how: "whole" | "broken") => {
    end ??= how;
    notify();
  };
  message.on("data", (chunk: Uint8Array) => {
    arrived.push(chunk);
    message.pause();
    notify();
  });
  message.on("end", () => finish(message.complete ? "whole" : "broken"));
  message.on("error", () => finish("broken"));
  message.on("close", () => finish("broken"));
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        while (arrived.length === 0 && end === null) {
          const { promise, resolve } = Promise.withResolvers<void>();
          notify = resolve;
          message.resume();
          await promise;
        }
        const chunk = arrived.shift();
        if (chunk !== undefined) controller.enqueue(chunk);
        else if (end === "whole") controller.close();
        else controller.error(new TransportError("ECONNRESET"));
      },
      cancel() {
        message.destroy();
        notify();
      },
    },
    { highWaterMark: 0 },
  );
}

/** @throws TransportError */
function responseOf(message: http.IncomingMessage): Response {
  const status = message.statusCode ?? 0;
  if (status < FINAL_STATUS_MIN || status > STATUS_MAX) {
    message.destroy();
    throw new TransportError("InvalidStatus");
  }
  const headers = new Headers();
  const { rawHeaders } = message;
  for (let at = 0; at + 1 < rawHeaders.length; at += 2) {
    headers.append(rawHeaders[at] ?? "", rawHeaders[at + 1] ?? "");
  }
  if (!BODILESS.has(status)) return new Response(bodyOf(message), { status, headers });
  message.resume();
  return new Response(null, { status, headers });
}

/** Names and values in turn: what is sent so has no length of Node's own. */
function pairsOf(method: string, headers: Headers, body: Uint8Array | null): string[] {
  const pairs = [...headers].flat();
  return body === null && method !== "POST" ? pairs : [...pairs, "content-length", `${body?.length ?? 0}`];
}

export function openStreamTransport({ serverName, ca, client }: TransportOptions): Transport {
  const pool = { keepAlive: true, timeout: IDLE_SECONDS * 1000, scheduling: "lifo" } as const;
  const plain = new http.Agent(pool);
  const encrypted = new https.Agent({
    ...pool,
    // Said aloud, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
    rejectUnauthorized: true,
    // Else it would be the name in the Host header.
    servername: serverName ?? "",
    ...(ca === null ? {} : { ca: [...ca] }),
    ...client,
  });

  function request(url: string, options: http.RequestOptions): http.ClientRequest {
    const common = { ...options, maxHeaderSize: HEAD_BYTES_MAX };
    return url.startsWith("https:")
      ? https.request(url, { ...common, agent: encrypted })
      : http.request(url, { ...common, agent: plain });
  }

  function exchange(url: string, parts: TransportRequest): Promise<Response> {
    const { method, headers, body, signal } = parts;
    const { promise, resolve, reject } = Promise.withResolvers<Response>();
    const sent = request(url, { method, headers: pairsOf(method, headers, body), signal });
    let interim = 0;
    let isAnswered = false;
    sent.on("response", (message) => {
      isAnswered = true;
      try {
        resolve(responseOf(message));
      } catch (error) {
        reject(error);
      }
    });
    sent.on("information", () => {
      if (++interim > INTERIM_MAX) sent.destroy(new TransportError("TooManyInterimAnswers"));
    });
    // Nobody asked for another protocol.
    sent.on("upgrade", (_message, socket) => {
      socket.destroy();
      reject(new TransportError("InvalidStatus"));
    });
    sent.on("error", (error) => {
      // As `fetch` does: the server may have closed the connection before it saw this.
      const isStale = sent.reusedSocket && !isAnswered && method !== "POST" && !signal.aborted;
      if (isStale) resolve(exchange(url, parts));
      else reject(error);
    });
    sent.on("close", () => reject(new TransportError("ECONNRESET")));
    sent.end(body ?? undefined);
    return promise;
  }

  return {
    send: exchange,
    close() {
      plain.destroy();
      encrypted.destroy();
    },
  };
}
