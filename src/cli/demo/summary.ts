// The summary at the end of the demo: where everything listens, the token and the key that work there, and commands to
// copy, with which readers pay for a call themselves.
import type { RunningFacilitator } from "../../facilitator/start.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import { quoted } from "../program.ts";
import { type DemoChain, usdc } from "./chain.ts";
import { FACTORIZE_PRICE, NOTARY_PRICE } from "./fixtures.ts";
import payCommand from "./pay.sh" with { type: "text" };
import type { Scenario } from "./scenario.ts";
import type { ListLine, Terminal } from "./terminal.ts";

export interface Collection {
  readonly chain: DemoChain;
  readonly facilitator: Pick<RunningFacilitator, "url" | "openUrl">;
}

/**
 * @param collection null without anvil
 * @param dir the directory of all files of the demo
 */
export async function showSummary(scenario: Scenario, collection: Collection | null, dir: string): Promise<void> {
  const { terminal, tenant, agents, payer } = scenario;
  terminal.section("All of it stays up until you press Ctrl-C");
  const entries: ListLine[] = [
    ["gateway", tenant.url],
    ["Swagger UI", `${tenant.url}/swagger  (Authorize takes the token below)`],
    ["http agent", `${agents.notary}  notary, ${usdc(NOTARY_PRICE)} USDC a call`],
    ["mcp agent", `${agents.calculator}  calculator, ${usdc(FACTORIZE_PRICE)} USDC for factorize`],
  ];
  if (collection !== null) {
    const { chain, facilitator } = collection;
    entries.push(
      ["facilitator", `${facilitator.url}  mutual TLS: /settle, /supported, /healthz`],
      ["", `${facilitator.openUrl.padEnd(facilitator.url.length)}  open: /supported, /healthz`],
      ["chain RPC", `${chain.url}  chain ID ${CHAIN_ID}`],
      ["payer", `${payer.address}  with ${usdc(await chain.usdcOf(payer.address))} USDC`],
    );
  }
  entries.push(["files", `${dir}  (goes with the demo)`]);
  terminal.entries(entries);
  terminal.line();
  terminal.note("PAYER_KEY below is a throw-away key, made for this run and for this machine. It is worth");
  terminal.note("nothing anywhere else: never send anything to it, and never use it again.");
  showCommands(terminal, scenario, dir);
}

function showCommands(terminal: Terminal, { tenant, agents, payer }: Scenario, dir: string): void {
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
