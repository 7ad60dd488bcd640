// What carries a request to the address that it is pinned to.
import type { AnswerReadAhead } from "./read-ahead.ts";
import type { TlsContext } from "./tls-contexts.ts";

export interface TransportRequest {
  readonly url: URL;
  /** The one of the URL's host that is dialled. */
  readonly address: string;
  readonly method: string;
  /** All of them, but those of the connection and the length. */
  readonly headers: Headers;
  readonly body: Uint8Array | null;
  readonly signal: AbortSignal;
  /** Whose connections are used, and in whose turns the answer is read. */
  readonly tenant: string;
  /** The name for SNI and certificate; null for plain HTTP and for hosts that are addresses. */
  readonly serverName: string | null;
  readonly tlsContext: TlsContext;
  /** Told when the body is not needed any more: it has left, or never will. It may be told more than once. */
  readonly sent?: (() => void) | undefined;
  /** Whose share what comes of the answer ahead of its reader counts to; without one it counts to nobody's. */
  readonly ahead?: AnswerReadAhead | undefined;
}

/** What an exchange without an answer, or with half of one, comes to. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}

export interface Transport {
  /**
   * Resolves with the final response head as it came; its body is still encoded and must be read or cancelled.
   *
   * @throws errors with a code
   */
  send(request: TransportRequest): Promise<Response>;
}
