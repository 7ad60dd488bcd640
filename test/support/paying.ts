// A tenant whose calls are paid: a gateway with a settlement configuration that leads to a facilitator, priced agents,
// and what a caller of them does.
import { startChain } from "./chain.ts";
import { type Client, startFacilitator } from "./facilitator.ts";
import { type Gateway, startGateway } from "./gateway.ts";
import { newPayer, type PaymentOptions, type SignedPayment, signPayment } from "./payments.ts";
import { startRpcRelay } from "./rpc-relay.ts";
import { startUpstream } from "./upstream.ts";

// biome-ignore lint/suspicious/noExplicitAny: tests look into bodies of many shapes.
export type Json = any;

export interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  /** The parsed body; undefined when it is empty. */
  readonly body: Json;
}

export interface PayingTenant {
  readonly name: string;
  /** Of the caller, in the form that every client takes. */
  readonly headers: Readonly<Record<string, string>>;
  send(
    method: string,
    path: string,
    json?: unknown,
    headers?: Readonly<Record<string, string>>,
  ): Promise<Answer>;
  /** Creates an agent and gives its ID. */
  agent(fields: object): Promise<string>;
  /** The URL of its calls. */
  callUrl(agentId: string): string;
  /** The poll view, held for `seconds` or until the call has ended. */
  poll(agentId: string, invocationId: string, seconds?: number): Promise<Json>;
}

let serial = 0;

/** A tenant of its own, whose payments this client of this facilitator collects. */
export async function openPayingTenant(
  gateway: Gateway,
  facilitator: { readonly url: string; readonly client: Client },
): Promise<PayingTenant> {
  const name = `tenant-${++serial}`;
  const token = await gateway.token({ tenant: name, user: "alice" });
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };

  async function send(
    method: string,
    path: string,
    json?: unknown,
    more: Readonly<Record<string, string>> = {},
  ): Promise<Answer> {
    const response = await fetch(`${gateway.url}${path}`, {
      method,
      headers: { ...headers, ...more },
      ...(json !== undefined && { body: JSON.stringify(json) }),
    });
    const text = await response.text();
    const body = text === "" ? undefined : JSON.parse(text);
    return { status: response.status, headers: response.headers, text, body };
  }
  const need = async (status: number, sent: Promise<Answer>): Promise<Json> => {
    const answer = await sent;
    if (answer.status !== status) throw new Error(`${answer.status} instead of ${status}: ${answer.text}`);
    return answer.body;
  };

  const credential = {
    name: "facilitator",
    auth_type: "none",
    source: "managed",
    plaintext: facilitator.client.bundle,
  };
  const { id: facilitator_credential_ref } = await need(201, send("POST", "/v1/credentials", credential));
  const config = { facilitator_url: facilitator.url, facilitator_credential_ref };
  await need(200, send("PATCH", "/v1/settlement/config", config));
  return {
    name,
    headers,
    send,
    callUrl: (id) => `${gateway.url}/v1/proxy/${id}`,
    async agent(fields) {
      const { id } = await need(201, send("POST", "/v1/agents", { name: `agent ${++serial}`, ...fields }));
      return id;
    },
    poll: (id, invocation, seconds = 25) =>
      need(
        200,
        send("GET", `/v1/proxy/${id}/invocations/${invocation}`, undefined, { prefer: `wait=${seconds}` }),
      ),
  };
}

/** Of one call, in smallest units. */
const PRICE = 10_000n;
const UNTIL_MS_MAX = 25_000;

export interface PaidCall {
  readonly payment: SignedPayment;
  /** Sends the same payment with the same body, again and again. */
  send(): Promise<Answer>;
  /** The calls of the upstream for this payment. */
  arrivals(): number;
  view(invocationId: string): Promise<Json>;
  /** The poll view as soon as it fits. */
  until(invocationId: string, fits: (view: Json) => boolean): Promise<Json>;
}

export type Wings = Awaited<ReturnType<typeof startWings>>;

/** Both wings with a real chain, a relay before its node, and an upstream that answers what `answer` says. */
export async function startWings({
  gatewayEnv = {},
  facilitatorEnv = {},
  blockTimeSeconds,
}: {
  gatewayEnv?: Readonly<Record<string, string>>;
  facilitatorEnv?: Readonly<Record<string, string>>;
  blockTimeSeconds?: number;
} = {}) {
  const chain = await startChain(blockTimeSeconds === undefined ? {} : { blockTimeSeconds });
  const relay = await startRpcRelay(chain.url);
  const bodies: string[] = [];
  const upstream = startUpstream(async (request) => {
    bodies.push(await request.text());
    return state.answer();
  });
  const state = { answer: async (): Promise<Response> => Response.json({ done: true }) };
  const [facilitator, gateway] = await Promise.all([
    startFacilitator(chain, { rpcUrls: [relay.url], env: facilitatorEnv }),
    startGateway({ env: gatewayEnv }),
  ]);
  const tenant = await openPayingTenant(gateway, facilitator);
  const payTo = newPayer().address;
  const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payTo };
  const agent = await tenant.agent({ upstream_url: upstream.url, pricing });

  return {
    chain,
    relay,
    facilitator,
    gateway,
    tenant,
    /** How the upstream answers from now on; to be changed by tests. */
    state,
    /** A paid call with a body of its own, by a payer with money. Nothing is sent yet. */
    async paidCall(options: Partial<PaymentOptions> = {}): Promise<PaidCall> {
      const payer = newPayer();
      await chain.fundUsdc(payer.address, 10n * PRICE);
      const payment = await signPayment(payer, { to: payTo, value: PRICE, ...options });
      const body = { call: ++serial };
      const view = (id: string) => tenant.poll(agent, id, 0);
      return {
        payment,
        send: () => tenant.send("POST", `/v1/proxy/${agent}`, body, payment.headers),
        arrivals: () => bodies.filter((text) => text === JSON.stringify(body)).length,
        view,
        async until(id, fits) {
          const end = performance.now() + UNTIL_MS_MAX;
          for (;;) {
            const seen = await view(id);
            if (fits(seen)) return seen;
            if (performance.now() > end) throw new Error(`still ${JSON.stringify(seen)}`);
            await Bun.sleep(50);
          }
        },
      };
    },
    async stop() {
      await gateway[Symbol.asyncDispose]();
      await facilitator[Symbol.asyncDispose]();
      await upstream.stop();
      await relay.stop();
      await chain.stop();
    },
  };
}
