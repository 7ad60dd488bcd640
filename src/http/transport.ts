// A request that is pinned to an address, and how sending it fails.
import type { StopSignal } from "../concurrency/stop.ts";
import type { CallBody } from "../wire/body.ts";
import type { AnswerReadAhead } from "./read-ahead.ts";
import type { TlsContext } from "./tls-contexts.ts";

/** What a URL says of where a request goes. */
export interface DialTarget {
  readonly isTls: boolean;
  readonly host: string;
  readonly hostname: string;
  /** Empty for the one of the scheme. */
  readonly port: string;
  /** With its query. */
  readonly path: string;
  /**
   * The name for SNI and certificate, without the dots at its end (RFC 6066 section 3); null for plain HTTP and for
   * hosts that are addresses.
   */
  readonly serverName: string | null;
}

export interface TransportRequest {
  readonly target: DialTarget;
  /** The one of the target's host that is dialled. */
  readonly address: string;
  readonly method: string;
  /** Lines of all headers except Host and those of the connection and the length. */
  readonly fields: string;
  readonly body: CallBody | null;
  readonly signal: StopSignal;
  /** Whose connections are used, and in whose turns the answer is read. */
  readonly tenant: string;
  readonly tlsContext: TlsContext;
  /** Called with the end of the server's certificate, in milliseconds since the epoch, where a connection is made. */
  readonly certified?: ((validTo: number) => void) | undefined;
  /** Called when the body is not needed any more: it has left, or never will. May be called more than once. */
  readonly sent?: (() => void) | undefined;
  /** The share to which answer bytes count that arrive ahead of their reader. Left out: nobody's. */
  readonly ahead?: AnswerReadAhead | undefined;
}

/** The error of an exchange without an answer, or with half of one. */
export class TransportError extends Error {
  readonly code: string;

  constructor(code: string) {
    super(code);
    this.code = code;
  }
}
