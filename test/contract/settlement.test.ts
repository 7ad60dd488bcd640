// Settlement of payments before the upstream is called, against a stand-in that answers as any facilitator might:
// what collected, declined and unknown come to, for the caller, the record and the upstream.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  collected,
  type FacilitatorStandIn,
  notCollected,
  randomHash,
  startFacilitatorStandIn,
} from "../support/chain/facilitator-stand-in.ts";
import { ALICE, TEST_CA } from "../support/http/certificates.ts";
import { until } from "../support/until.ts";
import { contract, expectError, expectShape, is, type Tenant } from "./contract.ts";
import { eventually, PAY_TO, PRICING, pay, settleBy, settlementTold, writeCaFile } from "./priced.ts";

const SECRET = "facilitator-secret-0001";

const caFile = writeCaFile();

const send = (tenant: Tenant, id: string, headers: Record<string, string>, json: unknown = { n: 1 }) =>
  tenant.send("POST", `/v1/proxy/${id}`, { json, headers });
const count = async (tenant: Tenant, status: string) =>
  (await tenant.send("GET", `/v1/invocations?settlement=${status}`)).body.total;

const HASH = /^0x[0-9a-f]{64}$/;

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    let other: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
      other = startFacilitatorStandIn({ mutual: true });
    });
    afterAll(async () => {
      await facilitator?.stop();
      await other?.stop();
    });

    /** A tenant with a facilitator and a priced agent. */
    const open = async (credential: object = { plaintext: SECRET }, url = facilitator.url) => {
      const tenant = at.tenant();
      const facilitator_credential_ref = await settleBy(tenant, url, credential);
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
      return { tenant, id, route, facilitator_credential_ref };
    };
    const only = async (tenant: Tenant) => (await tenant.send("GET", "/v1/invocations")).body.data[0];

    describe("a payment that is collected", () => {
      test("is told with the 202, recorded with the call, and only then is the upstream called", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce, from } = payment.authorization;
        const hash = randomHash();
        let calledBefore = -1;
        facilitator.answer(nonce, (call) => {
          calledBefore = route.seen.length;
          return collected(call, { transaction: hash });
        });
        const answer = await send(tenant, id, payment.headers);
        expect(answer.status).toBe(202);
        expect(settlementTold(answer)).toEqual({
          success: true,
          transaction: hash,
          network: "base",
          payer: from.toLowerCase(),
        });
        const view = await tenant.ended(id, answer.body.invocation_id);
        expect(view).toMatchObject({ status: "succeeded", payment_amount: "1000" });
        expectShape(view.settlement, {
          status: is.exactly("settled"),
          tx_hash: is.exactly(hash),
          settled_amount: is.exactly("1000"),
          operator_amount: is.exactly("1000"),
          attempts: is.exactly(1),
          settled_at: is.dateTime,
        });
        expect((await tenant.detail(answer.body.invocation_id)).settlement).toEqual(view.settlement);
        expect([calledBefore, route.seen.length]).toEqual([0, 1]);
        expect(await count(tenant, "settled")).toBe(1);
        expect(await count(tenant, "pending")).toBe(0);
      });

      test("was asked for in version 1, with the payment as it came and the challenge as it went out", async () => {
        const { tenant, id } = await open();
        const payment = await pay({ form: "zero" });
        const { nonce, from, to, ...numbers } = payment.authorization;
        const plain = await pay();
        expect((await send(tenant, id, payment.headers)).status).toBe(202);
        const { accepts } = (await send(tenant, id, {})).body;
        const [request] = facilitator.of(nonce);
        expect(request?.path).toBe("/settle");
        expect(request?.headers.get("content-type")).toBe("application/json");
        expect(request?.headers.get("authorization")).toBe(`Bearer ${SECRET}`);
        expect(request?.body.paymentPayload.payload.signature).toMatch(/^0x[0-9a-f]{128}1[bc]$/);
        expect(request?.body).toEqual({
          x402Version: 1,
          paymentPayload: {
            x402Version: 1,
            scheme: "exact",
            network: "base",
            payload: {
              signature: expect.any(String),
              authorization: { ...numbers, from: from.toLowerCase(), to: to.toLowerCase(), nonce },
            },
          },
          paymentRequirements: accepts[0],
        });
        const second = await send(tenant, id, plain.version2Headers);
        expect(second.headers.get("x-payment-response")).toBeNull();
        expect(settlementTold(second, "payment-response")).toMatchObject({
          success: true,
          network: "eip155:8453",
        });
        expect(facilitator.of(plain.authorization.nonce)[0]?.body.x402Version).toBe(1);
      });

      test("comes less the facilitator's fee, when it names one that can be", async () => {
        const { tenant, id } = await open();
        const fees: [unknown, object][] = [
          ["40", { facilitator_fee: "40", operator_amount: "960" }],
          ["1000", { facilitator_fee: "1000", operator_amount: "0" }],
          ["1001", { operator_amount: "1000" }],
          ["-1", { operator_amount: "1000" }],
          [40, { operator_amount: "1000" }],
        ];
        for (const [facilitatorFee, expected] of fees) {
          const payment = await pay();
          facilitator.answer(payment.authorization.nonce, (call) => collected(call, { facilitatorFee }));
          const { body } = await send(tenant, id, payment.headers);
          const { settlement } = await tenant.poll(id, body.invocation_id);
          expect(settlement).toMatchObject(expected);
          expect("facilitator_fee" in settlement).toBe("facilitator_fee" in expected);
        }
      });

      test("is lost when the upstream fails afterwards", async () => {
        const { tenant } = await open();
        const route = at.upstream(() => new Response("no", { status: 500 }));
        const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
        const { body } = await send(tenant, id, (await pay()).headers);
        const view = await tenant.ended(id, body.invocation_id);
        expect([view.status, view.error_class]).toEqual(["failed", "upstream_5xx"]);
        expect(view.settlement).toMatchObject({ status: "settled_upstream_failed", settled_amount: "1000" });
        expect(view.settlement.tx_hash).toMatch(HASH);
        expect(await count(tenant, "settled_upstream_failed")).toBe(1);
        expect(await count(tenant, "settled")).toBe(0);
      });

      test("is collected once, for twins that come at once and for one that comes later", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const gate = Promise.withResolvers<void>();
        facilitator.answer(payment.authorization.nonce, async (call) => {
          await gate.promise;
          return collected(call);
        });
        const twins = Array.from({ length: 10 }, () => send(tenant, id, payment.headers));
        await facilitator.arrival(payment.authorization.nonce);
        gate.resolve();
        const answers = [...(await Promise.all(twins)), await send(tenant, id, payment.headers)];
        expect(answers.map(({ status }) => status)).toEqual(Array(11).fill(202));
        expect(new Set(answers.map(({ body }) => body.invocation_id)).size).toBe(1);
        expect(new Set(answers.map((answer) => settlementTold(answer).transaction)).size).toBe(1);
        await tenant.ended(id, answers[0]?.body.invocation_id);
        expect([facilitator.of(payment.authorization.nonce).length, route.seen.length]).toEqual([1, 1]);
      });

      test("is collected although the caller hung up", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const gate = Promise.withResolvers<void>();
        facilitator.answer(payment.authorization.nonce, async (call) => {
          await gate.promise;
          return collected(call);
        });
        const aborted = new AbortController();
        const gone = tenant.send("POST", `/v1/proxy/${id}`, {
          json: { n: 1 },
          headers: payment.headers,
          signal: aborted.signal,
        });
        await facilitator.arrival(payment.authorization.nonce);
        aborted.abort();
        await expect(gone).rejects.toThrow();
        gate.resolve();
        const again = await send(tenant, id, payment.headers);
        expect(settlementTold(again).success).toBe(true);
        await tenant.ended(id, again.body.invocation_id);
        expect([facilitator.of(payment.authorization.nonce).length, route.seen.length]).toEqual([1, 1]);
      });
    });

    describe("a payment that is declined", () => {
      test.each<[string, () => Response]>([
        ["not collected", () => notCollected()],
        ["without a transaction at all", () => Response.json({ success: false, errorReason: "no" })],
        ["a malformed body", () => Response.json({ error: "no" }, { status: 400 })],
        ["an unknown account", () => Response.json({ error: "no" }, { status: 403 })],
        ["a limit", () => Response.json({ error: "no" }, { status: 429 })],
      ])("is a 402 and a call that failed unpaid (%s)", async (_, respond) => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        facilitator.answer(nonce, respond);
        const key = { "idempotency-key": "k" };
        const answer = await send(tenant, id, { ...payment.headers, ...key });
        expectError(answer, 402);
        expect(answer.headers.get("payment-required")).toBeNull();
        const item = await only(tenant);
        expect(item).toMatchObject({ status: "failed", error_class: null, payment_amount: "1000" });
        expect(item.completed_at).toBeString();
        expect(item.settlement).toEqual({ status: "settlement_failed", attempts: 1, reason: "declined" });
        expect(await count(tenant, "settlement_failed")).toBe(1);
        // The same payment is refused for good; the key is free for another one.
        expectError(await send(tenant, id, payment.headers), 402);
        expect((await send(tenant, id, { ...(await pay()).headers, ...key })).status).toBe(202);
        expect(facilitator.of(nonce)).toHaveLength(1);
        const [second] = (await tenant.send("GET", "/v1/invocations")).body.data;
        await tenant.ended(id, second.id);
        expect(route.seen).toHaveLength(1);
      });

      test("is declined for each of twins", async () => {
        const { tenant, id } = await open();
        const payment = await pay();
        const gate = Promise.withResolvers<void>();
        facilitator.answer(payment.authorization.nonce, async () => {
          await gate.promise;
          return notCollected();
        });
        const twins = Array.from({ length: 5 }, () => send(tenant, id, payment.headers));
        await facilitator.arrival(payment.authorization.nonce);
        gate.resolve();
        expect((await Promise.all(twins)).map(({ status }) => status)).toEqual(Array(5).fill(402));
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
      });
    });

    describe("a payment of unknown outcome", () => {
      const doubts: [string, (call: Parameters<typeof collected>[0]) => Response | Promise<Response>][] = [
        ["trouble", () => new Response("no", { status: 503 })],
        ["an unknown credential", () => new Response("no", { status: 401 })],
        ["a redirect", () => new Response(null, { status: 307, headers: { location: "/elsewhere" } })],
        ["no JSON", () => new Response("<html>")],
        ["no verdict", () => Response.json({ transaction: randomHash() })],
        ["a failure that names a transaction", () => notCollected({ transaction: randomHash() })],
        ["a success without a transaction", (call) => collected(call, { transaction: "" })],
        ["another payer's success", (call) => collected(call, { payer: PAY_TO })],
        ["another network's success", (call) => collected(call, { network: "base-sepolia" })],
        ["an answer without an end", () => new Response("[".repeat(70_000))],
        ["no answer", () => new Promise<Response>(() => {})],
      ];
      /** The first attempt stays unknown, and the next one lands when it is told to. */
      function collectedLater(nonce: string): () => void {
        const landed = Promise.withResolvers<void>();
        facilitator.answer(nonce, async (call) => {
          if (facilitator.of(nonce).length === 1) return new Response("", { status: 503 });
          await landed.promise;
          return collected(call);
        });
        return landed.resolve;
      }

      test("is a 202, whatever made it unknown; the call waits until it is settled", async () => {
        const { tenant, id, route } = await open();
        const isCalled = (doubt: string) =>
          route.seen.some(({ body }) => new TextDecoder().decode(body).includes(doubt));
        const doubtful = async ([doubt, respond]: (typeof doubts)[number]) => {
          const payment = await pay();
          const { nonce } = payment.authorization;
          let calledUnpaid = true;
          facilitator.answer(nonce, (call) => {
            if (facilitator.of(nonce).length === 1) return respond(call);
            calledUnpaid = isCalled(doubt);
            return collected(call);
          });
          const answer = await send(tenant, id, payment.headers, { doubt });
          expect([doubt, answer.status, answer.headers.get("x-payment-response")]).toEqual([doubt, 202, null]);
          const { invocation_id } = answer.body;
          const pending = await tenant.poll(id, invocation_id);
          expect([doubt, pending.status, pending.settlement]).toEqual([
            doubt,
            "pending",
            { status: "pending", attempts: 1 },
          ]);
          const view = await tenant.ended(id, invocation_id);
          expect(view).toMatchObject({ status: "succeeded", settlement: { status: "settled", attempts: 2 } });
          const texts = facilitator.of(nonce).map(({ text }) => text);
          expect([texts.length, new Set(texts).size]).toEqual([2, 1]);
          expect([doubt, calledUnpaid, isCalled(doubt)]).toEqual([doubt, false, true]);
          const again = settlementTold(await send(tenant, id, payment.headers, { doubt }));
          expect(again.transaction).toBe(view.settlement.tx_hash);
        };
        await Promise.all(doubts.map(doubtful));
        expect([route.seen.length, await count(tenant, "settled")]).toEqual([doubts.length, doubts.length]);
        expect(await count(tenant, "pending")).toBe(0);
      });

      test("stays so when the next answer is a refusal: the payment may still land", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        facilitator.answer(nonce, () =>
          facilitator.of(nonce).length === 1 ? new Response("", { status: 500 }) : notCollected(),
        );
        const { status, body } = await send(tenant, id, payment.headers);
        expect(status).toBe(202);
        await facilitator.arrival(nonce, 2);
        const look = () => tenant.poll(id, body.invocation_id);
        const view = await eventually(look, ({ settlement }) => settlement.attempts === 2);
        expect(view).toMatchObject({ status: "pending", settlement: { status: "pending" } });
        expect((await send(tenant, id, payment.headers)).status).toBe(202);
        expect(route.seen).toEqual([]);
      });

      test("is settled all the same when its call is cancelled, and says that nothing was got for it", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        const land = collectedLater(nonce);
        const { body } = await send(tenant, id, payment.headers);
        const path = `/v1/proxy/${id}/invocations/${body.invocation_id}`;
        const cancelled = await tenant.send("POST", `${path}/cancel`);
        expect(cancelled.body).toMatchObject({
          status: "failed",
          error_class: "cancelled",
          settlement: { status: "pending" },
        });
        land();
        const look = () => tenant.poll(id, body.invocation_id);
        const view = await eventually(look, ({ settlement }) => settlement.status !== "pending");
        expect(view).toMatchObject({ status: "failed", error_class: "cancelled" });
        expect(view.settlement).toMatchObject({ status: "settled_upstream_failed", settled_amount: "1000" });
        expect(await count(tenant, "settled_upstream_failed")).toBe(1);
        expect(route.seen).toEqual([]);
      });

      test("goes on with the facilitator that it was sent to, whatever is configured since", async () => {
        const { tenant, id, facilitator_credential_ref } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        const land = collectedLater(nonce);
        const { body } = await send(tenant, id, payment.headers);
        const { id: bundle } = await tenant.credential({ plaintext: ALICE.cert + ALICE.key + TEST_CA });
        const json = { facilitator_url: other.url, facilitator_credential_ref: bundle };
        expect((await tenant.send("PATCH", "/v1/settlement/config", { json })).status).toBe(200);
        const remove = () => tenant.send("DELETE", `/v1/credentials/${facilitator_credential_ref}`);
        expectError(await remove(), 409);
        land();
        await tenant.ended(id, body.invocation_id);
        expect([facilitator.of(nonce).length, other.of(nonce).length]).toEqual([2, 0]);
        expect((await remove()).status).toBe(204);
        const next = await pay();
        expect((await send(tenant, id, next.headers)).status).toBe(202);
        expect(other.of(next.authorization.nonce)).toHaveLength(1);
        expectError(await tenant.send("DELETE", `/v1/credentials/${bundle}`), 409);
      });

      test("holds up no payment of another tenant", async () => {
        const [stuck, well] = [await open(), await open()];
        const hung = await Promise.all(Array.from({ length: 40 }, () => pay()));
        for (const { authorization } of hung) {
          facilitator.answer(authorization.nonce, () => new Promise<Response>(() => {}));
        }
        await Promise.all(hung.map(({ headers }) => send(stuck.tenant, stuck.id, headers)));
        const payment = await pay();
        const { nonce } = payment.authorization;
        facilitator.answer(nonce, (call) =>
          facilitator.of(nonce).length === 1 ? new Response("", { status: 503 }) : collected(call),
        );
        const { body } = await send(well.tenant, well.id, payment.headers);
        expect(await well.tenant.ended(well.id, body.invocation_id)).toMatchObject({ status: "succeeded" });
        expect(await count(stuck.tenant, "pending")).toBe(40);
      });

      test("outlives its gateway, killed in the middle of the question", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        facilitator.answer(nonce, (call) =>
          facilitator.of(nonce).length === 1 ? new Promise<Response>(() => {}) : collected(call),
        );
        const lost = send(tenant, id, payment.headers).catch(() => null);
        await facilitator.arrival(nonce);
        await at.gateway.kill9();
        expect(await lost).toBeNull();
        await at.gateway.restart();
        const again = await send(tenant, id, payment.headers);
        expect(again.status).toBe(202);
        const view = await tenant.ended(id, again.body.invocation_id);
        expect(view).toMatchObject({ status: "succeeded", settlement: { status: "settled", attempts: 2 } });
        expect([facilitator.of(nonce).length, route.seen.length]).toEqual([2, 1]);
      });

      test("is not what a gateway leaves that is asked to stop: it waits for the answer and tells it", async () => {
        const { tenant, id, route } = await open();
        const payment = await pay();
        const { nonce } = payment.authorization;
        const gate = Promise.withResolvers<void>();
        facilitator.answer(nonce, async (call) => {
          await gate.promise;
          return collected(call);
        });
        const told = send(tenant, id, payment.headers);
        await facilitator.arrival(nonce);
        const stopped = at.gateway.stop();
        await until(() => at.gateway.log().includes('"event":"draining"'));
        gate.resolve();
        const answer = await told;
        expect([answer.status, settlementTold(answer).success]).toEqual([202, true]);
        await stopped;
        expect(route.seen).toEqual([]);
        await at.gateway.restart();
        expect(await tenant.ended(id, answer.body.invocation_id)).toMatchObject({ status: "succeeded" });
        expect([facilitator.of(nonce).length, route.seen.length]).toEqual([1, 1]);
      });
    });

    describe("the credential of the facilitator", () => {
      test.each<[string, object, Record<string, string | null>]>([
        ["a key", { auth_type: "api_key" }, { "x-api-key": SECRET, authorization: null }],
        ["nothing", { auth_type: "none" }, { "x-api-key": null, authorization: null }],
      ])("is shown by its type: %s", async (_, fields, expected) => {
        const { tenant, id } = await open({ plaintext: SECRET, ...fields });
        const payment = await pay();
        expect((await send(tenant, id, payment.headers)).status).toBe(202);
        const [request] = facilitator.of(payment.authorization.nonce);
        for (const [name, value] of Object.entries(expected)) {
          expect([name, request?.headers.get(name) ?? null]).toEqual([name, value]);
        }
      });

      test.each(["bearer", "api_key", "none"])(
        "is the TLS identity when it is a PEM bundle (%s)",
        async (auth_type) => {
          const plaintext = ALICE.key + TEST_CA + ALICE.cert;
          const { tenant, id } = await open({ auth_type, plaintext }, other.url);
          const payment = await pay();
          const answer = await send(tenant, id, payment.headers);
          expect(settlementTold(answer).success).toBe(true);
          const headers = other.of(payment.authorization.nonce)[0]?.headers;
          expect([headers?.get("authorization"), headers?.get("x-api-key")]).toEqual([null, null]);
        },
      );

      test("leaves the payment open when it does not get through, until it is rotated", async () => {
        const plaintext = ALICE.cert + ALICE.key.replace(/.{8}\n-----END/, "AAAAAAAA\n-----END");
        const broken = await open({ plaintext }, other.url);
        const payment = await pay();
        const { status, body } = await send(broken.tenant, broken.id, payment.headers);
        expect(status).toBe(202);
        const { facilitator_credential_ref: ref } = broken;
        const rotated = { json: { plaintext: ALICE.cert + ALICE.key } };
        expect((await broken.tenant.send("PUT", `/v1/credentials/${ref}`, rotated)).status).toBe(200);
        const view = await broken.tenant.ended(broken.id, body.invocation_id);
        expect(view.settlement.status).toBe("settled");
      });

      test("is never in a log, nor is what was signed", async () => {
        const log = at.gateway.log();
        expect(log).toContain("payment_settled");
        const signatures = facilitator.calls.map(({ body }) => body.paymentPayload.payload.signature);
        for (const secret of [SECRET, ...signatures]) expect(log).not.toContain(secret);
        expect(log).not.toContain("BEGIN ");
        expect(log).not.toContain(ALICE.key.split("\n")[1] ?? "");
      });
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "1500" },
);
