// Starts the gateway: storage, identity, what runs calls, then the listener. It stops in reverse order.
import { endsWithin } from "../concurrency/deadline.ts";
import { createUnderWay } from "../concurrency/under-way.ts";
import { systemClock } from "../core/clock.ts";
import { hostRules } from "../core/host.ts";
import { newId } from "../core/id.ts";
import { WAIT_SECONDS_MAX } from "../core/limits.ts";
import type { Log } from "../core/log.ts";
import { VERSION } from "../core/version.ts";
import { createDecoderShare } from "../http/decoder-share.ts";
import { fetchDocument } from "../http/fetch-json.ts";
import { ownAddresses } from "../http/interfaces.ts";
import { type Listener, listen } from "../http/listener.ts";
import { createOutbound } from "../http/outbound.ts";
import { createEdge, type Edge } from "../http/server.ts";
import { openKeyring } from "../keys/keyring.ts";
import type { MasterKeys } from "../keys/master-keys.ts";
import { acquireDataDirLock } from "../storage/lock.ts";
import { openStore } from "../storage/open.ts";
import type { Store } from "../storage/store.ts";
import { openTracer } from "../tracing/open.ts";
import { createVerifier } from "../x402/verifier/verifier.ts";
import { composeGateway } from "./compose.ts";
import { createIdentity } from "./identity/identity.ts";
import { managePermission } from "./identity/permission.ts";
import { compareClaims } from "./invocations/claims.ts";
import { startRemovingParts } from "./invocations/loose-parts.ts";
import type { GatewayOptions } from "./options.ts";
import { startRetention } from "./retention.ts";

/** Time for the last answers to be sent, and for the last writes, after everything else has ended. */
const [LAST_ANSWERS_MS, LAST_WRITES_MS] = [2_000, 3_000];
/** Added to the longest wait of a caller, during which nothing passes on its connection. */
const CONNECTION_IDLE_SECONDS_MORE = 10;
/** Bun's own limit. */
const CONNECTION_IDLE_SECONDS_MAX = 255;

/** @throws StartupProblem for what the operator can fix */
export async function startGateway(options: GatewayOptions, masterKeys: MasterKeys, log: Log) {
  const { dataDir, databaseUrl } = options;
  const lock = databaseUrl === null ? acquireDataDirLock(dataDir) : null;
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  const keys = await openKeys(store, masterKeys, lock !== null, log);
  // The operator chose the issuer and the vault, so the host rules for tenants do not apply to them.
  const trusted = createOutbound({ rules: null, extraCa: options.extraCa });
  const rules = hostRules({ allow: options.allowHosts, deny: options.denyHosts, own: ownAddresses() });
  const [admitting, verifier] = [createUnderWay(), createVerifier({ log })];
  const tracer = await openTracer(options.tracing, "tollgate-gateway", log);
  const shared = { rules, trusted, decoders: createDecoderShare(), verifier, admitting, log, tracer };
  const parts = { options, store, ...keys, ...shared };
  const {
    workers,
    scheduler,
    settler,
    streaming,
    completionWaiters,
    announcements,
    policy,
    receipts,
    refusals,
    comparing,
    ...api
  } = await composeGateway(parts);
  const identity = createIdentity({
    ...options.identity,
    keyring: keys.keyring,
    fetchJson: (url) => fetchDocument(trusted, url),
    clock: store.clock,
    log,
  });
  const stopCleaning = await startRetention(store, options.retention, log);
  // Before anything looks at calls: remove calls that a dead process refused but its disk stored after all.
  await refusals.removeAppeared();
  await scheduler.recover();
  await settler.recover();
  const stopRemoving = await startRemovingParts(store, log);
  const permit = managePermission(options.manageScope);
  const edge = createEdge({ ...api, log, tracer, authenticate: (header) => identity.authenticate(header), permit });
  const server = openPort(options, edge, log);
  // From here on nothing can keep the gateway from starting, so calls may be made.
  // Workers load beside that, so that the first answer does not wait for them. A call that comes earlier does.
  workers.start();
  await scheduler.start();
  settler.start();
  streaming.start();
  receipts.start();
  const stopComparing = compareClaims(comparing);
  const url = `http://${options.host.includes(":") ? `[${options.host}]` : options.host}:${server.port}`;
  log.info("listening", { url, version: VERSION });
  return {
    url,
    /** Drains and stops. Running calls get time to end; pending calls stay pending. */
    async stop() {
      await server.leave();
      edge.drain();
      const closed = server.stop();
      stopCleaning();
      stopRemoving();
      stopComparing();
      const { drainMs } = options;
      await Promise.all([
        scheduler.drain(drainMs),
        streaming.drain(drainMs),
        settler.stop(drainMs),
        // Calls accepted meanwhile stay pending; their callers get the ID in a 202.
        endsWithin(drainMs, admitting.idle()),
      ]);
      refusals.stop();
      verifier.close();
      // Answer callers that wait for a call which stays pending: without this they would never learn its ID.
      completionWaiters.release();
      const left = scheduler.leave().then(() => announcements?.left());
      await endsWithin(LAST_ANSWERS_MS, closed);
      await server.stop(true);
      // A stuck store must not keep the process from ending.
      const ending = [left.then(() => announcements?.close()), policy.close(), receipts.stop(), keys.keyring.stop()];
      const stored = Promise.all(ending).then(() => store.close());
      const released = endsWithin(LAST_WRITES_MS, stored).finally(() => lock?.release());
      await Promise.all([released, tracer?.stop()]);
    },
  };
}

/** The keys, and the name under which this process holds them. */
async function openKeys(store: Store, masterKeys: MasterKeys, alone: boolean, log: Log) {
  const keyring = await openKeyring(store, masterKeys, store.clock, log);
  const replica = newId("rep", store.clock.now());
  await keyring.watch(replica, alone);
  return { keyring, replica };
}

function openPort({ host, port, reusePort, settleWaitMs }: GatewayOptions, edge: Edge, log: Log): Listener {
  // A paid call may wait for its settlement, and then for its end.
  const waitSeconds = Math.ceil(settleWaitMs / 1000) + WAIT_SECONDS_MAX;
  const idleSeconds = Math.min(waitSeconds + CONNECTION_IDLE_SECONDS_MORE, CONNECTION_IDLE_SECONDS_MAX);
  return listen({
    host,
    port,
    reusePort,
    idleSeconds,
    answer: (request, server) => edge.fetch(request, (held) => server.timeout(request, held ? 0 : idleSeconds)),
    log,
  });
}
