// `tollgate demo`: the whole paid flow on this machine, in one process beside the chain's: a chain with the real
// token, both services, two agents with prices. It makes paid calls through HTTP and then stays up to be tried. All its
// files are in one temporary directory, which is removed at the end.
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import type { RunningFacilitator } from "../facilitator/start.ts";
import { CHAIN_ID } from "../x402/kind.ts";
import { type Anvil, BLOCK_SECONDS, type DemoChain, findAnvil, furnishChain, startAnvil, usdc } from "./demo/chain.ts";
import {
  configureSettlement,
  type DemoAccount,
  DemoProblem,
  FACTORIZE_PRICE,
  NOTARY_PRICE,
  newAccount,
  registerAgents,
} from "./demo/client.ts";
import payCommand from "./demo/pay.sh" with { type: "text" };
import { runPaidCall, runPricedTool, type Scenario } from "./demo/scenario.ts";
import {
  makeCertificates,
  startCalculator,
  startDemoFacilitator,
  startDemoGateway,
  startNotary,
} from "./demo/services.ts";
import { openTerminal, type Terminal } from "./demo/terminal.ts";
import { quoted } from "./program.ts";

const SCENARIO_MS_MAX = 60_000;
const PAYER_UNITS = 10_000_000n;
const SIGNER_WEI = 10n ** 18n;

/** What is running, and how it is taken down again. */
interface RunningDemo {
  readonly anvil: Anvil;
  readonly terminal: Terminal;
  readonly log: Log;
  readonly dir: string;
  readonly signal: AbortSignal;
  readonly opened: AsyncDisposableStack;
  fail(reason: string): void;
}

/**
 * @param named anvil as the operator names it; null to look for it
 * @throws StartupProblem when there is no anvil
 */
export function startDemo(named: string | null, log: Log) {
  const anvil = findAnvil(named, process.cwd());
  const terminal = openTerminal(process.stdout);
  const stopping = new AbortController();
  const opened = new AsyncDisposableStack();
  const dir = temporaryDirectory(opened);
  const failure = Promise.withResolvers<never>();
  const run: RunningDemo = {
    anvil,
    terminal,
    log,
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
    // Later, so that the caller can first install what stops the demo.
    const played = Promise.resolve().then(() => play(run));
    Promise.race([played.then(() => failure.promise), failure.promise]).catch((error: unknown) => {
      // Anything that ends while the demo is being stopped is not a failure.
      if (stopping.signal.aborted) return;
      if (!isExpected(error)) log.error("demo_failed", { error });
      terminal.line();
      terminal.note(`The demo can't go on: ${reasonOf(error)}`);
      close().then(resolve, reject);
    });
  });
  return {
    /** Resolves when something has failed, was shown, and everything has been stopped. */
    failed,
    /** Stops everything, including what is still starting. */
    async stop() {
      terminal.line();
      terminal.line("Stopping everything.");
      await close();
      terminal.line("Stopped. Nothing is left behind.");
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

/** Removed last, and at the latest when the process exits. */
function temporaryDirectory(opened: AsyncDisposableStack): string {
  const dir = mkdtempSync(join(tmpdir(), "tollgate-demo-"));
  const remove = () => rmSync(dir, { recursive: true, force: true });
  process.on("exit", remove);
  opened.defer(remove);
  return dir;
}

async function play(run: RunningDemo): Promise<void> {
  const { terminal, dir, opened, log } = run;
  terminal.section("tollgate demo: a paid call, from the challenge to the money");
  const [payer, payee] = [newAccount(), newAccount()];
  const { chain, certificates, facilitator } = await startSettling(run, payer);
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
  const scenario = await step(run, "catalogue", async (signal): Promise<[Scenario, string]> => {
    const tenant = { url: gateway.url, token: await gateway.mintToken("demo", "you") };
    const agents = await registerAgents(tenant, upstreams, payee.address, signal);
    await configureSettlement(tenant, facilitator.url, certificates.bundle, signal);
    const shown = "agents, prices, and who settles: through the API";
    return [{ terminal, tenant, agents, payer, payee: payee.address, chain }, shown];
  });
  await bounded(run, SCENARIO_MS_MAX, (signal) => runPaidCall(scenario, signal));
  await bounded(run, SCENARIO_MS_MAX, (signal) => runPricedTool(scenario, signal));
  await showSummary(scenario, facilitator, dir);
}

async function startSettling(run: RunningDemo, payer: DemoAccount) {
  const signer = newAccount();
  const chain = await startChain(run, payer, signer);
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

async function startChain(run: RunningDemo, payer: DemoAccount, signer: DemoAccount): Promise<DemoChain> {
  const { anvil } = run;
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
  run: RunningDemo,
  name: string,
  work: (signal: AbortSignal) => Promise<[result: T, detail: string]>,
): Promise<T> {
  const startedAt = performance.now();
  run.terminal.begin(name);
  try {
    const [result, detail] = await bounded(run, 20_000, work);
    run.terminal.done(name, detail, performance.now() - startedAt);
    return result;
  } catch (error) {
    run.signal.throwIfAborted();
    run.terminal.failed(name, "failed");
    throw isExpected(error) ? new DemoProblem(`${name}: ${error.message}`, { cause: error }) : error;
  }
}

/** @throws DemoProblem when it takes too long, or when everything is being stopped */
async function bounded<T>(run: RunningDemo, msMax: number, work: (signal: AbortSignal) => Promise<T>): Promise<T> {
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

/** Other errors are logged with their stack. */
function isExpected(error: unknown): error is DemoProblem | StartupProblem {
  return error instanceof DemoProblem || error instanceof StartupProblem;
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Where everything listens, and commands to copy, with which readers pay for a call themselves. */
async function showSummary(
  { terminal, tenant, agents, payer, chain }: Scenario,
  facilitator: Pick<RunningFacilitator, "url" | "openUrl">,
  dir: string,
): Promise<void> {
  terminal.section("All of it stays up until you press Ctrl-C");
  terminal.entries([
    ["gateway", tenant.url],
    ["Swagger UI", `${tenant.url}/swagger  (Authorize takes the token below)`],
    ["http agent", `${agents.notary}  notary, ${usdc(NOTARY_PRICE)} USDC a call`],
    ["mcp agent", `${agents.calculator}  calculator, ${usdc(FACTORIZE_PRICE)} USDC for factorize`],
    ["facilitator", `${facilitator.url}  mutual TLS: /settle, /supported, /healthz`],
    ["", `${facilitator.openUrl.padEnd(facilitator.url.length)}  open: /supported, /healthz`],
    ["chain RPC", `${chain.url}  chain ID ${CHAIN_ID}`],
    ["payer", `${payer.address}  with ${usdc(await chain.usdcOf(payer.address))} USDC`],
    ["files", `${dir}  (goes with the demo)`],
  ]);
  terminal.line();
  terminal.note("PAYER_KEY below is a throw-away key, made for this run and for this machine. It is worth");
  terminal.note("nothing anywhere else: never send anything to it, and never use it again.");
  terminal.section("Pay for a call yourself, in another terminal");
  terminal.line("These are the gateway, a token of the tenant for 12 hours, the agent, the payer's key, and");
  terminal.line("where the files of the demo are:");
  terminal.line();
  terminal.verbatim(`export GATEWAY=${tenant.url}`);
  terminal.verbatim(`export TOKEN=${tenant.token}`);
  terminal.verbatim(`export AGENT=${agents.notary}`);
  terminal.verbatim(`export PAYER_KEY=${payer.key}`);
  terminal.verbatim(`export FILES=${quoted(dir)}`);
  terminal.line();
  terminal.line("See what it costs:");
  terminal.line();
  terminal.verbatim(CHALLENGE_COMMAND);
  terminal.line();
  terminal.line("Pay it with the official client, unmodified. npm installs it beside these files, and");
  terminal.line("it goes with them:");
  terminal.line();
  terminal.verbatim(payCommand.trimEnd());
  terminal.line();
  terminal.line("Ctrl-C here stops everything, and removes it.");
}

const CHALLENGE_COMMAND = `curl -si "$GATEWAY/v1/proxy/$AGENT" -H "Authorization: Bearer $TOKEN" -d hello`;
