// Payments of calls, as the proxy uses them. The steps of one paid call: `check` at the gate, `paymentRow` and insertPayment in
// the write that accepts the call, then `settle`, which returns the response headers.
import { isAddress } from "viem";
import { Fault } from "../../core/fault.ts";
import type { Meters } from "../../core/meters.ts";
import type { Clock } from "../../core/time.ts";
import { endsWithin, unlessAborted } from "../../kernel/wait.ts";
import type { Store, Tx } from "../../storage/store.ts";
import { type CallBody, hashOf } from "../../wire/body.ts";
import {
  type AcceptedTerms,
  acceptedMatches,
  challenge,
  decodePaymentHeader,
  decodePaymentSignature,
  encodeBase64,
  type Parsed,
  type PaymentChallenge,
  paymentResponse,
  requirementsFrom,
  requirementsOf,
  settleRequestJson,
} from "../../x402/codec.ts";
import { authorizationDigest, canonicalSignature } from "../../x402/eip3009.ts";
import type { Network } from "../../x402/network.ts";
import type { WireRequirements } from "../../x402/schemas.ts";
import type { Payment } from "../../x402/types.ts";
import { checkRequirements, checkWindow, keyOf, type Verifier } from "../../x402/verify.ts";
import type { Price } from "../agents/service.ts";
import type { AcceptedRow, InvocationKey, InvocationRow } from "../invocations/service.ts";
import { findSettlementConfig, type SettlementConfigRow } from "./config.ts";
import type { RestoreGuard } from "./restored.ts";
import type { Settler } from "./settler.ts";
import { closeIfUnsent, isOpen, type PaymentRow, paymentByKey, paymentOf } from "./store.ts";

export interface PaymentDeps {
  readonly network: Network;
  readonly store: Store;
  readonly clock: Clock;
  readonly meters: Pick<Meters, "payment">;
  readonly settler: Settler;
  readonly verifier: Pick<Verifier, "signedBy">;
  readonly settleWaitMs: number;
  readonly guard: RestoreGuard;
  /** Base of the absolute URLs in challenges; null: from the request's Host. */
  readonly publicUrl: string | null;
  findInvocation(tenant: string, id: string): Promise<InvocationRow>;
}

export interface PricedCall {
  readonly tenant: string;
  readonly caller: string;
  readonly agent_id: string;
  readonly path: string;
  /** Null when the call is free. */
  readonly price: Price | null;
  /** The payment headers of the call; null when it has none. */
  readonly payment: PaymentTexts | null;
  readonly host: string;
  readonly body: CallBody;
  /** Adds a detail to the request's log line. The caller is not told it. */
  note(name: string, value: string): void;
}

/** The parts of a call that decide whether it is a repetition of an earlier one. */
export type RepeatedCall = Omit<PricedCall, "path" | "price" | "host" | "note">;

/** A verified payment that has not been used at this gateway. */
export interface Charge {
  readonly network: Network;
  readonly payment: Payment;
  readonly wire: WireRequirements;
  readonly body_sha256: string;
  readonly digest: string;
  /** Null when the tenant has no facilitator: the payment is verified only. */
  readonly config: SettlementConfigRow | null;
}

export type PaymentCheck =
  | { readonly kind: "free" }
  /** The payment was used before for this very call. */
  | { readonly kind: "known"; readonly invocation_id: string }
  | { readonly kind: "charge"; readonly charge: Charge };

/** Payment headers of the response. */
export type PaidHeaders = Readonly<Record<string, string>>;

export type Payments = ReturnType<typeof createPayments>;

export function paidColumns({ network, payment, config }: Charge) {
  const { from, value, nonce } = payment.authorization;
  return {
    payment_network: network.name,
    payment_asset: network.token.symbol,
    payment_amount: value.toString(),
    payment_payer: from,
    payment_nonce: nonce,
    settlement_status: config === null ? null : ("pending" as const),
    settlement: config === null ? null : JSON.stringify({ attempts: 1 }),
  };
}

export function createPayments(deps: PaymentDeps) {
  const { network, store, settler, settleWaitMs, findInvocation } = deps;

  /** Null while the first attempt is in flight, here or on another replica, or about to begin. */
  async function responseHeaders(tenant: string, id: string): Promise<PaidHeaders | null> {
    const row = await findInvocation(tenant, id);
    if (row.settlement_status === null) return {};
    const payment = await paymentOf(store.read, { tenant, id });
    if (row.settlement_status === "settlement_failed") {
      const { reason = "" } = JSON.parse(row.settlement ?? "{}") as { reason?: string };
      throw notSettled(reason, payment === null ? {} : settledHeaders(network, row, payment));
    }
    if (payment === null) return {};
    if (row.settlement_status !== "pending") return settledHeaders(network, row, payment);
    return isFirstInFlight(payment) ? null : {};
  }

  /** When the process stops, returns without headers: the call is accepted, and its caller must learn its ID. */
  async function recall(tenant: string, invocationId: string): Promise<PaidHeaders> {
    try {
      return await unlessAborted(settler.stopped, responseHeadersInTime(tenant, invocationId));
    } catch (error) {
      if (settler.stopped.aborted) return {};
      throw error;
    }
  }

  async function responseHeadersInTime(tenant: string, invocationId: string): Promise<PaidHeaders> {
    const until = performance.now() + settleWaitMs;
    for (;;) {
      await endsWithin(until - performance.now(), settler.inFlight(invocationId) ?? Promise.resolve());
      const headers = await responseHeaders(tenant, invocationId);
      if (headers !== null) return headers;
      if (performance.now() >= until) return {};
      if (settler.inFlight(invocationId) === undefined) await Bun.sleep(200);
    }
  }

  return {
    /** @throws PaymentRefused, with a challenge if unpaid; Fault `invalid_request`; `unavailable` with too many in flight */
    check: (call: PricedCall) => check(deps, call),
    /** The row of this payment if any caller used it here before; else null. Nothing is verified. */
    presentedIn: (payment: PaymentTexts) => presentedIn(deps, payment),
    /** The invocation of which this call is a paid repetition, or null. @throws as `check` */
    usedFor: (call: RepeatedCall) => usedFor(deps, call),
    /** The payment's row, for the write that stores the call. @param credentialRef the upstream's, which the call will need */
    paymentRow: (charge: Charge, row: AcceptedRow, credentialRef: string | null): PaymentRow =>
      paymentRowOf(deps, charge, row, credentialRef),
    /** Settles a recorded payment, if there is a facilitator; waits up to `settleWaitMs`. @throws PaymentRefused */
    async settle(payment: PaymentRow): Promise<PaidHeaders> {
      if (!isOpen(payment)) return {};
      void settler.attempt(payment);
      try {
        return await recall(payment.tenant, payment.invocation_id);
      } catch (error) {
        // The call is accepted, so its caller must get the ID even if the store fails now.
        if (error instanceof Fault && error.kind === "unavailable") return {};
        throw error;
      }
    },
    /** The response headers of an earlier call, after a wait for its settlement. @throws PaymentRefused */
    recall,
    /** Call this in the write that cancels a call: it closes an unsent payment, so that it is never sent. */
    cancelled: async (tx: Tx, call: InvocationKey, now: number) => void (await closeIfUnsent(tx, call, now)),
  };
}

const isFirstInFlight = ({ attempts, unsent_attempts, unknown_since }: PaymentRow): boolean =>
  attempts === 1 && unsent_attempts === 0 && unknown_since === null;

async function presentedIn({ network, store }: PaymentDeps, payment: PaymentTexts): Promise<PaymentRow | null> {
  if (payment.v1 !== null && payment.v2 !== null) return null;
  const read = readPayment(network, payment);
  return read.ok ? paymentByKey(store.read, keyOf(network, read.value.authorization)) : null;
}

async function usedFor(deps: PaymentDeps, call: RepeatedCall): Promise<string | null> {
  const read = call.payment === null ? null : readPayment(deps.network, call.payment);
  if (read?.ok !== true) return null;
  return (await usesOf(deps, call, read.value)).known?.invocation_id ?? null;
}

async function check(deps: PaymentDeps, call: PricedCall): Promise<PaymentCheck> {
  const { price, agent_id, path } = call;
  const read = call.payment === null ? null : readPayment(deps.network, call.payment);
  if (price === null) {
    // The caller may have paid for this very call before the agent became free. Then this is a repetition of that call.
    const uses = read?.ok === true ? await usesOf(deps, call, read.value) : null;
    return uses?.known ?? { kind: "free" };
  }
  const resource = `${baseUrl(deps.publicUrl, call.host)}${path}`;
  const maxTimeoutSeconds = deps.guard.timeoutSeconds(unixSeconds(deps.clock));
  const wire = demanded(deps.network, { ...price, agent_id, resource, maxTimeoutSeconds });
  if (read === null) {
    deps.meters.payment("required");
    const message = "the agent is priced: a payment is required, in X-PAYMENT or PAYMENT-SIGNATURE";
    throw new PaymentRefused(message, challenge(deps.network, wire, message));
  }
  return paidOrCharged(deps, call, await signedPayment(deps, call, read), wire);
}

/** @param reason goes to the log only */
function refuse({ meters }: PaymentDeps, call: PricedCall, reason: string, message?: string): never {
  meters.payment("refused");
  call.note("payment_problem", reason);
  throw new PaymentRefused(message ?? "the payment could not be verified");
}

const unixSeconds = (clock: Clock) => Math.floor(clock.now() / 1000);

async function paidOrCharged(deps: PaymentDeps, call: PricedCall, presented: PresentedPayment, wire: WireRequirements) {
  const { network, store, meters, settler } = deps;
  // Checked before the validity window, so that a caller who lost our answer can repeat the call with an expired payment.
  const { used, known, body_sha256, digest } = await usesOf(deps, call, presented);
  if (known !== null) return known;
  const problem = used ? "already_used" : paymentProblem(deps, presented, wire);
  if (problem !== null) refuse(deps, call, problem);
  const config = await findSettlementConfig(store.read, call.tenant);
  if (config !== null && settler.isCrowded(call.tenant)) {
    meters.payment("crowded");
    // Nothing is recorded, so the same payment can be sent again.
    throw new Fault("unavailable", "too many payments are being settled", { retryAfterSeconds: 5 });
  }
  const charge: Charge = { network, payment: presented, wire, body_sha256, digest, config };
  return { kind: "charge" as const, charge };
}

async function usesOf({ network, store }: PaymentDeps, call: RepeatedCall, { authorization }: Payment) {
  const body_sha256 = await hashOf(call.body, call.tenant);
  const digest = Buffer.from(authorizationDigest(network.token.domain, authorization)).toString("hex");
  const row = await paymentByKey(store.read, keyOf(network, authorization));
  const isKnown =
    row !== null &&
    row.tenant === call.tenant &&
    row.caller === call.caller &&
    row.agent_id === call.agent_id &&
    row.body_sha256 === body_sha256 &&
    row.authorization_digest === digest;
  const known = isKnown ? ({ kind: "known", invocation_id: row.invocation_id } as const) : null;
  return { used: row !== null, known, body_sha256, digest };
}

function settledHeaders(network: Network, { settlement, payment_payer }: InvocationRow, { x402_version }: PaymentRow) {
  const { tx_hash = "" } = JSON.parse(settlement ?? "{}") as { tx_hash?: string };
  const version = x402_version === 2 ? 2 : 1;
  const { name, value } = paymentResponse(network, version, { transaction: tx_hash, payer: payment_payer ?? "" });
  return { [name.toLowerCase()]: value };
}

function paymentRowOf({ clock, settler }: PaymentDeps, charge: Charge, row: AcceptedRow, credentialRef: string | null) {
  const { network, payment, wire, body_sha256, digest, config } = charge;
  const now = clock.now();
  const { validBefore } = payment.authorization;
  return {
    ...keyOf(network, payment.authorization),
    tenant: row.tenant,
    invocation_id: row.id,
    agent_id: row.agent_id,
    caller: row.caller,
    body_sha256,
    authorization_digest: digest,
    x402_version: payment.x402Version,
    valid_before: Number(validBefore > LATEST_SECONDS ? LATEST_SECONDS : validBefore),
    facilitator_url: config?.facilitator_url ?? null,
    facilitator_credential_ref: config?.facilitator_credential_ref ?? null,
    settle_request: config === null ? null : JSON.stringify(settleRequestJson(payment, wire)),
    attempts: config === null ? 0 : 1,
    unsent_attempts: 0,
    sent_at: null,
    unknown_since: null,
    asked_ms: 0,
    call_credential_ref: credentialRef,
    next_attempt_at: config === null ? null : settler.leaseUntil(),
    final_at: null,
    created_at: now,
    updated_at: now,
  };
}

/** Later than any clock will show, and still exact as a number. */
const LATEST_SECONDS = 9_000_000_000_000n;

// The checks of a presented payment that need no database. Callers learn only that a payment failed; the log has the reason.

/** How long a payment must still be valid when it arrives: the time that settling takes. */
const MARGIN_SECONDS = 6;
/** A host name or address, optionally with a port. Anything else in the header must not get into a challenge's URL. */
const HOST = /^(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::\d{1,5})?$/i;

/** A payment as presented; one of version 2 names the offer that it answers. */
type PresentedPayment = Payment & { readonly accepted?: AcceptedTerms };

/** Thrown for a call whose payment is missing, invalid or not settled. Each kind of call shows it in its own way. */
export class PaymentRefused extends Fault {
  /** What has to be paid; null when the call had a payment that is invalid or was not settled. */
  readonly challenge: PaymentChallenge | null;
  /** Response headers with the outcome of a payment that was not settled. */
  readonly told: PaidHeaders;

  constructor(message: string, challenge: PaymentChallenge | null = null, told: PaidHeaders = {}) {
    super("payment_required", message);
    this.challenge = challenge;
    this.told = told;
  }
}

/** What the caller is told, by the settlement's reason. Each text is about this one payment: another may have been collected. */
const NOT_SETTLED: Readonly<Record<string, string>> = {
  declined:
    "the facilitator declined the payment, and nothing was collected; usual reasons: the payer has too little USDC, the amount is below the facilitator's minimum, a limit is reached, or the tenant has no account at the facilitator, whose log says which",
  expired:
    "the payment expired before the facilitator took it, and nothing was collected; sign a new payment to try again",
  cancelled: "the call was cancelled before its payment was sent, and nothing was collected",
};
const UNKNOWN =
  "it is unknown whether the payment was collected; look on the chain for the payer and nonce before you pay again";

const notSettled = (reason: string, told: PaidHeaders) =>
  new PaymentRefused(Object.hasOwn(NOT_SETTLED, reason) ? String(NOT_SETTLED[reason]) : UNKNOWN, null, told);

/** The payment headers of a call, unparsed, by version of the protocol. */
export interface PaymentTexts {
  readonly v1: string | null;
  readonly v2: string | null;
}

/** The payment comes in a header of the request, and a refusal is a 402. */
export const paidByHeader = {
  payment(headers: Headers): PaymentTexts | null {
    const [v1, v2] = [headers.get("x-payment"), headers.get("payment-signature")];
    return v1 === null && v2 === null ? null : { v1, v2 };
  },
  /** The challenge goes out in both versions at once. */
  refused({ message, challenge, told }: PaymentRefused): Fault {
    const body = challenge?.version1 ?? { error: message };
    const headers = challenge === null ? told : { "payment-required": encodeBase64(challenge.version2) };
    return new Fault("payment_required", message, { answer: { body, headers } });
  },
};

/** @throws Fault `invalid_request` when the call has payments of both versions */
function readPayment(network: Network, { v1, v2 }: PaymentTexts): Parsed<PresentedPayment> {
  if (v1 === null) return decodePaymentSignature(network, v2 ?? "");
  if (v2 === null) return decodePaymentHeader(v1);
  throw new Fault("invalid_request", "X-PAYMENT: can't be sent together with PAYMENT-SIGNATURE");
}

/** The payment with its signature verified and in canonical form. @throws PaymentRefused */
async function signedPayment(deps: PaymentDeps, call: PricedCall, read: Parsed<PresentedPayment>) {
  if (!read.ok) return refuse(deps, call, read.reason, "the payment could not be read");
  const signature = canonicalSignature(read.value.signature);
  // A contract wallet's signature can't be verified without a chain, so it is refused here.
  const isSigned = signature !== null && (await deps.verifier.signedBy(call.tenant, read.value)) === "payer";
  if (!isSigned) return refuse(deps, call, "invalid_signature");
  return { ...read.value, signature };
}

/** Why the payment does not meet the requirements; null when it does. */
function paymentProblem({ network, clock, guard }: PaymentDeps, presented: PresentedPayment, wire: WireRequirements) {
  const { accepted, ...payment } = presented;
  const now = unixSeconds(clock);
  if (accepted !== undefined && !acceptedMatches(accepted, wire)) return "answers_another_offer";
  const { validBefore } = payment.authorization;
  return (
    checkRequirements(network, payment, requirementsFrom(wire), { exactValue: true }) ??
    checkWindow(payment.authorization, now, MARGIN_SECONDS) ??
    (validBefore > guard.latest(now) ? "valid_too_long" : null) ??
    (guard.mayBeOlder(validBefore) ? "may_be_older_than_the_restore" : null)
  );
}

/** `resource` is the absolute URL of the call. */
type Demand = Price & Pick<PricedCall, "agent_id"> & Pick<WireRequirements, "resource" | "maxTimeoutSeconds">;

export function demanded(network: Network, { agent_id, pay_to, ...demand }: Demand): WireRequirements {
  // Official clients refuse an address in mixed case whose checksum is wrong.
  const payTo = isAddress(pay_to) ? pay_to : pay_to.toLowerCase();
  const description = `One call of ${agent_id}`;
  const { maxTimeoutSeconds } = demand;
  return { ...requirementsOf(network, { ...demand, payTo, description }), maxTimeoutSeconds };
}

/** The base URL of this gateway, as configured or from the request's Host, without a trailing slash. */
export function baseUrl(publicUrl: string | null, host: string): string {
  if (publicUrl !== null) return publicUrl.replace(/\/+$/, "");
  const url = HOST.test(host) ? URL.parse(`http://${host}`) : null;
  return url === null ? "http://localhost" : url.origin;
}
