// What the gateway is started with: its part of the configuration.
import type { TracingOptions } from "../core/tracing-options.ts";
import type { ResolverDeps } from "./credentials/resolve.ts";
import type { IdentityOptions } from "./identity/identity.ts";
import type { Retention } from "./invocations/retention.ts";

export interface GatewayOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** Whether other gateways of this machine may have the same port. */
  readonly reusePort: boolean;
  readonly dataDir: string;
  readonly databaseUrl: string | null;
  /** The database without a pooler, for what replicas publish to each other; null for no publishing. */
  readonly listenUrl: string | null;
  readonly blockedMs: number;
  readonly drainMs: number;
  /** Null where traces are off. */
  readonly tracing: TracingOptions | null;
  readonly identity: Pick<IdentityOptions, "oidc" | "claims">;
  readonly allowHosts: readonly string[];
  readonly denyHosts: readonly string[];
  /** The scope that a token needs to write; null for none. */
  readonly manageScope: string | null;
  readonly extraCa: string | null;
  /** Base of the absolute URLs in challenges; null takes the request's Host. */
  readonly publicUrl: string | null;
  /** Web origins whose pages may use mcp agents, beside the gateway's own. */
  readonly allowedOrigins: readonly string[];
  /** Nodes of the chain, for a look at payments that a facilitator leaves open; null for none. As secret as keys. */
  readonly rpcUrls: readonly string[] | null;
  /** How long a paid call waits for its settlement. */
  readonly settleWaitMs: number;
  readonly workers: number;
  readonly upstreamTimeoutMs: number;
  readonly agentConcurrency: number;
  readonly maxResponseBytes: number;
  readonly secretsDir: string | null;
  readonly vault: ResolverDeps["vault"];
  readonly retention: Retention;
  /** How many agents and credentials a tenant may have. */
  readonly quotas: { readonly agents: number; readonly credentials: number };
}
