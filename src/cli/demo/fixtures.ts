// The fixtures of the demo's gateway, created through its API like a tenant does: two agents with prices, and the
// facilitator that collects the payments.
import type { Hex } from "viem";
import { ASSET, NETWORK } from "../../x402/kind.ts";
import { ask, type HttpAnswer, type HttpRequest, textAt } from "./http.ts";
import { DemoProblem } from "./problem.ts";

/** In smallest units, of which a USDC has a million. */
export const NOTARY_PRICE = 10_000n;
export const FACTORIZE_PRICE = 25_000n;

/** A tenant's access to the gateway. */
export interface DemoTenant {
  readonly url: string;
  readonly token: string;
}

/** A request to a path of the gateway, with the tenant's token. */
export interface TenantRequest extends Omit<HttpRequest, "url"> {
  readonly path: string;
}

export function call(
  { url, token }: DemoTenant,
  { path, ...asked }: TenantRequest,
  signal: AbortSignal,
): Promise<HttpAnswer> {
  const headers = { authorization: `Bearer ${token}`, ...asked.headers };
  return ask({ ...asked, url: `${url}${path}`, headers }, signal);
}

/** The agents' IDs, or the URLs of their upstreams. */
export type Agents = Readonly<Record<"notary" | "calculator", string>>;

/** @returns the agents' IDs */
export async function registerAgents(
  tenant: DemoTenant,
  upstreams: Agents,
  payTo: Hex,
  signal: AbortSignal,
): Promise<Agents> {
  const priced = { asset: ASSET, network: NETWORK, pay_to: payTo };
  const notary = await create(
    tenant,
    "/v1/agents",
    {
      name: "notary",
      description: "Answers with the SHA-256 of what it is sent.",
      upstream_url: upstreams.notary,
      pricing: { amount: `${NOTARY_PRICE}`, ...priced },
    },
    signal,
  );
  const calculator = await create(
    tenant,
    "/v1/agents",
    {
      name: "calculator",
      description: "Adds for nothing, and factorizes for a price.",
      protocol: "mcp",
      mcp_transport: "streamable_http",
      upstream_url: upstreams.calculator,
      pricing: { amount: "0", ...priced, tools: { factorize: `${FACTORIZE_PRICE}` } },
    },
    signal,
  );
  return { notary, calculator };
}

/** From then on payments are collected before the call is made. */
export async function configureSettlement(
  tenant: DemoTenant,
  facilitatorUrl: string,
  bundle: string,
  signal: AbortSignal,
): Promise<void> {
  const credential = { name: "facilitator", auth_type: "none", source: "managed", plaintext: bundle };
  const id = await create(tenant, "/v1/credentials", credential, signal);
  const body = { facilitator_url: facilitatorUrl, facilitator_credential_ref: id };
  const answer = await call(tenant, { method: "PATCH", path: "/v1/settlement/config", body }, signal);
  requireGood("PATCH /v1/settlement/config", answer);
}

async function create(tenant: DemoTenant, path: string, body: object, signal: AbortSignal): Promise<string> {
  const answer = await call(tenant, { method: "POST", path, body }, signal);
  requireGood(`POST ${path}`, answer);
  return textAt(answer.body, "id");
}

/** @throws DemoProblem */
export function requireGood(what: string, { status, body }: HttpAnswer): void {
  if (status < 300) return;
  throw new DemoProblem(`${what} was answered ${status} ${JSON.stringify(body) ?? ""}`);
}
