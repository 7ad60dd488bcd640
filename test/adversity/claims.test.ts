// A call is made once, though the store refuses to let it be taken: everybody who asked for it asks again, and
// only one of them has it.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { contract, expectError, type Tenant } from "../contract/contract.ts";
import { eventually, PRICING, pay, settleBy, writeCaFile } from "../contract/priced.ts";
import {
  collected,
  type FacilitatorStandIn,
  notCollected,
  startFacilitatorStandIn,
} from "../support/chain/facilitator-stand-in.ts";
import { refuseWrites, runSql } from "../support/stores/database-faults.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const CALLERS = 6;
const SETTLE_WAIT_MS = 2_000;
/** Ten seconds are promised beside the wait for a settlement; a busy machine has three more. */
const ANSWERED_MS_MAX = SETTLE_WAIT_MS + 13_000;
const caFile = writeCaFile();

contract(
  (at) => {
    let facilitator: FacilitatorStandIn;
    beforeAll(() => {
      facilitator = startFacilitatorStandIn();
    });
    afterAll(() => facilitator?.stop());

    const stream = (tenant: Tenant, id: string, headers: Record<string, string>) =>
      tenant.send("POST", `/v1/proxy/${id}/stream`, { json: { n: 1 }, headers });

    /** A call that is paid for and waits for its caller. */
    async function openSettled() {
      const tenant = at.tenant();
      await settleBy(tenant, facilitator.url);
      const over = Promise.withResolvers<void>();
      const route = at.upstream(async () => {
        if (route.seen.length > 1) over.resolve();
        await over.promise;
        return Response.json({ hello: "world" });
      });
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
      const { headers, authorization } = await pay();
      facilitator.answer(authorization.nonce, () => new Response("away", { status: 500 }));
      const invocation = (await stream(tenant, id, headers)).headers.get("x-service-invocation-id") ?? "";
      facilitator.answer(authorization.nonce, collected);
      const isSettled = ({ settlement }: { settlement: { status: string } }) => settlement.status === "settled";
      await eventually(() => tenant.detail(invocation), isSettled);
      /** All of them at once; whoever has the call is answered when all others have been, or have got it too. */
      const sendAll = (callers: number) => {
        let left = callers;
        return Array.from({ length: callers }, async () => {
          const answer = await stream(tenant, id, headers);
          left--;
          if (left === 1) over.resolve();
          return answer;
        });
      };
      return { route, sendAll, invocation, send: () => stream(tenant, id, headers), end: over.resolve };
    }

    /** A call whose payment is being declined: the facilitator answers when it is told to. */
    async function openDeclined() {
      const tenant = at.tenant();
      await settleBy(tenant, facilitator.url);
      const route = at.upstream();
      const { id } = await tenant.agent({ upstream_url: route.url, pricing: PRICING });
      const { headers, authorization } = await pay();
      const { promise: declining, resolve: decline } = Promise.withResolvers<void>();
      facilitator.answer(authorization.nonce, () => declining.then(() => notCollected()));
      const send = () => stream(tenant, id, headers);
      const first = send();
      await facilitator.arrival(authorization.nonce);
      return { route, send, first, decline };
    }

    /** A free call that runs, and is named by its key. */
    async function openRunning() {
      const tenant = at.tenant();
      const answer = Promise.withResolvers<void>();
      const route = at.upstream(async () => {
        await answer.promise;
        return Response.json({ hello: "world" });
      });
      const { id } = await tenant.agent({ upstream_url: route.url });
      const send = () => stream(tenant, id, { "idempotency-key": "k-1" });
      const first = send();
      await route.arrival();
      return { route, send, first, answer: answer.resolve };
    }

    test("a call that was paid for is made once, however many ask for it while the store refuses", async () => {
      const [settled, running] = await Promise.all([openSettled(), openRunning()]);
      const tenant = at.tenant();
      const bystander = await tenant.agent({ upstream_url: at.upstream().url });

      await using refusal = await refuseWrites(at);
      const paid = settled.sendAll(CALLERS);
      const again = [running.send(), running.send()];
      expectError(await tenant.send("POST", `/v1/proxy/${bystander.id}`, { json: {} }), 503);
      await refusal.met(CALLERS + again.length);
      await refusal.end();

      const answers = await Promise.all(paid);
      running.answer();
      const others = await Promise.all([running.first, ...again]);
      const served = (all: typeof answers) => all.filter(({ status }) => status === 200).length;
      expect({
        paid: [settled.route.seen.length, served(answers)],
        running: [running.route.seen.length, served(others)],
      }).toEqual({ paid: [1, 1], running: [1, 1] });
      const refused = [...answers, ...others].filter(({ status }) => status !== 200);
      for (const { status } of refused) expect(status).toBeOneOf([409, 503]);
    });

    test("a call whose payment is declined while the store refuses is told so in time to come again, and then that it was", async () => {
      const { route, send, first, decline } = await openDeclined();
      const began = performance.now();
      await using refusal = await refuseWrites(at);
      decline();
      const answer = await first;
      expectError(answer, 503);
      expect(Number(answer.headers.get("retry-after"))).toBeGreaterThan(0);
      expect(answer.headers.get("x-service-invocation-id")).toMatch(/\S/);
      expect(performance.now() - began).toBeLessThan(ANSWERED_MS_MAX);
      await refusal.end();
      const again = await eventually(send, ({ status }) => status !== 503);
      expect([again.status, again.headers.has("x-payment-response"), route.seen.length]).toEqual([402, true, 0]);
    });

    test("a call that was claimed for a request which gave up before it knew is told to come again, and then made", async () => {
      const { route, send, invocation, end } = await openSettled();
      end();
      const [{ id: owner } = {}] = await runSql(at, "select id from processes where kind = 'gateway'");
      // As a commit leaves it that lands after its request has given up.
      await runSql(
        at,
        `update open_invocations set status = 'running', owner = '${owner}', claim = 'lost' where id = '${invocation}' returning id`,
      );
      const told: number[] = [];
      await eventually(send, ({ status }) => told.push(status) > 0 && status === 200);
      expect(told.filter((status) => status !== 503)).toEqual([200]);
      expect(route.seen.length).toBe(1);
    });
  },
  { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: `${SETTLE_WAIT_MS}` },
);
