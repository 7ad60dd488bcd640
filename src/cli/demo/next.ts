// What the demo leaves the reader with: where everything listens, the token and the key that work there, and the
// commands by which they pay for a call by themselves, to be copied as they stand.
import type { RunningFacilitator } from "../../facilitator/start.ts";
import { CHAIN_ID } from "../../x402/kind.ts";
import { type DemoChain, usdc } from "./chain.ts";
import { FACTORIZE_PRICE, NOTARY_PRICE } from "./market.ts";
import payCommand from "./pay.sh" with { type: "text" };
import type { Stage } from "./play.ts";
import type { ListLine, Screen } from "./screen.ts";

export interface Collection {
  readonly chain: DemoChain;
  readonly facilitator: Pick<RunningFacilitator, "url" | "openUrl">;
}

/**
 * @param collection null without anvil
 * @param dir of everything that the demo has written
 */
export async function showWhatIsThere(
  stage: Stage,
  collection: Collection | null,
  dir: string,
): Promise<void> {
  const { screen, tenant, agents, payer } = stage;
  screen.section("All of it stays up until you press Ctrl-C");
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
  screen.entries(entries);
  screen.line();
  screen.note("PAYER_KEY below is a throw-away key, made for this run and for this machine. It is worth");
  screen.note("nothing anywhere else: never send anything to it, and never use it again.");
  showCommands(screen, stage);
}

function showCommands(screen: Screen, { tenant, agents, payer }: Stage): void {
  screen.section("Pay for a call yourself, in another terminal");
  screen.line("These are the gateway, a token of the tenant for 12 hours, the agent, and the payer's key:");
  screen.line();
  screen.verbatim(`export GATEWAY=${tenant.url}`);
  screen.verbatim(`export TOKEN=${tenant.token}`);
  screen.verbatim(`export AGENT=${agents.notary}`);
  screen.verbatim(`export PAYER_KEY=${payer.key}`);
  screen.line();
  screen.line("See what it costs:");
  screen.line();
  screen.verbatim(CHALLENGE_COMMAND);
  screen.line();
  screen.line("Pay it with the official client, unmodified. It is installed in a clone of this project;");
  screen.line("anywhere else first: npm install x402-fetch@1 viem@2");
  screen.line();
  screen.verbatim(payCommand.trimEnd());
  screen.line();
  screen.line("Ctrl-C here stops everything, and removes it.");
}

const CHALLENGE_COMMAND = `curl -si "$GATEWAY/v1/proxy/$AGENT" -H "Authorization: Bearer $TOKEN" -d hello`;
