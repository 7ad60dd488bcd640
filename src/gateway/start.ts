// Composes the gateway from its parts and starts it: storage first, then who may call, then what runs calls,
// then the listener. Stopping goes the other way round.
import type { AnyElysia } from "elysia";
import { endsWithin } from "../concurrency/deadline.ts";
import { createUnderWay, type UnderWay } from "../concurrency/under-way.ts";
import { systemClock, timeBounds } from "../core/clock.ts";
import { type HostRules, hostRules } from "../core/host.ts";
import { newId } from "../core/id.ts";
import { WAIT_SECONDS_MAX } from "../core/limits.ts";
import type { Log } from "../core/log.ts";
import { COMMIT, VERSION } from "../core/version.ts";
import { pseudonymOf } from "../core/via.ts";
import { createDecoderShare, type DecoderShare } from "../http/decoder-share.ts";
import { fetchDocument, fetchJson } from "../http/fetch-json.ts";
import { ownAddresses } from "../http/interfaces.ts";
import { type Listener, listen } from "../http/listener.ts";
import { createOutbound, type Outbound } from "../http/outbound.ts";
import { createEdge, type Edge, routes } from "../http/server.ts";
import { type Keyring, openKeyring } from "../keys/keyring.ts";
import { acquireDataDirLock } from "../storage/lock.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";
import { type AgentCache, agentCache } from "./agents/cache.ts";
import { rateLimiter } from "./agents/rate-limit.ts";
import { agentRoutes } from "./agents/routes.ts";
import { agentNamesCredential, type InvocableAgent } from "./agents/service.ts";
import { agentShutOut } from "./agents/shut-out.ts";
import { credentialResolver, credentialSecrets, type ResolverDeps } from "./credentials/resolve.ts";
import { credentialRoutes } from "./credentials/routes.ts";
import { Scheduler } from "./executor/scheduler.ts";
import { createWorkerPool } from "./executor/workers/pool.ts";
import { serviceRoutes } from "./health-routes.ts";
import { createIdentity, type IdentityOptions } from "./identity/identity.ts";
import { managePermission } from "./identity/permission.ts";
import { compareClaims, createClaims } from "./invocations/claims.ts";
import { createCompletionWaiters } from "./invocations/completion-waiters.ts";
import { endedAmong, findInvocation } from "./invocations/history.ts";
import { createRefusals } from "./invocations/refusals.ts";
import { invocationRoutes } from "./invocations/routes.ts";
import { manualRoutes } from "./manual/routes.ts";
import { docsRoutes } from "./openapi/routes.ts";
import { settlementNamesCredential, settlementShutOut } from "./payment/config.ts";
import { createFacilitatorClient } from "./payment/facilitator-client.ts";
import { paidCallNamesCredential, paidCallShutOut } from "./payment/paid-calls.ts";
import { settlementRoutes } from "./payment/routes.ts";
import { createPayments } from "./payment/service.ts";
import { createSettler, type SettlerOptions } from "./payment/settler.ts";
import { policyRoutes } from "./policy/routes.ts";
import { type PolicyService, policyService } from "./policy/service.ts";
import { type AdmitStreamOptions, admitConnection, admitStream } from "./proxy/admit-stream.ts";
import { proxyRoutes } from "./proxy/routes.ts";
import { sealedSessions } from "./proxy/session-id.ts";
import { createStreamHandler } from "./proxy/stream-handler.ts";
import { streamRoutes } from "./proxy/stream-routes.ts";
import { receiptRoutes } from "./receipts/routes.ts";
import { receiptService } from "./receipts/service.ts";
import { type Retention, startRetention } from "./retention.ts";
import { startReaper } from "./streaming/reaper.ts";
import { createStreamLimits } from "./streaming/stream-limits.ts";
import { createStreams, type StreamsDeps } from "./streaming/streams.ts";

/** For the answers that are being sent when everything else has ended, and for what is stored last. */
const [LAST_ANSWERS_MS, LAST_WRITES_MS] = [2_000, 3_000];
/** Beyond the longest wait of a caller, during which nothing passes on its connection. */
const CONNECTION_IDLE_SECONDS_MORE = 10;
/** Bun's own limit. */
const CONNECTION_IDLE_SECONDS_MAX = 255;

export interface GatewayOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  readonly dataDir: string;
  readonly databaseUrl: string | null;
  readonly blockedMs: number;
  readonly drainMs: number;
  readonly identity: Pick<IdentityOptions, "oidc" | "claims">;
  readonly allowHosts: readonly string[];
  readonly denyHosts: readonly string[];
  /** That a token needs to write; null for none. */
  readonly manageScope: string | null;
  readonly extraCa: string | null;
  /** Base of the absolute URLs in challenges; null takes the request's Host. */
  readonly publicUrl: string | null;
  /** How long a paid call waits for its settlement. */
  readonly settleWaitMs: number;
  readonly workers: number;
  readonly upstreamTimeoutMs: number;
  readonly agentConcurrency: number;
  readonly maxResponseBytes: number;
  readonly secretsDir: string | null;
  readonly vault: ResolverDeps["vault"];
  readonly retention: Retention;
  /** How many of these a tenant may have. */
  readonly quotas: { readonly agents: number; readonly credentials: number };
}

export interface RunningGateway {
  readonly url: string;
  /** Drains and stops: what runs may end first, pending calls stay pending. */
  stop(): Promise<void>;
}

/** @throws StartupProblem for what its operator can mend */
export async function startGateway(
  options: GatewayOptions,
  masterKey: Uint8Array,
  log: Log,
): Promise<RunningGateway> {
  const { dataDir, databaseUrl } = options;
  const lock = databaseUrl === null ? acquireDataDirLock(dataDir) : null;
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  const keyring = await openKeyring(store, masterKey, store.clock);
  // The issuer and the vault are the operator's own, wherever they are.
  const trusted = createOutbound({ rules: null, extraCa: options.extraCa });
  const rules = hostRules({ allow: options.allowHosts, deny: options.denyHosts, own: ownAddresses() });
  const admitting = createUnderWay();
  const parts = { options, store, keyring, rules, trusted, decoders: createDecoderShare(), admitting, log };
  const { dispatcher, settler, streaming, endings, policy, receipts, refusals, comparing, app } =
    await composeGateway(parts);
  const identity = createIdentity({
    ...options.identity,
    keyring,
    fetchJson: (url) => fetchDocument(trusted, url),
    clock: store.clock,
    log,
  });
  // Before anything looks at calls: what a dead process refused, and its disk stored all the same.
  await refusals.removeAppeared();
  await dispatcher.recover();
  await settler.recover();
  const stopCleaning = startRetention(store, options.retention, log);
  const permit = managePermission(options.manageScope);
  const edge = createEdge({ app, log, authenticate: (header) => identity.authenticate(header), permit });
  const server = openPort(options, edge, log);
  // Only now, when nothing is left that could keep the gateway from starting, is any call made.
  await dispatcher.start();
  settler.start();
  streaming.start();
  receipts.start();
  const stopComparing = compareClaims(comparing);
  const url = `http://${options.host.includes(":") ? `[${options.host}]` : options.host}:${server.port}`;
  log.info("listening", { url, version: VERSION });
  return {
    url,
    async stop() {
      edge.drain();
      const closed = server.stop();
      stopCleaning();
      stopComparing();
      const { drainMs } = options;
      await Promise.all([
        dispatcher.drain(drainMs),
        streaming.drain(drainMs),
        settler.stop(drainMs),
        // What is accepted meanwhile stays pending, and its caller is told so.
        endsWithin(drainMs, admitting.idle()),
      ]);
      refusals.stop();
      // Whoever waits for a call that stays pending would else never learn its ID.
      endings.release();
      const left = dispatcher.leave();
      await endsWithin(LAST_ANSWERS_MS, closed);
      await server.stop(true);
      // A store that is stuck keeps no process from its end.
      const stored = Promise.all([left, policy.close(), receipts.stop()]).then(() => store.close());
      await endsWithin(LAST_WRITES_MS, stored);
      lock?.release();
    },
  };
}

interface GatewayParts {
  readonly options: GatewayOptions;
  readonly store: Store;
  readonly keyring: Keyring;
  /** For whatever a tenant names. */
  readonly rules: HostRules;
  readonly trusted: Outbound;
  readonly decoders: DecoderShare;
  readonly log: Log;
  readonly admitting: UnderWay;
}

async function composeGateway(parts: GatewayParts) {
  const { options, store, keyring, log } = parts;
  const { clock } = store;
  const claims = createClaims();
  const refusals = createRefusals({ store, clock, log });
  const endings = createCompletionWaiters((keys) => endedAmong(store.read, keys));
  const pool = upstreamPool(parts);
  const secrets = secretSources(parts);
  const replica = newId("rep", clock.now());
  const resolveCredential = credentialResolver(secrets);
  const ended = (id: string) => endings.announce(id);
  const dispatcher = new Scheduler({
    store,
    clock,
    log,
    pool,
    replica,
    agent_concurrency: options.agentConcurrency,
    claims,
    refusals,
    resolveCredential,
    ended,
  });
  const takeUp = (agentId: string) => dispatcher.take(agentId);
  const { settler, payments } = composePayments({ ...parts, secrets, paid: takeUp, ended });
  const limiter = rateLimiter();
  const agents = agentCache(store.read);
  const policy = policyService({ store, clock, log });
  const checks = {
    store,
    clock,
    time: timeBounds(clock),
    log,
    replica,
    refusals,
    payments,
    policy,
    findAgent: agents.find,
    takeToken: (tenant: string, agent: InvocableAgent) => limiter.take(tenant, agent),
    pseudonym: pseudonymOf(await keyring.deriveKey(null, "via")),
  };
  const streaming = composeStreaming({ ...parts, checks, claims, policy, replica, resolveCredential, ended });
  const stop = (id: string) => {
    dispatcher.stop(id);
    streaming.stop(id);
  };
  const receipts = receiptService({ store, clock, log, signingKey: () => keyring.signingKey("receipts") });
  const api = routes()
    .use(managementRoutes(parts, agents))
    .use(
      proxyRoutes({
        ...checks,
        endings,
        admitting: parts.admitting,
        offer: (accepted) => dispatcher.offer(accepted),
        stop,
      }),
    )
    .use(streaming.routes)
    .use(invocationRoutes(store.read))
    .use(policyRoutes(policy))
    .use(receiptRoutes(receipts))
    .use(serviceRoutes({ store, version: VERSION, commit: COMMIT, publicJwks: () => keyring.publicJwks() }));
  return {
    dispatcher,
    settler,
    streaming,
    endings,
    policy,
    receipts,
    refusals,
    comparing: { store, clock, log, replica, claims, stop, released: takeUp, ended },
    app: await withDocs(api),
  };
}

async function withDocs(api: AnyElysia) {
  return routes()
    .use(api)
    .use(await docsRoutes(api, { version: VERSION }))
    .use(manualRoutes());
}

function managementRoutes({ options, store, keyring, rules }: GatewayParts, agents: AgentCache) {
  const { clock } = store;
  const { agents: agentsMax, credentials: credentialsMax } = options.quotas;
  const usedAt = [agentShutOut, settlementShutOut, paidCallShutOut];
  const namedBy = [agentNamesCredential, settlementNamesCredential, paidCallNamesCredential];
  return routes()
    .use(agentRoutes({ store, clock, rules, agentsMax, changed: agents.forget }))
    .use(credentialRoutes({ store, clock, keyring, namedBy, usedAt, credentialsMax }))
    .use(settlementRoutes({ store, clock, rules }));
}

function secretSources({ options, store, keyring, trusted }: GatewayParts): ResolverDeps {
  const { secretsDir, vault } = options;
  return {
    store,
    keyring,
    secretsDir,
    vault,
    fetchJson: (url, headers, limits) => fetchJson(trusted, url, headers, limits),
  };
}

type StreamingParts = Pick<GatewayParts, "options" | "store" | "keyring" | "rules" | "decoders" | "log"> &
  Pick<AdmitStreamOptions, "claims"> &
  Pick<StreamsDeps, "resolveCredential" | "ended"> & {
    readonly checks: Omit<AdmitStreamOptions, "claims" | "takePlace" | "owedPlace" | "stopping">;
    readonly policy: Pick<PolicyService, "deniedTools">;
    readonly replica: string;
  };

function composeStreaming(parts: StreamingParts) {
  const { options, store, keyring, rules, log, checks, claims, policy, replica, ...rest } = parts;
  const { extraCa, upstreamTimeoutMs, agentConcurrency, publicUrl } = options;
  const { clock } = store;
  const streams = createStreams({
    ...rest,
    store,
    clock,
    log,
    claims,
    outbound: createOutbound({ rules, extraCa }),
    upstreamTimeoutMs,
    deniedTools: policy.deniedTools,
  });
  const { stopping } = streams;
  const room = createStreamLimits({ agentConcurrency, stopping });
  const admission = { ...checks, replica, claims, takePlace: room.take, owedPlace: room.owed, stopping };
  const path = createStreamHandler({
    streams,
    publicUrl,
    findAgent: checks.findAgent,
    sessionIdsOf: sealedSessions((tenant) => keyring.deriveKey(tenant, "mcp-session")),
    admit: (call) => admitStream(admission, call),
    admitConnection: (request, method) => admitConnection(admission, request, method),
  });
  const unclaimed = { store, clock, log, ended: rest.ended };
  let stopLooking = () => {};
  return {
    routes: streamRoutes(path),
    stop: streams.stop,
    start() {
      stopLooking = startReaper(unclaimed);
    },
    drain(ms: number): Promise<void> {
      stopLooking();
      return streams.drain(ms);
    },
  };
}

function upstreamPool({ options, decoders, log }: GatewayParts) {
  return createWorkerPool({
    size: options.workers,
    decoders,
    log,
    settings: {
      upstream_timeout_ms: options.upstreamTimeoutMs,
      max_response_bytes: options.maxResponseBytes,
      allow_hosts: options.allowHosts,
      deny_hosts: options.denyHosts,
      extra_ca: options.extraCa,
      blocked_ms: options.blockedMs,
    },
  });
}

type PaymentParts = Pick<GatewayParts, "options" | "store" | "rules" | "log"> &
  Pick<SettlerOptions, "paid" | "ended"> & { readonly secrets: ResolverDeps };

function composePayments({ options, store, rules, log, secrets, paid, ended }: PaymentParts) {
  const { extraCa, settleWaitMs, publicUrl } = options;
  const { clock } = store;
  const client = createFacilitatorClient({
    // A tenant names its facilitator, so the host rules hold for it as they do for upstreams.
    outbound: createOutbound({ rules, extraCa }),
    openSecret: credentialSecrets(secrets),
    timeoutMs: settleWaitMs,
  });
  const time = timeBounds(clock);
  const settler = createSettler({ store, clock, time, log, client, settleWaitMs, paid, ended });
  const payments = createPayments({
    store,
    clock,
    settler,
    settleWaitMs,
    publicUrl,
    findInvocation: (tenant, id) => findInvocation(store.read, tenant, id),
  });
  return { settler, payments };
}

function openPort({ host, port, settleWaitMs }: GatewayOptions, edge: Edge, log: Log): Listener {
  // A paid call may wait for its settlement, and then for its end.
  const waitSeconds = Math.ceil(settleWaitMs / 1000) + WAIT_SECONDS_MAX;
  const idleSeconds = Math.min(waitSeconds + CONNECTION_IDLE_SECONDS_MORE, CONNECTION_IDLE_SECONDS_MAX);
  return listen({
    host,
    port,
    idleSeconds,
    answer: (request, server) =>
      edge.fetch(request, (held) => server.timeout(request, held ? 0 : idleSeconds)),
    log,
  });
}
