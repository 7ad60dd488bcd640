// Composes the facilitator from its parts and starts it: storage first, then the wallets and what they had under
// way, then the two listeners. Stopping goes the other way round.
import type { Hex } from "../x402/types.ts";

export interface FacilitatorOptions {
  readonly host: string;
  /** The mutual-TLS port; 0 takes a free one. */
  readonly port: number;
  /** The plain port of `/supported` and `/healthz`; 0 takes a free one. */
  readonly openPort: number;
  readonly dataDir: string;
  readonly databaseUrl: string | null;
  readonly drainMs: number;
  readonly tls: {
    /** PEM: the server's certificate and what leads from it to a root. */
    readonly cert: string;
    /** PEM, without a passphrase. */
    readonly key: string;
    /** PEM: the one or more roots of client certificates. */
    readonly clientCa: string;
  };
  /** Tried in order. They may hold API keys, so they are as secret as the keys. */
  readonly rpcUrls: readonly string[];
  /** Private keys of 32 bytes, or the wallet that another process signs for. */
  readonly signers:
    | { readonly kind: "local"; readonly keys: readonly Hex[] }
    | { readonly kind: "remote"; readonly url: string; readonly address: Hex };
  readonly limits: {
    /** Smallest units of the token, for accounts without a limit of their own. */
    readonly maxPerTransaction: bigint;
    /** Smallest units of the token per account and UTC day, for accounts without a ceiling of their own. */
    readonly dailyCeiling: bigint;
    readonly gasLowWaterWei: bigint;
    readonly inclusionTimeoutMs: number;
    /** May have a fraction. */
    readonly maxFeeGwei: number;
    /** Blocks until an inclusion counts as final. */
    readonly confirmations: number;
  };
}

export interface RunningFacilitator {
  /** Of the mutual-TLS listener. */
  readonly url: string;
  readonly openUrl: string;
  /** Drains and stops: requests at work may end first, what is not settled by then goes on at the next start. */
  stop(): Promise<void>;
}
