// The payment gate of a priced agent, without a facilitator: what is asked, what is taken, what is refused, and
// that one authorization makes one call.

import { describe, expect, test } from "bun:test";
import { newPayer, type PaymentOptions, randomNonce, signPayment } from "../support/chain/payments.ts";
import { BASE } from "../support/network.ts";
import { until } from "../support/until.ts";
import {
  type Answer,
  contract,
  DETAIL,
  expectError,
  expectShape,
  is,
  type Json,
  LIST_ITEM,
  MCP,
  POLL_WITH_BODY,
  responseText,
  type Sending,
  type Tenant,
} from "./contract.ts";

const PAY_TO = "0x52908400098527886E0F7030069857D2E4169EE7";
const PRICING = { amount: "1000", asset: "USDC", network: "base", pay_to: PAY_TO };
const PRICE = 1000n;
const BODY = { json: { hello: "world" } };

const now = () => Math.floor(Date.now() / 1000);
const pay = (options: Partial<PaymentOptions> = {}, payer = newPayer()) =>
  signPayment(payer, { to: PAY_TO, value: PRICE, ...options });
const call = (tenant: Tenant, id: string, headers: Record<string, string>, sending: Sending = BODY) =>
  tenant.send("POST", `/v1/proxy/${id}`, { ...sending, headers: { ...sending.headers, ...headers } });
const total = async (tenant: Tenant) => (await tenant.send("GET", "/v1/invocations")).body.total;

/** A refused payment: a coarse Error, and nothing that invites another payment or repeats the header. */
function expectRefused(answer: Answer, header = ""): void {
  expectError(answer, 402);
  expect(answer.headers.get("payment-required")).toBeNull();
  expect(answer.text.length).toBeLessThan(120);
  if (header.length > 8) expect(answer.text).not.toContain(header.slice(0, 8));
}

const PAID = {
  payment_network: is.exactly("base"),
  payment_asset: is.exactly("USDC"),
  payment_amount: is.exactly("1000"),
  payment_payer: is.text,
  payment_nonce: is.text,
};

contract((at) => {
  const priced = (tenant: Tenant, fields: object = {}) =>
    tenant.agent({ upstream_url: at.upstream().url, pricing: PRICING, ...fields });

  describe("the challenge", () => {
    test("has the fields of both versions, and leaves no invocation", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await priced(tenant, { upstream_url: route.url });
      const answer = await call(tenant, id, {});
      expect(answer.status).toBe(402);
      expect(answer.headers.get("content-type")).toBe("application/json");
      const resource = `${at.gateway.url}/v1/proxy/${id}`;
      expectShape(answer.body, {
        x402Version: is.exactly(1),
        error: is.text,
        accepts: is.arrayOf(is.object),
      });
      expect(answer.body.accepts).toHaveLength(1);
      expectShape(answer.body.accepts[0], {
        scheme: is.exactly("exact"),
        network: is.exactly("base"),
        maxAmountRequired: is.exactly("1000"),
        resource: is.exactly(resource),
        description: is.text,
        mimeType: is.exactly("application/json"),
        payTo: is.exactly(PAY_TO),
        maxTimeoutSeconds: is.exactly(60),
        asset: is.exactly(BASE.token.address),
        extra: is.exactly({ name: "USD Coin", version: "2" }),
      });
      const header = answer.headers.get("payment-required") ?? "";
      expect(JSON.parse(Buffer.from(header, "base64").toString())).toMatchObject({
        x402Version: 2,
        resource: { url: resource },
        accepts: [
          {
            scheme: "exact",
            network: "eip155:8453",
            amount: "1000",
            asset: BASE.token.address,
            payTo: PAY_TO,
            maxTimeoutSeconds: 60,
            extra: { name: "USD Coin", version: "2" },
          },
        ],
      });
      expect(await total(tenant)).toBe(0);
      expect(route.seen).toEqual([]);
    });

    test("spells a payee with a wrong checksum so that clients take it", async () => {
      const tenant = at.tenant();
      const pay_to = `0x${"aB".repeat(20)}`;
      const { id } = await priced(tenant, { pricing: { ...PRICING, pay_to } });
      expect((await call(tenant, id, {})).body.accepts[0].payTo).toBe(pay_to.toLowerCase());
    });

    test("asks the price of the tool", async () => {
      const tenant = at.tenant();
      const route = at.upstream(({ body }) =>
        Response.json({ jsonrpc: "2.0", id: JSON.parse(new TextDecoder().decode(body)).id, result: {} }),
      );
      const tools = { dear: "2500", free: "0" };
      const { id } = await tenant.agent({
        ...MCP,
        upstream_url: route.url,
        pricing: { ...PRICING, tools },
      });
      const rpc = (name: string) => ({
        json: { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name, arguments: {} } },
      });
      const amount = async (name: string) => (await call(tenant, id, {}, rpc(name))).body.accepts[0].maxAmountRequired;
      expect(await Promise.all(["dear", "other"].map(amount))).toEqual(["2500", "1000"]);
      expect((await call(tenant, id, {}, rpc("free"))).status).toBe(202);
      expectRefused(await call(tenant, id, (await pay()).headers, rpc("dear")));
      expect((await call(tenant, id, (await pay({ value: 2500n })).headers, rpc("dear"))).status).toBe(202);
    });

    test("comes to a payment header of neither name", async () => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const answer = await call(tenant, id, { "X-PAYMENT-2": (await pay()).header });
      expect([answer.status, answer.body.accepts.length]).toEqual([402, 1]);
    });
  });

  describe("a payment that is good", () => {
    test("makes the call, and is shown with it", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await priced(tenant, { upstream_url: route.url });
      const payment = await pay();
      const accepted = await call(tenant, id, payment.headers);
      expect(accepted.status).toBe(202);
      expect(accepted.headers.get("x-payment-response")).toBeNull();
      const { invocation_id } = accepted.body;
      const view = await tenant.ended(id, invocation_id);
      expectShape(view, { ...POLL_WITH_BODY, ...PAID });
      expect(responseText(view)).toBe('{"hello":"world"}');
      expect(view.payment_payer).toBe(payment.authorization.from.toLowerCase());
      expect(view.payment_nonce).toBe(payment.authorization.nonce);
      const { req_body: _req, resp_body: _resp, ...detail } = await tenant.detail(invocation_id);
      expectShape(detail, { ...DETAIL, ...PAID });
      expectShape((await tenant.send("GET", "/v1/invocations")).body.data[0], { ...LIST_ITEM, ...PAID });
      const sent = route.seen[0]?.headers;
      expect([sent?.get("x-payment"), sent?.get("payment-signature")]).toEqual([null, null]);
    });

    test.each<[string, Partial<PaymentOptions>]>([
      ["v of 0 or 1", { form: "zero" }],
      ["valid from now on", { validAfter: now() }],
      ["valid from the beginning of time", { validAfter: 0 }],
      ["an end ten minutes later than asked", { validBefore: now() + 60 + 590 }],
      ["hex in upper case", { nonce: `0x${"AB".repeat(31)}${(now() % 100).toString().padStart(2, "0")}` }],
    ])("is taken with %s", async (_, options) => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      // The nonce of the last row is the same for both databases, and each has its own gateway.
      expect((await call(tenant, id, (await pay(options)).headers)).status).toBe(202);
    });

    test("is taken in version 2", async () => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const payment = await pay({ validAfter: 0 });
      const answer = await call(tenant, id, payment.version2Headers);
      expect(answer.status).toBe(202);
      // Whichever version carries it, it is the same payment.
      expect((await call(tenant, id, payment.headers)).body).toEqual(answer.body);
    });
  });

  describe("a payment that is not good", () => {
    const bad: [string, Partial<PaymentOptions>][] = [
      ["valid for longer than ten minutes more than asked", { validBefore: now() + 60 + 600 + 1800 }],
      ["valid for ever", { validBefore: 2n ** 256n - 1n }],
      ["one unit too little", { value: PRICE - 1n }],
      ["one unit too much", { value: PRICE + 1n }],
      ["nothing", { value: 0n }],
      ["another payee", { to: newPayer().address }],
      ["another signer", { from: newPayer().address }],
      ["another token's domain", { domain: { name: "USDC" } }],
      ["another chain", { domain: { chainId: 1 } }],
      ["another network", { network: "base-sepolia" }],
      ["another scheme", { scheme: "upto" }],
      ["the high-s form", { form: "high-s" }],
      ["a contract wallet's signature", { signature: `0x${"11".repeat(200)}` }],
      ["a time that is to come", { validAfter: now() + 3600 }],
      ["a time that is over", { validBefore: now() - 1 }],
      ["a time that is nearly over", { validBefore: now() + 3 }],
    ];
    test.each(bad)("is refused without a challenge, and leaves no invocation (%s)", async (_, options) => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const { headers, header, version2Headers, version2Header } = await pay(options);
      expectRefused(await call(tenant, id, headers), header);
      expectRefused(await call(tenant, id, version2Headers), version2Header);
      expect(await total(tenant)).toBe(0);
    });

    test("is refused the same way when it is malformed", async () => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const { header, payload } = await pay();
      const encode = (value: unknown) => Buffer.from(JSON.stringify(value)).toString("base64");
      const headers = [
        "x",
        "%%%%",
        "bnVsbA==",
        encode([]),
        encode({}),
        `${header}, ${header}`,
        encode({ ...payload, x402Version: 2 }),
        encode({ ...payload, payload: { ...payload.payload, signature: "0x" } }),
        encode({
          ...payload,
          payload: {
            ...payload.payload,
            authorization: { ...payload.payload.authorization, value: "1e3" },
          },
        }),
        Buffer.from("x".repeat(10_000)).toString("base64"),
      ];
      for (const value of headers) expectRefused(await call(tenant, id, { "X-PAYMENT": value }), value);
      expectRefused(await call(tenant, id, { "PAYMENT-SIGNATURE": header }), header);
      expect(await total(tenant)).toBe(0);
    });

    test("is an invalid request when there are two at once, for a free agent too", async () => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const { headers, version2Headers } = await pay();
      expectError(await call(tenant, id, { ...headers, ...version2Headers }), 400, "X-PAYMENT");
      await tenant.patch(id, { pricing: null });
      expectError(await call(tenant, id, { ...headers, ...version2Headers }), 400, "X-PAYMENT");
      expect((await call(tenant, id, { "X-PAYMENT": "rubbish" })).status).toBe(202);
    });

    test("is refused with the reason in the log, but not with what was signed", async () => {
      const tenant = at.tenant();
      const { id } = await priced(tenant);
      const requestId = `gate-${randomNonce().slice(2, 12)}`;
      const payment = await pay({ value: PRICE + 1n });
      await call(tenant, id, { ...payment.headers, "x-request-id": requestId });
      const line = () =>
        at.gateway
          .log()
          .split("\n")
          .find((text) => text.includes(requestId));
      await until(() => line() !== undefined);
      expect(line()).toContain('"payment_problem":"wrong_value"');
      expect(at.gateway.log()).not.toContain(payment.signature.slice(2));
      expect(at.gateway.log()).not.toContain(payment.header);
    });
  });

  describe("one authorization", () => {
    const used = async (tenant: Tenant, user = "alice") => {
      const route = at.upstream();
      const { id } = await priced(tenant, { upstream_url: route.url });
      const payer = newPayer();
      const payment = await pay({}, payer);
      const first = await call(tenant, id, payment.headers, { ...BODY, user });
      expect(first.status).toBe(202);
      return { id, payer, payment, route, invocation: first.body.invocation_id };
    };

    test("makes one call, however often it comes at once", async () => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await priced(tenant, { upstream_url: route.url });
      const { headers } = await pay();
      const answers = await Promise.all(Array.from({ length: 20 }, () => call(tenant, id, headers)));
      expect(answers.map(({ status }) => status)).toEqual(Array(20).fill(202));
      const ids = new Set(answers.map(({ body }) => body.invocation_id));
      expect(ids.size).toBe(1);
      await tenant.ended(id, [...ids][0] as string);
      expect(await total(tenant)).toBe(1);
      expect(route.seen).toHaveLength(1);
    });

    test("is the same one in another spelling", async () => {
      const tenant = at.tenant();
      const { id, payment, invocation } = await used(tenant);
      const { payload, signature } = payment;
      const { authorization } = payload.payload;
      const shouted = {
        ...payload,
        payload: {
          signature: `0x${signature.slice(2).toUpperCase()}`,
          authorization: {
            ...authorization,
            from: authorization.from.toLowerCase(),
            nonce: `0x${authorization.nonce.slice(2).toUpperCase()}`,
          },
        },
      };
      const header = Buffer.from(JSON.stringify(shouted)).toString("base64");
      const again = await call(tenant, id, { "X-PAYMENT": header });
      expect([again.status, again.body]).toEqual([202, { invocation_id: invocation }]);
    });

    test("answers for its call when agent and price have changed since", async () => {
      const tenant = at.tenant();
      const { id, payment, invocation } = await used(tenant);
      await tenant.patch(id, { pricing: { ...PRICING, amount: "7", pay_to: newPayer().address } });
      const again = await call(tenant, id, payment.headers);
      expect([again.status, again.body]).toEqual([202, { invocation_id: invocation }]);
    });

    test("answers for its call when the agent has become free since, and buys no other call", async () => {
      const tenant = at.tenant();
      const { id, payment, invocation } = await used(tenant);
      await tenant.patch(id, { pricing: null });
      const again = await call(tenant, id, payment.headers);
      expect([again.status, again.body]).toEqual([202, { invocation_id: invocation }]);
      const other = await call(tenant, id, payment.headers, { json: { hello: "you" } });
      expect([other.status, other.body.invocation_id === invocation]).toEqual([202, false]);
      expect((await call(tenant, id, { "X-PAYMENT": "garbage" })).status).toBe(202);
    });

    test.each<[string, (tenant: Tenant, one: Json) => Promise<Answer>]>([
      ["body", (tenant, { id, payment }) => call(tenant, id, payment.headers, { json: { hello: "you" } })],
      ["user", (tenant, { id, payment }) => call(tenant, id, payment.headers, { ...BODY, user: "bob" })],
      ["agent", async (tenant, { payment }) => call(tenant, (await priced(tenant)).id, payment.headers)],
      [
        "tenant",
        async (_, { payment }) => {
          const other = at.tenant();
          return call(other, (await priced(other)).id, payment.headers);
        },
      ],
      [
        "authorization with its nonce",
        async (tenant, { id, payer, payment }) => {
          const { nonce } = payment.authorization;
          return call(tenant, id, (await pay({ nonce, validBefore: now() + 300 }, payer)).headers);
        },
      ],
    ])("pays for no other %s", async (_, again) => {
      const tenant = at.tenant();
      const one = await used(tenant);
      expectRefused(await again(tenant, one));
      expect(await total(tenant)).toBe(1);
    });

    test("buys nothing under the nonce of another payer, which is another payment", async () => {
      const tenant = at.tenant();
      const { id, payment, invocation } = await used(tenant);
      const other = await pay({ nonce: payment.authorization.nonce });
      const answer = await call(tenant, id, other.headers);
      expect(answer.status).toBe(202);
      expect(answer.body.invocation_id).not.toBe(invocation);
    });
  });

  test("an idempotency key that stands for a paid call needs no payment again", async () => {
    const tenant = at.tenant();
    const { id } = await priced(tenant);
    const key = { "idempotency-key": "k" };
    const first = await call(tenant, id, { ...key, ...(await pay()).headers });
    expect(first.status).toBe(202);
    expect((await call(tenant, id, key)).body).toEqual(first.body);
    expect((await call(tenant, id, { ...key, ...(await pay()).headers })).body).toEqual(first.body);
    expectError(await call(tenant, id, key, { json: {} }), 409, "Idempotency-Key");
    expect(await total(tenant)).toBe(1);
  });

  test("a refused payment leaves its idempotency key free", async () => {
    const tenant = at.tenant();
    const { id } = await priced(tenant);
    const key = { "idempotency-key": "k" };
    expectRefused(await call(tenant, id, { ...key, ...(await pay({ value: 1n })).headers }));
    expect((await call(tenant, id, { ...key, ...(await pay()).headers })).status).toBe(202);
  });
});

contract(
  (at) => {
    test("challenges name the public URL", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ pricing: PRICING });
      const { body } = await call(tenant, id, {});
      expect(body.accepts[0].resource).toBe(`https://pay.example.com/gate/v1/proxy/${id}`);
    });
  },
  { TOLLGATE_PUBLIC_URL: "https://pay.example.com/gate/" },
);
