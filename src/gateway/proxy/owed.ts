// Owed calls: calls that are, or may be, paid for and have not been made. When their caller comes back, the payment or
// the idempotency key tells which call it is, before the body is read. Whether the rest is the same is checked later.
import { and, eq } from "drizzle-orm";
import type { Clock, TimeBounds } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import { findInvocation } from "../invocations/history.ts";
import { findKey } from "../invocations/idempotency.ts";
import type { InvocationKey, InvocationRow } from "../invocations/service.ts";
import type { Payments } from "../payment/service.ts";
import type { ProxyCall } from "./checks.ts";
import { bringsPayment } from "./request-headers.ts";

/** Well within the time for which an unfetched call is kept. */
const TOUCH_EVERY_MS = 30_000;

interface OwedOptions {
  readonly store: Store;
  readonly time: TimeBounds;
  readonly payments: Pick<Payments, "presentedIn">;
}

/**
 * The owed call that this request seems to come back for, or null. Returns at once for a request that carries neither
 * payment nor idempotency key.
 *
 * @param byKey whether to look for the call of its idempotency key, if it brings no payment
 */
export function findOwed(
  options: OwedOptions,
  call: ProxyCall,
  byKey: boolean,
): Bun.MaybePromise<InvocationRow | null> {
  const namesCall = bringsPayment(call.headers) || call.headers.has("idempotency-key");
  return namesCall ? owedCall(options, call, byKey) : null;
}

async function owedCall(options: OwedOptions, call: ProxyCall, byKey: boolean): Promise<InvocationRow | null> {
  const { caller, agentId } = call;
  const id = (await idByPayment(options, call)) ?? (byKey ? await idByKey(options, call) : null);
  if (id === null) return null;
  const row = await findInvocation(options.store.read, caller.tenant, id).catch(orNull);
  const isOwed = row?.status === "pending" && row.payment_nonce !== null;
  return isOwed && row.caller === caller.user && row.agent_id === agentId ? row : null;
}

async function idByPayment({ payments }: OwedOptions, { caller, headers }: ProxyCall): Promise<string | null> {
  const payment = await payments.presentedIn(headers);
  return payment?.tenant === caller.tenant ? payment.invocation_id : null;
}

async function idByKey({ store, time }: OwedOptions, { caller, agentId, headers }: ProxyCall): Promise<string | null> {
  // An invalid key is refused later, by its own check.
  const key = headers.get("idempotency-key");
  if (key === null) return null;
  const owner = { tenant: caller.tenant, caller: caller.user, agent_id: agentId };
  return (
    (await findKey(store, owner, { key, asked_at: time.earliest(), latest: time.latest() }))?.invocation_id ?? null
  );
}

function orNull(error: unknown): null {
  if (error instanceof Fault && error.kind === "not_found") return null;
  throw error;
}

interface KeepOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

/**
 * Keeps an owed streaming call while its caller is here. The time to come back counts from the caller's last try, and
 * sending the body may take long.
 */
export function keepOwed({ store, clock, log }: KeepOptions, owed: InvocationRow): Disposable {
  if (owed.mode !== "streaming") return { [Symbol.dispose]() {} };
  const touch = () => {
    touchOwed(store, owed, clock.now()).catch((error) =>
      log.warn("owed_call_not_kept", { invocation_id: owed.id, error }),
    );
  };
  touch();
  const timer = setInterval(touch, TOUCH_EVERY_MS);
  return { [Symbol.dispose]: () => clearInterval(timer) };
}

function touchOwed(store: Store, { tenant, id }: InvocationKey, now: number): Promise<void> {
  return store.write(async ({ db, tables: { openInvocations: t } }) => {
    await db
      .update(t)
      .set({ updated_at: now })
      .where(and(eq(t.tenant, tenant), eq(t.id, id), eq(t.status, "pending")));
  });
}
