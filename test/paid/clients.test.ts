// The official clients, unmodified, each pay for a call through both services as they are deployed: two binaries with
// mutual TLS between them, a real chain and the real token. Each must also read what it is told of its payment.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { ExactEvmScheme } from "@x402/evm";
import { registerExactEvmScheme } from "@x402/evm/exact/client";
import { ExactEvmSchemeV1 } from "@x402/evm/exact/v1/client";
import {
  decodePaymentResponseHeader,
  wrapFetchWithPayment as wrapFetch2,
  x402Client,
  x402HTTPClient,
} from "@x402/fetch";
import axios from "axios";
import type { PrivateKeyAccount } from "viem/accounts";
import { decodeXPaymentResponse as decodeForAxios, withPaymentInterceptor } from "x402-axios";
import { decodeXPaymentResponse, wrapFetchWithPayment } from "x402-fetch";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { type Answer, type Json, openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";
import { type McpServer, startMcpServer } from "../support/mcp/mcp-servers.ts";

const PRICE = 10_000n;
const DEAR = 25_000n;
const FUNDS = 100_000n;
const HASH = /^0x[0-9a-f]{64}$/;
const BODY = JSON.stringify({ city: "Wien" });

let chain: TestChain;
let facilitator: Facilitator;
let gateway: Gateway;
let tenant: PayingTenant;
let upstream: Upstream;
const seen: Request[] = [];

beforeAll(async () => {
  chain = await startChain();
  upstream = startUpstream(async (request) => {
    seen.push(request);
    return Response.json({ asked: await request.json() });
  });
  [facilitator, gateway] = await Promise.all([startFacilitator(chain), startGateway()]);
  tenant = await openPayingTenant(gateway, facilitator);
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await facilitator?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await chain?.stop();
});

const pricing = (payTo: string, tools?: Record<string, string>) => ({
  amount: `${PRICE}`,
  asset: "USDC",
  network: "base",
  pay_to: payTo,
  ...(tools !== undefined && { tools }),
});

/** What a client library makes of one call: the last answer, and the payment response in its own words. */
interface Paid {
  readonly status: number;
  readonly body: Json;
  readonly told: { readonly success: boolean; readonly transaction: string; readonly payer?: string };
}

type Pay = (payer: PrivateKeyAccount, url: string, body: string) => Promise<Paid>;

const init = (body: string): RequestInit => ({
  method: "POST",
  // As a plain object, for some clients lose a Headers object on the paid retry.
  headers: { ...tenant.headers },
  body,
});

async function byFetch2(client: x402Client, url: string, body: string, send = fetch): Promise<Paid> {
  const response = await wrapFetch2(send, client)(url, init(body));
  const told = new x402HTTPClient(client).getPaymentSettleResponse((name) => response.headers.get(name));
  return { status: response.status, body: await response.json(), told };
}

/** As it looks to a client behind a proxy which drops the header of version 2. */
const withoutVersion2 = Object.assign(
  async (...args: Parameters<typeof fetch>) => {
    const response = await fetch(...args);
    const headers = new Headers(response.headers);
    headers.delete("payment-required");
    return new Response(response.body, { status: response.status, headers });
  },
  { preconnect: fetch.preconnect },
);

const CLIENTS: Readonly<Record<string, Pay>> = {
  "x402-fetch": async (payer, url, body) => {
    const response = await wrapFetchWithPayment(fetch, payer)(url, init(body));
    const told = decodeXPaymentResponse(response.headers.get("x-payment-response") ?? "");
    return { status: response.status, body: await response.json(), told };
  },
  "x402-axios": async (payer, url, body) => {
    const client = withPaymentInterceptor(axios.create(), payer);
    const response = await client.post(url, body, { headers: { ...tenant.headers } });
    const told = decodeForAxios(String(response.headers["x-payment-response"]));
    return { status: response.status, body: response.data, told };
  },
  "@x402/fetch with all that it registers": (signer, url, body) =>
    byFetch2(registerExactEvmScheme(new x402Client(), { signer }), url, body),
  "@x402/fetch on the version 1 body": (signer, url, body) =>
    byFetch2(new x402Client().registerV1("base", new ExactEvmSchemeV1(signer)), url, body, withoutVersion2),
  "@x402/fetch without version 1": (signer, url, body) =>
    byFetch2(new x402Client().register("eip155:8453", new ExactEvmScheme(signer)), url, body),
};

/** The one transfer that a client's call must have made, and the call's end. */
async function expectPaid(agent: string, paid: Paid, payer: PrivateKeyAccount, to: string, price: bigint) {
  const { status, body, told } = paid;
  expect(status).toBe(202);
  expect(told).toMatchObject({ success: true, transaction: expect.stringMatching(HASH) });
  expect(told.payer?.toLowerCase()).toBe(payer.address.toLowerCase());
  const transfers = await chain.transfers({ from: payer.address });
  expect(transfers).toEqual([
    expect.objectContaining({ to: to.toLowerCase(), value: price, transaction_hash: told.transaction }),
  ]);
  expect(await chain.usdcOf(payer.address)).toBe(FUNDS - price);
  const view = await tenant.poll(agent, body.invocation_id);
  expect(view).toMatchObject({
    status: "succeeded",
    payment_amount: `${price}`,
    payment_payer: payer.address.toLowerCase(),
    payment_nonce: transfers[0]?.nonce,
    settlement: {
      status: "settled",
      tx_hash: told.transaction,
      settled_amount: `${price}`,
      operator_amount: `${price}`,
      attempts: 1,
    },
  });
  return view;
}

describe("a priced http agent", () => {
  for (const [name, pay] of Object.entries(CLIENTS)) {
    test(`is paid by ${name}`, async () => {
      const [payer, payee] = [newPayer(), newPayer().address];
      await chain.fundUsdc(payer.address, FUNDS);
      const agent = await tenant.agent({ upstream_url: upstream.url, pricing: pricing(payee) });
      const before = seen.length;
      const paid = await pay(payer, tenant.callUrl(agent), BODY);
      const view = await expectPaid(agent, paid, payer, payee, PRICE);
      expect(Buffer.from(view.response_body_b64, "base64").toString()).toBe(`{"asked":${BODY}}`);
      expect(seen.length - before).toBe(1);
      const [request] = seen.slice(before);
      expect(request?.headers.has("x-payment") || request?.headers.has("payment-signature")).toBe(false);
    });
  }
});

describe("a priced mcp agent is paid", () => {
  let mcp: McpServer;
  beforeAll(async () => {
    mcp = await startMcpServer("everything");
  });
  afterAll(() => mcp?.stop());

  const rpc = (name: string, args: object) =>
    JSON.stringify({ jsonrpc: "2.0", id: 1, method: "tools/call", params: { name, arguments: args } });

  test.each([
    ["by x402-fetch", CLIENTS["x402-fetch"]],
    ["by @x402/fetch without version 1", CLIENTS["@x402/fetch without version 1"]],
  ] as const)("the price of the tool %s", async (_name, pay) => {
    const payee = newPayer().address;
    const agent = await tenant.agent({
      protocol: "mcp",
      mcp_transport: "streamable_http",
      upstream_url: mcp.url,
      pricing: pricing(payee, { echo: `${DEAR}` }),
    });
    for (const [tool, args, price] of [
      ["echo", { message: "dear" }, DEAR],
      ["get-sum", { a: 2, b: 3 }, PRICE],
    ] as const) {
      const payer = newPayer();
      await chain.fundUsdc(payer.address, FUNDS);
      const paid = await pay?.(payer, tenant.callUrl(agent), rpc(tool, args));
      if (paid === undefined) throw new Error("no such client");
      const view = await expectPaid(agent, paid, payer, payee, price);
      expect(view.mcp_tool).toBe(tool);
      const answer = JSON.parse(Buffer.from(view.response_body_b64, "base64").toString());
      expect(answer.result.content[0].text).toContain(tool === "echo" ? "dear" : "5");
    }
  });
});

test("the payment response is the one of the payment's version", async () => {
  const payee = newPayer().address;
  const agent = await tenant.agent({ upstream_url: upstream.url, pricing: pricing(payee) });
  const answers: Answer[] = [];
  for (const version of [1, 2] as const) {
    const payer = newPayer();
    await chain.fundUsdc(payer.address, FUNDS);
    const payment = await signPayment(payer, {
      to: payee,
      value: PRICE,
      requirements: { resource: tenant.callUrl(agent), maxTimeoutSeconds: 60 },
    });
    const headers = version === 1 ? payment.headers : payment.version2Headers;
    answers.push(await tenant.send("POST", `/v1/proxy/${agent}`, { version }, headers));
  }
  const [first, second] = answers;
  expect(answers.map(({ status }) => status)).toEqual([202, 202]);
  expect(first?.headers.has("payment-response")).toBe(false);
  expect(second?.headers.has("x-payment-response")).toBe(false);
  const [told] = answers.map(({ headers }) => headers.get("x-payment-response") ?? "");
  expect(decodeXPaymentResponse(told ?? "").network).toBe("base");
  expect(decodePaymentResponseHeader(second?.headers.get("payment-response") ?? "").network).toBe("eip155:8453");
});
