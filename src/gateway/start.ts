// Starts the gateway: storage, keys, the parts that compose.ts builds, then the listener. `stop` goes in reverse order.
import { join } from "node:path";
import { createChain } from "../chain/chain.ts";
import { startComputeThreads } from "../compute/threads.ts";
import { hostRules } from "../core/host.ts";
import { newId } from "../core/id.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import { VERSION } from "../core/startup.ts";
import { systemClock, timeBounds } from "../core/time.ts";
import { createOutbound, fetchDocument, type Outbound, ownAddresses } from "../http/client/outbound.ts";
import { hostPart, type Listener, listen, mostOpen } from "../http/listener.ts";
import { createEdge, type Edge, type EdgeOptions } from "../http/server.ts";
import { MAX } from "../kernel/limits.ts";
import { createInFlight, endsWithin } from "../kernel/wait.ts";
import { openKeyring } from "../keys/keyring.ts";
import { DATABASE_FILE, type MasterKeys } from "../keys/master-keys.ts";
import { acquireDataDirLock, takeOver } from "../storage/data-dir.ts";
import { createMembership } from "../storage/leases.ts";
import { openStore } from "../storage/open.ts";
import { startRestored } from "../storage/restoration.ts";
import type { Store } from "../storage/store.ts";
import { openTracer } from "../tracing/open.ts";
import { createVerifier } from "../x402/verify.ts";
import { composeGateway, type GatewayOptions, type GatewayParts } from "./compose.ts";
import { createIdentity, managePermission } from "./identity/identity.ts";
import { startRemovingParts } from "./invocations/bodies.ts";
import { orPage } from "./manual/routes.ts";
import { createChainLook } from "./payment/chain-look.ts";
import { createRestoreGuard, settleRestored } from "./payment/restored.ts";
import { startRetention } from "./retention.ts";
import { compareClaims } from "./upstream/ownership.ts";

/** Time for the last answers to be sent, and for the last writes, after everything else has ended. */
const [LAST_ANSWERS_MS, LAST_WRITES_MS] = [2_000, 3_000];
/** Added to the longest wait of a caller, during which its connection is idle. */
const CONNECTION_IDLE_SECONDS_MORE = 10;
/** Bun's maximum. */
const CONNECTION_IDLE_SECONDS_MAX = 255;

/** @throws StartupProblem for a problem that the operator can fix */
export async function startGateway(options: GatewayOptions, masterKeys: MasterKeys, log: Log, meters: Meters) {
  const { dataDir, databaseUrl } = options;
  const lock = databaseUrl === null ? acquireDataDirLock(dataDir) : null;
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  const state = await openState(options, store, masterKeys, log);
  // The operator chose the issuer and the vault, so the host rules for tenants do not apply to them.
  const trusted = createOutbound({ rules: null, extraCa: options.extraCa });
  const rules = hostRules({ allow: options.allowHosts, deny: options.denyHosts, own: ownAddresses() });
  const admitting = createInFlight();
  const verifier = createVerifier(options.network.token.domain);
  const stopComputing = startComputeThreads(log);
  const tracer = await openTracer(options.tracing, "tollgate-gateway", log);
  const look = await openChainLook(options, trusted, log);
  const shared = { look, rules, trusted, verifier, admitting, log, meters, tracer };
  let port = options.port;
  const openMax = mostOpen();
  const parts = { options, store, openMax, port: () => port, ...state, ...shared };
  const gateway = await composeGateway(parts);
  const { lease, scheduler, settler, streaming, announcements, policy, receipts, refusals } = gateway;
  const stopCleaning = startRetention(store, options.retention, log);
  // Before anything reads calls: removes calls that a dead process had refused but that were stored after all.
  await refusals.removeAppeared();
  await lease.recover();
  state.note();
  await settler.recover();
  const stopRemoving = await startRemovingParts(store, log);
  const edge = edgeOf(parts, { app: gateway.app, fastPath: gateway.fastPath, missing: orPage });
  const bounded = [scheduler, streaming, settler, edge];
  meters.gauges({ inUse: () => Object.assign({}, ...bounded.map((part) => part.inUse())) });
  const server = openPort(options, openMax, edge, log);
  port = server.port;
  // From here on nothing can fail the start, so calls may be made. Workers load in the background, so that the start does not
  // wait for them; a call that comes before they are ready does.
  gateway.workers.start();
  await scheduler.offerPending();
  settler.start();
  streaming.start();
  receipts.start();
  const sweeping = lease.startSweeping(() => scheduler.offerPending());
  const stops = [stopCleaning, stopRemoving, compareClaims(gateway.comparing), sweeping];
  const url = `http://${hostPart(options.host)}:${server.port}`;
  log.info("listening", { url, version: VERSION });
  return {
    url,
    /** Drains and stops. Running calls get time to end; pending calls stay pending. */
    async stop() {
      await server.leave();
      edge.drain();
      const closed = server.stop();
      for (const stop of stops) stop();
      const { drainMs } = options;
      await Promise.all([
        scheduler.drain(drainMs),
        streaming.drain(drainMs),
        settler.stop(drainMs),
        // Calls that are accepted meanwhile stay pending, and their callers get the ID in a 202.
        endsWithin(drainMs, admitting.idle()),
      ]);
      refusals.stop();
      stopComputing();
      // Answers callers that wait for a call which stays pending, since they would never learn its ID otherwise.
      gateway.completionWaiters.release();
      const left = state.membership.leave().then(() => announcements?.left());
      await endsWithin(LAST_ANSWERS_MS, closed);
      await server.stop(true);
      // A stuck store must not keep the process from ending.
      const ending = [left.then(() => announcements?.close()), policy.close(), receipts.stop(), state.keyring.stop()];
      const stored = Promise.all(ending).then(() => store.close());
      const released = endsWithin(LAST_WRITES_MS, stored).finally(() => (lock ?? state).release());
      await Promise.all([released, tracer?.stop()]);
    },
  };
}

/** On SQLite the lock is held already, and every process that left something in the database is gone. */
const NO_TAKEOVER = { previous: null, note() {}, release() {} };

/** Opens the keys, completes a restore of the database, and enters this process's row in `processes`. */
async function openState({ databaseUrl, dataDir }: GatewayOptions, store: Store, masterKeys: MasterKeys, log: Log) {
  const keyring = await openKeyring(store, masterKeys, store.clock, log);
  const replica = newId("rep", store.clock.now());
  const held = databaseUrl === null ? NO_TAKEOVER : takeOver(dataDir, replica, systemClock);
  const file = databaseUrl === null ? join(dataDir, DATABASE_FILE) : null;
  // Before this process enters `processes`, since a restore can't be completed while any service counts as running.
  const restoredAt = await startRestored({ store, file, settle: () => settleRestored(store), log });
  const membership = createMembership({ store, log, id: replica, kind: "gateway" });
  await keyring.watch(membership);
  membership.start();
  return { ...held, keyring, membership, guard: createRestoreGuard(restoredAt) };
}

/** @throws StartupProblem when a node serves another chain; an unreachable node is checked when it is first used */
async function openChainLook({ network, rpcUrls: urls }: GatewayOptions, outbound: Outbound, log: Log) {
  if (urls === null) return undefined;
  const chain = createChain({ network, urls, outbound, log });
  await chain.check();
  return createChainLook(chain, timeBounds(systemClock), log);
}

function edgeOf(
  { options, keyring, store, trusted, log, meters, tracer }: GatewayParts,
  api: Pick<EdgeOptions, "app" | "fastPath" | "missing">,
): Edge {
  const { clock } = store;
  const fetchJson = (url: string) => fetchDocument(trusted, url);
  const { authenticate } = createIdentity({ ...options.identity, keyring, fetchJson, clock, log });
  return createEdge({ ...api, log, meters, tracer, authenticate, permit: managePermission(options.manageScope) });
}

function openPort(options: GatewayOptions, openMax: number, edge: Edge, log: Log): Listener {
  const { settleWaitMs } = options;
  // A paid call may wait for its settlement, and then for its end: both count as idle time of the connection.
  const waitSeconds = Math.ceil(settleWaitMs / 1000) + MAX.waitSeconds;
  const idleSeconds = Math.min(waitSeconds + CONNECTION_IDLE_SECONDS_MORE, CONNECTION_IDLE_SECONDS_MAX);
  return listen({
    ...options,
    openMax,
    idleSeconds,
    answer: (request, server, owned) =>
      edge.fetch(request, (held) => server.timeout(request, held ? 0 : idleSeconds), owned),
    log,
  });
}
