// What carries a request to the address it is pinned to, and the usual one: the runtime's `fetch`.

/** What a pool of connections shows and believes. */
export interface TransportOptions {
  /** The name for SNI and certificate; null for plain HTTP and for hosts that are addresses. */
  readonly serverName: string | null;
  /** PEM of all roots that are trusted; null for the usual ones. */
  readonly ca: readonly string[] | null;
  /** PEM. Null when nothing is shown to a server that asks for a certificate. */
  readonly client: { readonly cert: string; readonly key: string } | null;
}

export interface TransportRequest {
  readonly method: string;
  /** All of them, but those of the connection and the length. */
  readonly headers: Headers;
  readonly body: Uint8Array | null;
  readonly signal: AbortSignal;
  /** In whose turns the answer is read. */
  readonly tenant: string;
  /** Told when the body is not needed any more: it has left, or never will. It may be told more than once. */
  readonly sent?: (() => void) | undefined;
}

/** What an exchange without an answer, or with half of one, comes to. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}

/** One pool of connections. */
export interface Transport {
  /**
   * Resolves with the final response head as it came; its body is still encoded and must be read or cancelled.
   *
   * @param url of an address, never of a name
   * @throws errors with a code
   */
  send(url: string, request: TransportRequest): Promise<Response>;
  /** Closes what is idle; exchanges on their way finish. */
  close(): void;
}

/** Seconds. Short, since a server that drops idle connections unseen costs the call that finds out. */
export const IDLE_SECONDS = 30;

/** What has a status like `000` is no HTTP answer (RFC 9110 section 15), but `fetch` gives it. */
const FINAL_STATUS_MIN = 200;

export function openFetchTransport({ serverName, ca, client }: TransportOptions): Transport {
  const session = new Bun.FetchSession({
    // Proxy variables are ignored: a proxy would resolve the name again, unchecked.
    proxy: false,
    keepAlive: { idleTimeout: IDLE_SECONDS },
    tls: {
      // Said aloud, because NODE_TLS_REJECT_UNAUTHORIZED could switch it off.
      rejectUnauthorized: true,
      ...(serverName === null ? {} : { serverName }),
      ...(ca === null ? {} : { ca: [...ca] }),
      ...client,
    },
  });
  return {
    async send(url, { sent, tenant: _, ...request }) {
      try {
        const response = await session.fetch(url, {
          ...request,
          redirect: "manual",
          decompress: false,
          // With an environment that turns HTTP/3 on, an Alt-Svc header would lead elsewhere, unchecked.
          protocol: "http1.1",
          // Bun's own limit on silence (five minutes) would cut off what the signal allows.
          timeout: false,
        });
        if (response.status >= FINAL_STATUS_MIN) return response;
        response.body?.cancel().catch(() => {});
        throw new TransportError("InvalidStatus");
      } finally {
        // It does not tell when the body has left; servers read requests before they answer, mostly.
        sent?.();
      }
    },
    close: () => session.close(),
  };
}
