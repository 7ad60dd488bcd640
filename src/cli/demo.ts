// `tollgate demo`: shows paid calls from end to end on this machine. It starts a local chain with the real token and, in one
// process, both services and two agents with prices. The demo makes paid calls over HTTP and then stays up for the reader to
// try. Its files are in one temporary directory, which is removed at the end.
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { StartupProblem } from "../core/startup.ts";
import type { RunningFacilitator } from "../facilitator/start.ts";
import { createOutbound } from "../http/client/outbound.ts";
import { type Network, usdc } from "../x402/network.ts";
import { newAccount } from "./call/payment.ts";
import { DemoProblem, findAnvil, furnishChain, startAnvil } from "./demo/chain.ts";
import payCommand from "./demo/pay.txt" with { type: "text" };
import * as scenes from "./demo/scenario.ts";
import * as services from "./demo/services.ts";
import { terminal } from "./demo/terminal.ts";
import type { OpenLog } from "./log.ts";
import { drainOnSignal, logStrayErrors } from "./process.ts";
import { quoted } from "./program.ts";

const PAYER_UNITS = 10_000_000n;

type DemoRun = Readonly<{ network: Network; opened: AsyncDisposableStack; log: OpenLog }>;

/**
 * Runs the demo until a signal comes or something fails; then everything is stopped and the process exits.
 * @param named the anvil that the operator has configured; null to search for it @throws StartupProblem when there is none
 */
export async function runDemo(named: string | null, network: Network, log: OpenLog): Promise<void> {
  const anvil = findAnvil(named, process.cwd());
  const opened = new AsyncDisposableStack();
  logStrayErrors(log);
  drainOnSignal(async () => {
    terminal.line();
    terminal.line("Stopping everything.");
    await opened.disposeAsync();
    terminal.line("Stopped. Nothing is left behind.");
  }, log);
  // Ends the demo when its output is closed, as by `tollgate demo | head`.
  process.stdout.on("error", () => process.kill(process.pid, "SIGTERM"));
  try {
    await play(anvil, { network, opened, log });
  } catch (error) {
    // Errors while the demo is stopping are no failure; the handler of the signal ends the process.
    if (opened.disposed) return;
    if (!isExpected(error)) log.error("demo_failed", { error });
    terminal.line();
    terminal.note(`The demo can't go on: ${error instanceof Error ? error.message : error}`);
    await opened.disposeAsync();
    process.exit(1);
  }
}

/** Whether the message of the error says enough; other errors are logged with their stack. */
const isExpected = (error: unknown): error is Error => error instanceof DemoProblem || error instanceof StartupProblem;

/** @throws DemoProblem when the chain ends; the error of the step that fails */
async function play(anvil: ReturnType<typeof findAnvil>, demo: DemoRun): Promise<never> {
  const { network, opened } = demo;
  terminal.section("tollgate demo: a paid call, from the challenge to the money");
  const dir = temporaryDirectory(opened);
  const chain = await step("chain", opened, async () => {
    const started = await startAnvil(anvil.path, network, dir, opened);
    return [started, `${started.url}, anvil ${anvil.found}, a block every ${network.blockSeconds} s`];
  });
  const ended = chain.ended.then(() => {
    throw new DemoProblem("anvil, which runs the chain, has exited");
  });
  return Promise.race([ended, playOn(chain.url, dir, demo).then(() => ended)]);
}

/** Makes a directory that is removed after everything is stopped, and at the latest when the process exits. */
function temporaryDirectory(opened: AsyncDisposableStack): string {
  const dir = mkdtempSync(join(tmpdir(), "tollgate-demo-"));
  const remove = () => rmSync(dir, { recursive: true, force: true });
  process.on("exit", remove);
  opened.defer(remove);
  return dir;
}

async function playOn(url: string, dir: string, { network, opened, log }: DemoRun): Promise<void> {
  const [payer, payee, signer] = [newAccount(), newAccount(), newAccount()];
  const chain = await step("token", opened, async () => {
    const furnished = await furnishChain(network, url, signer.address, payer.address, PAYER_UNITS);
    return [furnished, `Circle's USDC at its ${network.title} address; ${usdc(PAYER_UNITS)} USDC for the payer`];
  });
  const certificates = await step("certificates", opened, async () => {
    const made = await services.makeCertificates(join(dir, "pki"));
    return [made, "a private CA, and certificates for the facilitator and the gateway"];
  });
  const facilitator = await step("facilitator", opened, async () => {
    const started = await services.startDemoFacilitator(join(dir, "facilitator"), certificates, url, signer.key, log);
    opened.defer(started.stop);
    return [started, `${started.url}, mutual TLS, with an account for the gateway`];
  });
  const gateway = await step("gateway", opened, async () => {
    const started = await services.startDemoGateway(join(dir, "gateway"), log);
    opened.defer(started.stop);
    return [started, started.url];
  });
  const upstreams = await step("agents", opened, async () => {
    const [notary, calculator] = [services.startNotary(), services.startCalculator()];
    opened.defer(async () => void (await Promise.all([notary.stop(), calculator.stop()])));
    const shown = `notary (http) at ${new URL(notary.url).host}, calculator (mcp) at ${new URL(calculator.url).host}`;
    return [{ notary: notary.url, calculator: calculator.url }, shown];
  });
  const scenario = await step("catalogue", opened, async () => {
    const outbound = createOutbound({ rules: null, extraCa: null });
    const tenant = { url: gateway.url, token: await gateway.mintToken(), outbound };
    const priced = { asset: network.token.symbol, network: network.name, pay_to: payee.address };
    const agents = await scenes.registerAgents(tenant, upstreams, priced);
    await scenes.configureSettlement(tenant, facilitator.url, certificates.bundle);
    return [{ tenant, agents, payer, payee: payee.address, chain }, "agents, prices, facilitator: set through the API"];
  });
  await scenes.runPaidCall(scenario);
  await scenes.runPricedTool(scenario);
  await showSummary(scenario, facilitator, dir);
}

/** Runs one step of the start and prints its line when it is done, with the time that it took. */
async function step<T>(name: string, opened: AsyncDisposableStack, work: () => Promise<[T, string]>): Promise<T> {
  if (opened.disposed) throw new DemoProblem("stopped");
  const startedAt = performance.now();
  try {
    const [result, detail] = await work();
    terminal.done(name, detail, performance.now() - startedAt);
    return result;
  } catch (error) {
    throw isExpected(error) ? new DemoProblem(`${name}: ${error.message}`, { cause: error }) : error;
  }
}

/** Prints where everything listens, and the commands with which readers can pay for a call themselves. */
async function showSummary(scenario: scenes.Scenario, facilitator: RunningFacilitator, dir: string): Promise<void> {
  const { tenant, agents, payer, chain } = scenario;
  terminal.section("Everything stays up until you press Ctrl-C");
  terminal.entries([
    ["gateway", tenant.url],
    ["Swagger UI", `${tenant.url}/swagger  (Authorize takes the token below)`],
    ["http agent", `${agents.notary}  notary, ${usdc(scenes.NOTARY_PRICE)} USDC a call`],
    ["mcp agent", `${agents.calculator}  calculator, ${usdc(scenes.FACTORIZE_PRICE)} USDC for factorize`],
    ["facilitator", `${facilitator.url}  mutual TLS: /settle, /supported, /healthz`],
    ["", `${facilitator.openUrl.padEnd(facilitator.url.length)}  open: /supported, /healthz`],
    ["chain RPC", `${chain.url}  chain ID ${chain.network.chainId}`],
    ["payer", `${payer.address}  with ${usdc(await chain.usdcOf(payer.address))} USDC`],
    ["files", `${dir}  (removed with the demo)`],
  ]);
  terminal.line();
  terminal.note("PAYER_KEY below is a throw-away key, made for this run on this machine. It is worth");
  terminal.note("nothing anywhere else: never send anything to it, and never use it again.");
  terminal.section("Pay for a call yourself, in another terminal");
  terminal.line("Set the gateway, a token of the tenant that is valid for 12 hours, the agent, the payer's");
  terminal.line("key, and the directory of the demo's files:");
  terminal.copied(`export GATEWAY=${tenant.url}
export TOKEN=${tenant.token}
export AGENT=${agents.notary}
export PAYER_KEY=${payer.key}
export FILES=${quoted(dir)}`);
  terminal.line("Ask what the call costs, pay for it with the official client, unmodified, and read the");
  terminal.line("result. This takes Node alone: npm installs the client into that directory, and it is");
  terminal.line("removed with the demo:");
  terminal.copied(payCommand.trimEnd());
  terminal.line("Ctrl-C here stops everything and removes all files.");
}
