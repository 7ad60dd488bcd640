// Paid calls through both services as they are deployed, with something between all of the parts that a test can hold,
// break and count: a relay before the node, a relay before the facilitator, and an upstream which notes of each
// request whether the money had moved by then.
import { expect } from "bun:test";
import type { Hex } from "viem";
import { startChain, type TestChain } from "../chain/chain.ts";
import { type Facilitator, startFacilitator } from "../chain/facilitator.ts";
import { type Answer, type Json, openPayingTenant, type PayingTenant } from "../chain/paying.ts";
import { newPayer, type PaymentOptions, type SignedPayment, signPayment } from "../chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../chain/rpc-relay.ts";
import { type Database, type Gateway, startGateway } from "../gateway/gateway.ts";
import type { Environment } from "../gateway/process.ts";
import { type Relay, startRelay } from "../http/relay.ts";
import { startUpstream, type Upstream } from "../http/upstream.ts";

export const PRICE = 10_000n;
/** For a call to end after everything is well again: a pause of the background attempts is in it, of a minute at most. */
const ENDED_MS_MAX = 120_000;
const HASH = /^0x[0-9a-f]{64}$/;

/** The next call of the method from now on hangs, for ever. Resolves when it has come. */
export function holding(relay: RpcRelay, method: string): Promise<void> {
  relay.on(method, { kind: "hang" }, 1);
  return relay.called(method, relay.count(method) + 1);
}

/** Resolves when the node has answered the next call of the method from now on. */
export function passage(relay: RpcRelay, method: string): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  const rewrite = (result: unknown) => {
    resolve();
    return result;
  };
  relay.on(method, { kind: "rewrite", rewrite }, 1);
  return promise;
}

export interface Visit {
  readonly invocation: string;
  /** Transfers of this call's authorization on chain when the request came. */
  readonly paid: number;
}

/** An upstream that is told in each body which authorization pays for the call. */
export interface PaidUpstream extends Upstream {
  of(nonce: Hex): readonly Visit[];
  /** Requests so far. */
  count(): number;
  /** Resolves when a request for this authorization has come. */
  visited(nonce: Hex): Promise<void>;
  /** Requests for this authorization are not answered any more. */
  hold(nonce: Hex): void;
  /** Requests for this authorization are answered with an error. */
  fail(nonce: Hex): void;
}

export function startPaidUpstream(chain: TestChain): PaidUpstream {
  const visits = new Map<Hex, Visit[]>();
  const arrivals = new Map<Hex, PromiseWithResolvers<void>>();
  const held = new Set<Hex>();
  const failing = new Set<Hex>();
  let count = 0;
  const arrival = (nonce: Hex) => {
    const known = arrivals.get(nonce) ?? Promise.withResolvers<void>();
    arrivals.set(nonce, known);
    return known;
  };
  const upstream = startUpstream(async (request) => {
    const { nonce } = (await request.json()) as { nonce: Hex };
    const invocation = request.headers.get("x-service-invocation-id") ?? "";
    count++;
    const { length: paid } = await chain.transfers({ nonce });
    visits.set(nonce, [...(visits.get(nonce) ?? []), { invocation, paid }]);
    arrival(nonce).resolve();
    if (held.has(nonce)) await new Promise(() => {});
    if (failing.has(nonce)) return new Response("no", { status: 503 });
    return Response.json({ nonce });
  });
  return {
    ...upstream,
    of: (nonce) => visits.get(nonce) ?? [],
    count: () => count,
    visited: (nonce) => arrival(nonce).promise,
    hold: (nonce) => void held.add(nonce),
    fail: (nonce) => void failing.add(nonce),
  };
}

/** One call with its payment, which can be made again and again. */
export interface PaidCall {
  readonly payment: SignedPayment;
  readonly nonce: Hex;
  send(): Promise<Answer>;
  /** The poll view as it is. */
  look(invocation: string): Promise<Json>;
  /** The poll view of the call that has ended. */
  ended(invocation: string): Promise<Json>;
}

export interface PaidAgent {
  readonly tenant: PayingTenant;
  readonly id: string;
  /** The way to the facilitator. */
  readonly door: Relay;
  /** A call by a payer of its own, who has the money. */
  call(options?: Partial<PaymentOptions>): Promise<PaidCall>;
}

export interface Parts {
  readonly chain: TestChain;
  readonly gateway: Gateway;
  readonly facilitator: Pick<Facilitator, "url" | "client">;
  readonly upstream: Upstream;
}

/** A tenant of its own with one priced agent, and a relay of its own before the facilitator. */
export async function openPaidAgent({ chain, gateway, facilitator, upstream }: Parts): Promise<PaidAgent> {
  const door = startRelay(Number(new URL(facilitator.url).port));
  const url = `https://127.0.0.1:${door.port}`;
  const tenant = await openPayingTenant(gateway, { url, client: facilitator.client });
  const payee = newPayer().address;
  const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payee };
  const id = await tenant.agent({ upstream_url: upstream.url, pricing });
  return {
    tenant,
    id,
    door,
    async call(options = {}) {
      const payer = newPayer();
      await chain.fundUsdc(payer.address, 10n * PRICE);
      const payment = await signPayment(payer, { to: payee, value: PRICE, ...options });
      const { nonce } = payment.authorization;
      const ended = async (invocation: string): Promise<Json> => {
        const deadline = performance.now() + ENDED_MS_MAX;
        for (;;) {
          const view = await tenant.poll(id, invocation, 5);
          if (view.status === "succeeded" || view.status === "failed") return view;
          if (performance.now() > deadline) throw new Error(`still open: ${JSON.stringify(view)}`);
        }
      };
      return {
        payment,
        nonce,
        send: () => tenant.send("POST", `/v1/proxy/${id}`, { nonce }, payment.headers),
        look: (invocation) => tenant.poll(id, invocation, 0),
        ended,
      };
    },
  };
}

interface WingsOptions {
  readonly database?: Database | undefined;
  readonly gatewayEnv?: Environment;
  readonly facilitatorEnv?: Environment;
  readonly signers?: number;
}

export type Services = Awaited<ReturnType<typeof startServices>>;

/** Both services on a chain of their own, so that holding one part holds up no other test. */
export async function startServices({
  database,
  gatewayEnv = {},
  facilitatorEnv = {},
  signers = 1,
}: WingsOptions = {}) {
  await using stack = new AsyncDisposableStack();
  const chain = await startChain();
  stack.defer(() => chain.stop());
  const relay = await startRpcRelay(chain.url);
  stack.defer(() => relay.stop());
  const upstream = startPaidUpstream(chain);
  stack.defer(() => upstream.stop());
  const gateway = stack.use(await startGateway({ ...(database && { database }), env: gatewayEnv }));
  const facilitator = stack.use(await startFacilitator(chain, { rpcUrls: [relay.url], signers, env: facilitatorEnv }));
  const parts = stack.move();
  const open = async () => {
    const agent = await openPaidAgent({ chain, gateway, facilitator, upstream });
    parts.defer(() => agent.door.stop());
    return agent;
  };
  return {
    chain,
    relay,
    upstream,
    gateway,
    facilitator,
    open,
    [Symbol.asyncDispose]: () => parts.disposeAsync(),
  };
}

/** The caller was told that the call is accepted, and nothing of a settlement. */
export function expectPending(answer: Answer): string {
  expect([answer.status, answer.headers.get("x-payment-response")]).toEqual([202, null]);
  return answer.body.invocation_id;
}

/** Paid once, served once and after the payment, told right, and the same to whoever presents it again. */
export async function expectServed(
  { chain, upstream }: { readonly chain: TestChain; readonly upstream: PaidUpstream },
  call: PaidCall,
  invocation: string,
): Promise<Json> {
  const view = await call.ended(invocation);
  const { authorization } = call.payment;
  const transfers = await chain.transfers({ from: authorization.from });
  expect(transfers).toEqual([
    expect.objectContaining({
      nonce: call.nonce,
      to: authorization.to.toLowerCase(),
      value: PRICE,
    }),
  ]);
  const [transfer] = transfers;
  expect(view).toMatchObject({
    status: "succeeded",
    error_class: null,
    payment_nonce: call.nonce,
    settlement: { status: "settled", tx_hash: transfer?.transaction_hash, settled_amount: `${PRICE}` },
  });
  expect(upstream.of(call.nonce)).toEqual([{ invocation, paid: 1 }]);
  const again = await call.send();
  expect([again.status, again.body.invocation_id]).toEqual([202, invocation]);
  expect(transactionTold(again)).toBe(transfer?.transaction_hash ?? "none");
  expect(upstream.of(call.nonce)).toHaveLength(1);
  return view;
}

/** The transaction that an answer names. */
export function transactionTold(answer: Answer): string {
  const told = answer.headers.get("x-payment-response") ?? "";
  const { transaction } = JSON.parse(Buffer.from(told, "base64").toString()) as { transaction: string };
  expect(transaction).toMatch(HASH);
  return transaction;
}

/** Each kept total of the history is what counting the rows gives, and what it ought to be. */
export async function expectTotals({ tenant }: PaidAgent, expected: Readonly<Record<string, number>>): Promise<void> {
  const totalOf = async (query: string): Promise<number> =>
    (await tenant.send("GET", `/v1/invocations?limit=1${query}`)).body.total;
  const filters = [
    ...["pending", "running", "succeeded", "failed"].map((status) => `&status=${status}`),
    ...["pending", "settled", "settlement_failed", "settled_upstream_failed"].map((status) => `&settlement=${status}`),
  ];
  for (const filter of ["", ...filters]) {
    // With a second filter the rows are counted.
    const [kept, counted] = [await totalOf(filter), await totalOf(`${filter}&since=2020-01-01T00:00:00Z`)];
    expect([filter, kept]).toEqual([filter, counted]);
    const wanted = expected[filter.slice(1)];
    if (wanted !== undefined) expect([filter, kept]).toEqual([filter, wanted]);
  }
}
