// `tollgate demo`: the whole paid flow on this machine, in one process beside the chain's: a chain with the real
// token, both services, two agents with prices. It plays paid calls through HTTP and then stays up to be tried. What it
// writes is in one temporary directory, which goes with it.
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { startCalculator, startNotary } from "./demo/agents.ts";
import { type Anvil, BLOCK_SECONDS, findAnvil, startAnvil } from "./demo/anvil.ts";
import { type DemoChain, furnishChain, usdc } from "./demo/chain.ts";
import { configureSettlement, registerAgents } from "./demo/market.ts";
import { type Collection, showWhatIsThere } from "./demo/next.ts";
import { type DemoAccount, newAccount } from "./demo/payer.ts";
import { playPaidCall, playPricedTool, type Stage } from "./demo/play.ts";
import { DemoProblem } from "./demo/problem.ts";
import type { Screen } from "./demo/screen.ts";
import {
  type Certificates,
  makeCertificates,
  startDemoFacilitator,
  startDemoGateway,
} from "./demo/services.ts";

const STEP_MS_MAX = 20_000;
const PLAY_MS_MAX = 60_000;
const PAYER_UNITS = 10_000_000n;
const SIGNER_WEI = 10n ** 18n;

export interface DemoOptions {
  /** Null to look on the PATH and among the packages of the working directory. */
  readonly anvil: string | null;
  readonly cwd: string;
  readonly screen: Screen;
  readonly log: Log;
}

export interface Demo {
  /** Resolves when everything has been stopped because something failed, which has been told then. */
  readonly failed: Promise<void>;
  /** Stops everything, also what is just being started. */
  stop(): Promise<void>;
}

/** What is running, and how it is taken down again. */
interface Run extends DemoOptions {
  readonly dir: string;
  readonly signal: AbortSignal;
  readonly opened: AsyncDisposableStack;
  fail(reason: string): void;
}

export function startDemo(options: DemoOptions): Demo {
  const { screen, log } = options;
  const stopping = new AbortController();
  const opened = new AsyncDisposableStack();
  const dir = temporaryDirectory(opened);
  const failure = Promise.withResolvers<never>();
  const run: Run = {
    ...options,
    dir,
    opened,
    signal: stopping.signal,
    fail: (reason) => failure.reject(new DemoProblem(reason)),
  };
  const close = once(async () => {
    stopping.abort(new DemoProblem("stopped"));
    await opened.disposeAsync();
  });
  const failed = new Promise<void>((resolve, reject) => {
    // Not at once: who calls has yet to listen for what is to stop it.
    const played = Promise.resolve().then(() => play(run));
    Promise.race([played.then(() => failure.promise), failure.promise]).catch((error: unknown) => {
      // Whatever ends while everything is being stopped is no failure.
      if (stopping.signal.aborted) return;
      if (!isExpected(error)) log.error("demo_failed", { error });
      screen.line();
      screen.note(`The demo can't go on: ${reasonOf(error)}`);
      close().then(resolve, reject);
    });
  });
  return {
    failed,
    async stop() {
      screen.line();
      screen.line("Stopping everything.");
      await close();
      screen.line("Stopped. Nothing is left behind.");
    },
  };
}

function once(work: () => Promise<void>): () => Promise<void> {
  let done: Promise<void> | null = null;
  return () => {
    done ??= work();
    return done;
  };
}

/** Goes last, and at the latest when the process exits, in whatever haste. */
function temporaryDirectory(opened: AsyncDisposableStack): string {
  const dir = mkdtempSync(join(tmpdir(), "tollgate-demo-"));
  const remove = () => rmSync(dir, { recursive: true, force: true });
  process.on("exit", remove);
  opened.defer(remove);
  return dir;
}

async function play(run: Run): Promise<void> {
  const { screen, dir, opened, log } = run;
  screen.section("tollgate demo: a paid call, from the challenge to the money");
  const [payer, payee] = [newAccount(), newAccount()];
  const collection = await startCollection(run, payer);
  const gateway = await step(run, "gateway", async () => {
    const started = await startDemoGateway(join(dir, "gateway"), log);
    opened.defer(() => started.stop());
    return [started, started.url];
  });
  const upstreams = await step(run, "agents", async () => {
    const [notary, calculator] = [startNotary(), startCalculator()];
    opened.defer(async () => void (await Promise.all([notary.stop(), calculator.stop()])));
    const shown = `notary (http) at ${new URL(notary.url).host}, calculator (mcp) at ${new URL(calculator.url).host}`;
    return [{ notary: notary.url, calculator: calculator.url }, shown];
  });
  const stage = await step(run, "catalogue", async (signal): Promise<[Stage, string]> => {
    const tenant = { url: gateway.url, token: await gateway.mintToken("demo", "you") };
    const agents = await registerAgents(tenant, upstreams, payee.address, signal);
    if (collection !== null) {
      const { facilitator, certificates } = collection;
      await configureSettlement(tenant, facilitator.url, certificates.bundle, signal);
    }
    const shown =
      collection === null ? "agents and prices" : "agents, prices, and who settles: through the API";
    return [{ screen, tenant, agents, payer, payee: payee.address, chain: collection?.chain ?? null }, shown];
  });
  await bounded(run, PLAY_MS_MAX, (signal) => playPaidCall(stage, signal));
  await bounded(run, PLAY_MS_MAX, (signal) => playPricedTool(stage, signal));
  await showWhatIsThere(stage, collection, dir);
}

type Started = Collection & { readonly certificates: Certificates };

/** The chain and who collects on it; null where there is no anvil, which is told then. */
async function startCollection(run: Run, payer: DemoAccount): Promise<Started | null> {
  const { screen } = run;
  const search = findAnvil(run.anvil, run.cwd);
  if ("missing" in search) {
    screen.failed("chain", "anvil is missing");
    for (const line of search.missing) screen.note(line);
    screen.note("So nothing is collected this time: no facilitator either. Payments are only verified.");
    return null;
  }
  const signer = newAccount();
  const chain = await startChain(run, search.anvil, payer, signer);
  const certificates = await step(run, "certificates", async () => {
    const made = await makeCertificates(join(run.dir, "pki"));
    return [made, "a private CA, the facilitator's, and the gateway's as a bundle"];
  });
  const facilitator = await step(run, "facilitator", async () => {
    const needs = {
      dir: join(run.dir, "facilitator"),
      certificates,
      rpcUrl: chain.url,
      signerKey: signer.key,
    };
    const started = await startDemoFacilitator(needs, run.log);
    run.opened.defer(() => started.stop());
    return [started, `${started.url}, mutual TLS, one account: the gateway's`];
  });
  return { chain, certificates, facilitator };
}

async function startChain(
  run: Run,
  anvil: Anvil,
  payer: DemoAccount,
  signer: DemoAccount,
): Promise<DemoChain> {
  const node = await step(run, "chain", async (signal) => {
    const home = join(run.dir, "chain");
    mkdirSync(home);
    const ended = () => run.fail("the chain has ended by itself");
    const started = await startAnvil(anvil, { home, dir: run.dir, ended }, signal);
    run.opened.defer(() => started.stop());
    return [started, `${started.url}, anvil ${anvil.found}, a block every ${BLOCK_SECONDS} s`];
  });
  return step(run, "token", async () => {
    const gas = [{ address: signer.address, wei: SIGNER_WEI }];
    const minted = [{ address: payer.address, units: PAYER_UNITS }];
    const chain = await furnishChain(node, { gas, usdc: minted });
    return [chain, `Circle's USDC at its Base address; ${usdc(PAYER_UNITS)} USDC for the payer`];
  });
}

/** One step of the start: its line appears when it is done, with the time that it took. */
async function step<T>(
  run: Run,
  name: string,
  work: (signal: AbortSignal) => Promise<[result: T, detail: string]>,
): Promise<T> {
  const startedAt = performance.now();
  run.screen.begin(name);
  try {
    const [result, detail] = await bounded(run, STEP_MS_MAX, work);
    run.screen.done(name, detail, performance.now() - startedAt);
    return result;
  } catch (error) {
    run.signal.throwIfAborted();
    run.screen.failed(name, "failed");
    throw isExpected(error) ? new DemoProblem(`${name}: ${error.message}`, { cause: error }) : error;
  }
}

/** @throws DemoProblem when it takes too long, or when everything is being stopped: then what it starts is nobody's */
async function bounded<T>(run: Run, msMax: number, work: (signal: AbortSignal) => Promise<T>): Promise<T> {
  run.signal.throwIfAborted();
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(new DemoProblem(`it took longer than ${msMax / 1000} s`)), msMax);
  const signal = AbortSignal.any([run.signal, late.signal]);
  const aborted = Promise.withResolvers<never>();
  signal.addEventListener("abort", () => aborted.reject(signal.reason));
  try {
    return await Promise.race([work(signal), aborted.promise]);
  } finally {
    clearTimeout(timer);
  }
}

/** Of the others the log tells where they come from. */
function isExpected(error: unknown): error is DemoProblem | StartupProblem {
  return error instanceof DemoProblem || error instanceof StartupProblem;
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
