// A gateway of its own with a tenant whose payments a stand-in for a facilitator collects, and calls that the gateway
// owes: their payment is unknown, or they are paid for and wait for their caller.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Hex } from "viem";
import { collected, type FacilitatorStandIn, startFacilitatorStandIn } from "../chain/facilitator-stand-in.ts";
import { type Answer, type Json, openPayingTenant, type PayingTenant } from "../chain/paying.ts";
import { newPayer, signPayment } from "../chain/payments.ts";
import { type Database, type Gateway, startGateway } from "../gateway/gateway.ts";
import { type Environment, temporaryRoot } from "../gateway/process.ts";
import { TEST_CA } from "../http/certificates.ts";
import { startUpstream, type Upstream } from "../http/upstream.ts";
import type { Target } from "./database-faults.ts";

const PRICE = 1_000n;
/** "No more than a few seconds", and some for a busy machine. What is put off wrongly comes after a minute, or an hour. */
const SOON_MS = 30_000;

export const invocationOf = (answer: Answer) => answer.headers.get("x-service-invocation-id") ?? "";

export interface OwedCall {
  readonly id: string;
  readonly nonce: Hex;
  readonly invocation: string;
  send(): Promise<Answer>;
  /** The facilitator collects from now on; gives what the settlement has come to in a few seconds. */
  settled(): Promise<string>;
  /** How often its upstream was called. */
  made(): number;
}

export interface Owing extends Target, AsyncDisposable {
  readonly gateway: Gateway;
  readonly facilitator: FacilitatorStandIn;
  readonly tenant: PayingTenant;
  readonly upstream: Upstream;
  /** A call whose payment is unknown. */
  openUnknown(suffix?: "" | "/stream"): Promise<OwedCall>;
  /** A call whose payment the facilitator has got, and does not answer. */
  openHeld(): Promise<Pick<OwedCall, "id" | "nonce">>;
  /** The record of a call. */
  detail(invocation: string): Promise<Json>;
  /** Whether a payment is asked for so many times more, in a few seconds. */
  isAskedOn(nonce: Hex, times: number): Promise<boolean>;
}

interface OwingOptions {
  readonly database: Database;
  readonly env?: Environment;
  readonly program?: readonly string[];
  /** Answers calls of `/held`. */
  readonly held?: Promise<void>;
}

export async function startOwing({ database, env, program, held }: OwingOptions): Promise<Owing> {
  await using stack = new AsyncDisposableStack();
  const facilitator = startFacilitatorStandIn();
  stack.defer(() => facilitator.stop());
  const calls = new Map<string, number>();
  const upstream = startUpstream(async (request) => {
    const { pathname } = new URL(request.url);
    calls.set(pathname, (calls.get(pathname) ?? 0) + 1);
    if (pathname === "/held") await held;
    return Response.json({ hello: "world" });
  });
  stack.defer(() => upstream.stop());
  const caFile = join(temporaryRoot(), "stand-in-ca.pem");
  writeFileSync(caFile, TEST_CA);
  const variables = await database.fresh();
  const gateway = stack.use(
    await startGateway({
      env: { TOLLGATE_CA_FILE: caFile, TOLLGATE_SETTLE_WAIT_MS: "2000", ...variables, ...env },
      ...(program && { program }),
    }),
  );
  const tenant = await openPayingTenant(gateway, { url: facilitator.url, client: { bundle: "of-nobody" } });
  const detail = async (invocation: string) => (await tenant.send("GET", `/v1/invocations/${invocation}`)).body;
  /** A call that is paid for, of an agent of its own. */
  async function openPriced(suffix: "" | "/stream") {
    const pay_to = newPayer().address;
    const pricing = { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to };
    const id = await tenant.agent({ upstream_url: `${upstream.url}${pay_to}`, pricing });
    const { headers, authorization } = await signPayment(newPayer(), { to: pay_to, value: PRICE });
    const send = () => tenant.send("POST", `/v1/proxy/${id}${suffix}`, { n: 1 }, headers);
    return { id, nonce: authorization.nonce, pay_to, send };
  }
  const owned = stack.move();
  return {
    gateway,
    databaseUrl: variables["DATABASE_URL"],
    facilitator,
    tenant,
    upstream,
    detail,
    async openHeld() {
      const { id, nonce, send } = await openPriced("");
      facilitator.answer(nonce, () => new Promise(() => {}));
      void send().catch(() => {});
      await facilitator.arrival(nonce);
      return { id, nonce };
    },
    async openUnknown(suffix = "") {
      const { id, nonce, pay_to, send } = await openPriced(suffix);
      facilitator.answer(nonce, () => new Response("away", { status: 500 }));
      const invocation = invocationOf(await send());
      return {
        id,
        nonce,
        invocation,
        send,
        made: () => calls.get(`/${pay_to}`) ?? 0,
        async settled() {
          facilitator.answer(nonce, collected);
          const until = performance.now() + SOON_MS;
          for (;;) {
            const { status } = (await detail(invocation)).settlement;
            if (status !== "pending" || performance.now() > until) return status;
            await Bun.sleep(50);
          }
        },
      };
    },
    async isAskedOn(nonce, times) {
      const asked = facilitator.arrival(nonce, facilitator.of(nonce).length + times).then(() => true);
      return await Promise.race([asked, Bun.sleep(SOON_MS).then(() => false)]);
    },
    [Symbol.asyncDispose]: () => owned.disposeAsync(),
  };
}
