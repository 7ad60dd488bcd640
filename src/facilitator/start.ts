// Composes the facilitator from its parts and starts it: storage first, then the two listeners, then the wallets with their
// open work, for which requests wait. Stopping goes in reverse order.
import { join } from "node:path";
import { createChain } from "../chain/chain.ts";
import { createOwnTransfers } from "../chain/find-use.ts";
import { createChainTime } from "../chain/newest-block.ts";
import { startComputeThreads } from "../compute/threads.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import { VERSION } from "../core/startup.ts";
import { systemClock } from "../core/time.ts";
import type { Tracer, TracingOptions } from "../core/tracing.ts";
import { createOutbound } from "../http/client/outbound.ts";
import { hostPart } from "../http/listener.ts";
import { listenPlain } from "../http/plain-listener.ts";
import { MAX } from "../kernel/limits.ts";
import { poll } from "../kernel/loop.ts";
import { endsWithin } from "../kernel/wait.ts";
import { DATABASE_FILE } from "../keys/master-keys.ts";
import { withClockStepGuard } from "../storage/cleanup.ts";
import { acquireDataDirLock } from "../storage/data-dir.ts";
import { openStore } from "../storage/open.ts";
import { startRestored } from "../storage/restoration.ts";
import type { Store } from "../storage/store.ts";
import { openTracer } from "../tracing/open.ts";
import type { Network } from "../x402/network.ts";
import type { Hex } from "../x402/types.ts";
import { createVerifier } from "../x402/verify.ts";
import { accountOf } from "./accounts.ts";
import { followTlsFiles, LISTENER_LIMITS, listenMutualTls, type TlsMaterial, type TlsReading } from "./mtls.ts";
import type { Limits } from "./payments/guardrails.ts";
import { createPaymentSpans } from "./payments/payment-spans.ts";
import { cleanUpFacilitator } from "./payments/retention.ts";
import { createOpenEdge, createPeerEdge, x402V1 } from "./routes.ts";
import { createSettle, createSettlementWaiters } from "./settle/settle.ts";
import { createOwnWallets, createWalletLeases } from "./wallet/leases.ts";
import { createLocalSigner, createRemoteSigner } from "./wallet/signer.ts";
import { createWallet, requireMulticall3, type WalletLimits } from "./wallet/wallet.ts";

/** How often this process looks for work that another one has left behind. */
const TAKE_UP_MS = 10_000;
/** How often this process polls for other processes' claims on its wallets: faster while it finds some. */
const TAKE_CLAIMED_MS = { leastMs: 50, mostMs: 400 };

export interface FacilitatorOptions {
  readonly network: Network;
  readonly host: string;
  /** The mutual-TLS port; 0 takes a free one. */
  readonly port: number;
  /** The plain port of `/supported` and `/healthz`; 0 takes a free one. */
  readonly openPort: number;
  readonly dataDir: string;
  readonly databaseUrl: string | null;
  readonly drainMs: number;
  /** Null where traces are off. */
  readonly tracing: TracingOptions | null;
  readonly tls: TlsMaterial;
  /** Reads the TLS material again from its files; null when it never changes. */
  readonly readTls: (() => Promise<TlsReading>) | null;
  /** Tried in order. The URLs may contain API keys, so they are secrets too. */
  readonly rpcUrls: readonly string[];
  /** Private keys of 32 bytes, or a wallet for which a remote signer signs. */
  readonly signers:
    | { readonly kind: "local"; readonly keys: readonly Hex[] }
    | { readonly kind: "remote"; readonly url: string; readonly address: Hex };
  readonly limits: Limits & WalletLimits & { readonly inclusionTimeoutMs: number };
}

export type RunningFacilitator = Awaited<ReturnType<typeof startFacilitator>>;

/** @throws StartupProblem for a problem that the operator can fix, such as a node of another chain */
export async function startFacilitator(options: FacilitatorOptions, log: Log, meters: Meters) {
  // If the start fails anywhere, everything opened so far is closed again.
  await using opened = new AsyncDisposableStack();
  const tracer = await openTracer(options.tracing, "tollgate-facilitator", log);
  opened.defer(() => tracer?.stop());
  if (options.databaseUrl === null) {
    const lock = acquireDataDirLock(options.dataDir);
    opened.defer(() => lock.release());
  }
  const { databaseUrl, dataDir } = options;
  const store = await openStore({ databaseUrl, dataDir, log, clock: systemClock });
  opened.defer(() => store.close());
  const file = databaseUrl === null ? join(dataDir, DATABASE_FILE) : null;
  const restoredAt = await startRestored({ store, file, settle: async () => {}, log });
  const { chain, wallet, outcomes, settle } = compose(options, store, restoredAt, { log, meters, tracer });
  await chain.check();
  if (options.limits.batch > 1) await requireMulticall3(chain);

  const started = Promise.withResolvers<void>();
  const protocol = x402V1(options.network);
  const edge = createPeerEdge({
    protocol,
    read: store.read,
    log,
    meters,
    tracer,
    // The port opens before the wallets have started, so requests wait until the wallets know their nonces.
    settle: (account, request) => started.promise.then(() => settle.settle(account, request)),
    finalAfterSeconds: options.limits.confirmations * options.network.blockSeconds,
    readiness: wallet.readiness,
  });
  const { tls, readTls: read } = options;
  const listener = await listenMutualTls({
    host: options.host,
    port: options.port,
    tls,
    answer: edge.fetch,
    ownerOf: async (fingerprint) => (await accountOf(store.read, fingerprint))?.name ?? null,
    bodyBytesMax: MAX.settleBodyBytes,
    limits: LISTENER_LIMITS,
    clock: systemClock,
    log,
  });
  opened.defer(() => listener.stop());
  if (read !== null) opened.defer(followTlsFiles({ read, tls, take: listener.renew, log }));
  const open = createOpenEdge({ protocol, readiness: wallet.readiness, log, meters });
  const openAt = { host: options.host, port: options.openPort, variable: "TOLLGATE_OPEN_PORT" };
  const openServer = await listenPlain({ ...openAt, log, answer: (request) => open.fetch(request) });
  opened.defer(() => openServer.stop());

  await wallet.start(() => void settle.recover());
  opened.defer(() => wallet.stop());
  started.resolve();
  void settle.recover();
  opened.defer(() => settle.stop());
  opened.defer(startComputeThreads(log));
  // Readiness is logged only when it is asked for, so the process asks for it itself.
  opened.defer(startTakingUp(log, () => Promise.all([wallet.readiness(), wallet.takeUp(), settle.takeUp()])));
  if (store.isShared) opened.defer(poll(TAKE_CLAIMED_MS, settle.takeClaimed).stop);
  const { clock } = store;
  opened.defer(withClockStepGuard({ clock, log, everyMs: 600_000 }, () => cleanUpFacilitator(store, clock, log)));

  const url = `https://${hostPart(options.host)}:${listener.port}`;
  const openUrl = `http://${hostPart(options.host)}:${openServer.port}`;
  log.info("listening", { url, open_url: openUrl, version: VERSION });
  const running = opened.move();
  return {
    /** The URL of the mutual-TLS listener. */
    url,
    openUrl,
    /** Drains and stops: requests in progress may end first, and what is not settled by then goes on at the next start. */
    async stop(): Promise<void> {
      edge.drain();
      open.drain();
      const drained = Promise.all([listener.drain(), openServer.drain()]);
      await endsWithin(options.drainMs, drained);
      // Requests that still wait for a block are answered with the hash of the transaction that may still land.
      outcomes.release();
      // Responses may still be being sent when everything else has ended.
      await endsWithin(2_000, drained);
      await running.disposeAsync();
    },
  };
}

function compose(
  { network, rpcUrls, signers, limits }: FacilitatorOptions,
  store: Store,
  restoredAt: number | null,
  { log, meters, tracer }: { readonly log: Log; readonly meters: Meters; readonly tracer: Tracer | null },
) {
  // The operator chose nodes and signer, so any address is allowed.
  const outbound = createOutbound({ rules: null, extraCa: null });
  const chain = createChain({ network, urls: rpcUrls, outbound, log, onError: meters.rpcFailed, tracer });
  const outcomes = createSettlementWaiters(store);
  const { clock } = store;
  const spans = createPaymentSpans(tracer);
  const common = { network, store, clock, log, meters, outcomes, limits, spans };
  const own =
    signers.kind === "local"
      ? signers.keys.map((key) => createLocalSigner(network, key))
      : [createRemoteSigner({ network, url: signers.url, address: signers.address, outbound })];
  const wallets = own.map(({ address }) => address);
  const leases = createWalletLeases({ store, clock, log, wallets });
  const wallet = createWallet({ ...common, chain, signers: own, leases });
  const settleChain = { ...chain, simulate: wallet.simulate, time: createChainTime({ chain, clock, log }) };
  meters.gauges({ balances: wallet.balances });
  const ownWallets = createOwnWallets(store, wallets);
  const findOwnTransfer = createOwnTransfers({ restoredAt, clock, chain, ownWallets });
  const verifier = createVerifier(network.token.domain);
  const settle = createSettle({ ...common, wallet, findOwnTransfer, verifier, chain: settleChain });
  return { chain, outcomes, wallet, settle };
}

/** Takes up work left behind, at once and then every ten seconds. Returns a function that ends this. */
function startTakingUp(log: Log, takeUp: () => Promise<unknown>): () => void {
  const run = () => void takeUp().catch((error) => log.warn("taking_up_failed", { error }));
  run();
  const timer = setInterval(run, TAKE_UP_MS);
  return () => clearInterval(timer);
}
