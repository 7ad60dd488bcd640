// Puts the parts of the gateway together and hands each what it needs. Nothing runs before start.ts starts it.
// In one file, since it is the one place that knows all of them.
import type { AnyElysia } from "elysia";
import type { UnderWay } from "../concurrency/under-way.ts";
import { timeBounds } from "../core/clock.ts";
import type { HostRules } from "../core/host.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import type { Tracer } from "../core/tracing.ts";
import { COMMIT, VERSION } from "../core/version.ts";
import { pseudonymOf } from "../core/via.ts";
import type { DecoderShare } from "../http/client/decode.ts";
import { fetchJson } from "../http/client/fetch-json.ts";
import { createOutbound, type Outbound } from "../http/client/outbound.ts";
import { routes } from "../http/elysia.ts";
import type { Keyring } from "../keys/keyring.ts";
import { announceEnds, type Hearing } from "../storage/announcements.ts";
import type { Store } from "../storage/store.ts";
import type { Verifier } from "../x402/verifier/verifier.ts";
import { createRateLimiter, createSharedRateLimiter } from "./agents/rate-limit.ts";
import { agentRoutes } from "./agents/routes.ts";
import { agentNamesCredential, agentShutOut } from "./agents/service.ts";
import { type AgentCache, createAgentCache } from "./agents/store.ts";
import { createCredentialResolver, createSecretReader, type ResolverDeps } from "./credentials/resolve.ts";
import { credentialRoutes } from "./credentials/routes.ts";
import { shownEnd } from "./ended-call-log.ts";
import { Scheduler } from "./executor/scheduler.ts";
import { createWorkerPool } from "./executor/workers/pool.ts";
import { healthRoutes } from "./health.ts";
import { createClaims } from "./invocations/claims.ts";
import { type CompletionWaiters, createCompletionWaiters } from "./invocations/completion-waiters.ts";
import { callHeaders, endedAmong, findInvocation } from "./invocations/history.ts";
import { queueSize } from "./invocations/queue-size.ts";
import { createRefusals } from "./invocations/refusals.ts";
import { invocationRoutes } from "./invocations/routes.ts";
import type { InvocationKey } from "./invocations/service.ts";
import { manualRoutes } from "./manual/routes.ts";
import { docsRoutes } from "./openapi/routes.ts";
import type { GatewayOptions } from "./options.ts";
import type { ChainLook } from "./payment/chain-look.ts";
import { settlementNamesCredential, settlementRoutes, settlementShutOut } from "./payment/config.ts";
import { createFacilitatorClient } from "./payment/facilitator-client.ts";
import type { RestoreGuard } from "./payment/restored.ts";
import { createPayments } from "./payment/service.ts";
import { createSettler, type SettlerOptions } from "./payment/settler.ts";
import { paidCallNamesCredential, paidCallShutOut } from "./payment/store.ts";
import { policyRoutes } from "./policy/routes.ts";
import { createPolicyService, type PolicyService } from "./policy/service.ts";
import type { AdmitStreamOptions } from "./proxy/admit-stream.ts";
import { fastCalls, type ProxyRoutesOptions, proxyRoutes } from "./proxy/routes.ts";
import { createSessionIds, createStreamHandler, streamRoutes } from "./proxy/stream-routes.ts";
import { receiptRoutes } from "./receipts/routes.ts";
import { createReceipts } from "./receipts/service.ts";
import { startReaper } from "./streaming/reaper.ts";
import { createStreamLimits } from "./streaming/stream-limits.ts";
import { createStreams, type StreamsDeps } from "./streaming/streams.ts";

export interface GatewayParts {
  readonly options: GatewayOptions;
  readonly store: Store;
  readonly keyring: Keyring;
  /** This process's ID, new with each start. */
  readonly replica: string;
  /** The one before on its data directory, if that is certainly gone. */
  readonly previous: string | null;
  /** For every host that a tenant names. */
  readonly rules: HostRules;
  readonly trusted: Outbound;
  readonly decoders: DecoderShare;
  readonly verifier: Verifier;
  readonly log: Log;
  readonly meters: Meters;
  /** Null where traces are off. */
  readonly tracer: Tracer | null;
  readonly admitting: UnderWay;
  readonly guard: RestoreGuard;
  /** The port that callers reach, once it is open. */
  port(): number;
  /** Undefined where the gateway has no nodes. */
  readonly look: ChainLook | undefined;
}

export async function composeGateway(parts: GatewayParts) {
  const { options, store, keyring, replica, log, meters, tracer } = parts;
  const { clock } = store;
  const claims = createClaims();
  const refusals = createRefusals({ store, clock, log });
  const completionWaiters = createCompletionWaiters((keys) => endedAmong(store.read, keys));
  const pool = upstreamPool(parts);
  const secrets = secretSources(parts);
  const resolveCredential = createCredentialResolver(secrets);
  tellOfEnds(parts, completionWaiters);
  const scheduler = new Scheduler({
    store,
    clock,
    log,
    pool,
    replica,
    previous: parts.previous,
    agentConcurrency: options.agentConcurrency,
    agentMaxRaised: () => void streaming.raised(),
    claims,
    refusals,
    resolveCredential,
    tracer,
  });
  const takeUp = (tenant: string, agentId: string) => scheduler.take(tenant, agentId);
  const { settler, payments } = composePayments({ ...parts, secrets, paid: takeUp });
  const agents = createAgentCache(store);
  const policy = createPolicyService({ store, clock, log, meters });
  const checks = {
    store,
    clock,
    time: timeBounds(clock),
    log,
    meters,
    replica,
    refusals,
    payments,
    policy,
    findAgent: agents.find,
    takeToken: (store.countTogether === null ? createRateLimiter() : createSharedRateLimiter(store.countTogether)).take,
    pseudonym: pseudonymOf(await keyring.deriveKey(null, "via")),
  };
  const { agentMax } = scheduler;
  const streaming = composeStreaming({ ...parts, checks, claims, policy, resolveCredential, agentMax });
  const stop = (id: string) => {
    scheduler.stop(id);
    streaming.stop(id);
  };
  meters.gauges({ queue: () => queueSize(store), running: () => scheduler.running() + streaming.running() });
  const announcements = announceEnds(parts, replica, hearing(completionWaiters, scheduler, stop));
  const receipts = createReceipts({ store, clock, log, replica, signingKey: () => keyring.signingKey("receipts") });
  const calls = { ...checks, completionWaiters, admitting: parts.admitting, ...takenBy(scheduler), stop };
  const api = routes()
    .use(managementRoutes(parts, agents))
    .use(proxyRoutes(calls))
    .use(streaming.routes)
    .use(invocationRoutes(store.read))
    .use(policyRoutes(policy))
    .use(receiptRoutes(receipts))
    .use(healthRoutes({ store, version: VERSION, commit: COMMIT, publicJwks: () => keyring.publicJwks() }));
  return {
    workers: pool,
    scheduler,
    settler,
    streaming,
    completionWaiters,
    announcements,
    policy,
    receipts,
    refusals,
    comparing: { store, clock, log, replica, claims, stop, released: takeUp },
    app: withDocs(api),
    fastPath: fastCalls(calls),
  };
}

const takenBy = (scheduler: Scheduler): Pick<ProxyRoutesOptions, "reserve" | "offer"> => ({
  reserve: (accepted) => scheduler.reserve(accepted),
  offer: (accepted) => scheduler.offer(accepted),
});

/** What is done with what another gateway tells: who waits here learns of an end, and a call cancelled there stops here. */
function hearing(
  waiters: Pick<CompletionWaiters, "announce">,
  scheduler: Scheduler,
  stop: (id: string) => void,
): Hearing {
  return {
    ended(id) {
      waiters.announce(id);
      stop(id);
    },
    left: () => scheduler.sweepNow(),
  };
}

function tellOfEnds(
  { store, log, meters }: GatewayParts,
  completionWaiters: Pick<CompletionWaiters, "announce">,
): void {
  store.onCallEnded(({ invocation_id }) => completionWaiters.announce(invocation_id));
  store.onCallEnded(meters.ended);
  store.onCallEnded((end) => log.info("invocation_ended", shownEnd(end)));
}

function withDocs(api: AnyElysia) {
  return routes()
    .use(api)
    .use(docsRoutes(api, { version: VERSION }))
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

type StreamingParts = Pick<
  GatewayParts,
  "options" | "port" | "store" | "keyring" | "rules" | "decoders" | "log" | "tracer"
> &
  Pick<AdmitStreamOptions, "claims"> &
  Pick<StreamsDeps, "resolveCredential"> & {
    readonly checks: Omit<AdmitStreamOptions, "claims" | "limits" | "stopping">;
    readonly policy: Pick<PolicyService, "deniedTools">;
    readonly agentMax: () => number;
    readonly replica: string;
  };

function composeStreaming(parts: StreamingParts) {
  const { options, store, keyring, rules, log, checks, claims, policy, replica, agentMax, ...rest } = parts;
  const { extraCa, upstreamTimeoutMs, publicUrl, allowedOrigins } = options;
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
  const limits = createStreamLimits({ agentConcurrency: agentMax, stopping });
  const admission = { ...checks, replica, claims, limits, stopping };
  const path = createStreamHandler({
    streams,
    publicUrl,
    allowedOrigins,
    port: parts.port,
    admission,
    sessionIdsOf: createSessionIds((tenant) => keyring.deriveKey(tenant, "mcp-session")),
  });
  const unclaimed = { store, clock, log };
  let stopLooking = () => {};
  return {
    routes: streamRoutes(path),
    stop: streams.stop,
    raised: limits.raised,
    running: streams.running,
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

type PaymentParts = Pick<
  GatewayParts,
  "options" | "store" | "rules" | "verifier" | "guard" | "look" | "log" | "meters" | "tracer"
> &
  Pick<SettlerOptions, "paid"> & { readonly secrets: ResolverDeps };

function composePayments(parts: PaymentParts) {
  const { options, store, rules, verifier, guard, look, log, meters, tracer, secrets, paid } = parts;
  const { extraCa, settleWaitMs, publicUrl } = options;
  const { clock } = store;
  const client = createFacilitatorClient({
    // A tenant names its facilitator, so the host rules apply to it as they do to upstreams.
    outbound: createOutbound({ rules, extraCa }),
    openSecret: createSecretReader(secrets),
    timeoutMs: settleWaitMs,
  });
  const time = timeBounds(clock);
  const traces = tracer && { tracer, callHeaders: (key: InvocationKey) => callHeaders(store.read, key) };
  const settler = createSettler({ store, clock, time, log, meters, traces, client, settleWaitMs, guard, paid, look });
  const payments = createPayments({
    store,
    clock,
    meters,
    settler,
    verifier,
    settleWaitMs,
    publicUrl,
    guard,
    findInvocation: (tenant, id) => findInvocation(store.read, tenant, id),
  });
  return { settler, payments };
}
