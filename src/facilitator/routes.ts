// The facilitator's three endpoints. `/settle` requires an account, found by the client certificate before the body is read;
// `/supported` and `/healthz` are open, and the plain port serves only these two. Request and response bodies belong to the
// protocol: a protocol beside x402 version 1 would be a second value of `PaymentProtocol`.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import type { Tracer } from "../core/tracing.ts";
import { FINAL_AFTER } from "../http/client/outbound.ts";
import { routes } from "../http/elysia.ts";
import { requireJsonType } from "../http/input.ts";
import { json } from "../http/responses.ts";
import { createGuardedEdge, scopeOf } from "../http/server.ts";
import { MAX } from "../kernel/limits.ts";
import type { Reader } from "../storage/store.ts";
import { parseJson } from "../wire/json.ts";
import { parseSettleRequest, type SettleRequest } from "../x402/codec.ts";
import { type Network, SCHEME, X402_VERSION } from "../x402/network.ts";
import { accountOf } from "./accounts.ts";
import type { Peer } from "./mtls.ts";
import type { FacilitatorAccount } from "./payments/guardrails.ts";
import type { CollectionOutcome } from "./settle/outcome.ts";

/** How a protocol reads a request to settle a payment, and writes the response. */
export interface PaymentProtocol {
  /** The entry in `/supported`. */
  readonly kind: Readonly<Record<string, unknown>>;
  /** @throws Fault `invalid_request` that names the field */
  read(body: unknown): SettleRequest;
  /** @throws Fault for an outcome without a body in the protocol: a limit, or a settlement that is not possible now */
  answer(request: SettleRequest, outcome: CollectionOutcome): Readonly<Record<string, unknown>>;
}

export const x402V1 = ({ name: network, token }: Network): PaymentProtocol => ({
  kind: { x402Version: X402_VERSION, scheme: SCHEME, network, asset: token.address },
  read(body) {
    const parsed = parseSettleRequest(body);
    if (!parsed.ok) throw new Fault("invalid_request", parsed.reason);
    return parsed.value;
  },
  answer({ payment }, outcome) {
    const of = { network, payer: payment.authorization.from };
    if (outcome.kind === "settled") return { success: true, transaction: outcome.hash, ...of };
    const isFailure = outcome.kind === "declined" || (outcome.kind === "pending" && outcome.hash !== null);
    if (!isFailure) throw refusal(outcome);
    // Callers get one coarse reason. The transaction is "" only when this facilitator has none that may still land.
    const errorReason = "payment could not be collected";
    return { success: false, errorReason, transaction: outcome.hash ?? "", ...of };
  },
});

/** The error for an outcome that is no success or failure of the payment itself; protocols over HTTP have it in common. */
function refusal(outcome: CollectionOutcome): Fault {
  const { retryAfterSeconds } = outcome;
  const isKind = outcome.kind === "over_limit" || outcome.kind === "unavailable";
  const [kind, message] = isKind
    ? [outcome.kind, outcome.message]
    : (["unavailable", "this payment is being settled"] as const);
  return new Fault(kind, message, retryAfterSeconds === null ? {} : { retryAfterSeconds });
}

export interface FacilitatorRoutes {
  readonly protocol: PaymentProtocol;
  readonly read: Reader;
  readonly log: Log;
  readonly meters: Pick<Meters, "requestsTo">;
  /** Null where traces are off. */
  readonly tracer: Tracer | null;
  settle(account: FacilitatorAccount, request: SettleRequest): Promise<CollectionOutcome>;
  /** The time after which no reorganisation can change a payment's transaction any more. */
  readonly finalAfterSeconds: number;
  readiness(): Promise<{ readonly ready: true } | { readonly ready: false; readonly reason: string }>;
}

function openRoutes({ protocol, readiness }: Pick<FacilitatorRoutes, "protocol" | "readiness">) {
  return routes()
    .get("/supported", () => json("ok", { kinds: [protocol.kind] }))
    .get("/healthz", async () => {
      const state = await readiness();
      if (state.ready) return json("ok", { status: "ok" });
      const body = { status: "unavailable", reason: state.reason };
      throw new Fault("unavailable", state.reason, { answer: { body, headers: {} } });
    });
}

/** Serves the plain port. */
export const createOpenEdge = (options: Pick<FacilitatorRoutes, "protocol" | "readiness" | "log" | "meters">) =>
  createGuardedEdge({ ...options, app: openRoutes(options), guard: null });

/** Serves the mutual-TLS port. */
export function createPeerEdge(options: FacilitatorRoutes) {
  const { protocol, log, meters, tracer } = options;
  const peers = new WeakMap<Request, Peer>();
  const app = routes()
    .use(openRoutes(options))
    .post(
      "/settle",
      async ({ request }) => {
        const scope = scopeOf<FacilitatorAccount>(request);
        const settleRequest = protocol.read(await readBody(request));
        const settle = () => options.settle(scope.caller, settleRequest);
        const { span } = scope;
        const outcome = await (span === null || tracer === null ? settle() : tracer.during(span, settle));
        const answer = protocol.answer(settleRequest, outcome);
        const isSettled = outcome.kind === "settled";
        scope.note("outcome", isSettled ? "settled" : "failed");
        return json("ok", answer, isSettled ? { [FINAL_AFTER]: `${options.finalAfterSeconds}` } : {});
      },
      { parse: "none" },
    );
  const edge = createGuardedEdge<FacilitatorAccount>({
    app,
    log,
    meters,
    tracer,
    guard: {
      covers: (path) => path === "/settle",
      async identify(request) {
        const peer = peers.get(request);
        const account = peer === undefined ? null : await accountOf(options.read, peer.fingerprint);
        if (account !== null) return account;
        log.info("account_refused", { fingerprint: peer?.fingerprint });
        throw new Fault("denied", "no active account has this certificate");
      },
      shown: ({ name }) => ["account", name],
      traced: (method, path) => (method === "POST" ? { route: path } : null),
    },
  });
  return {
    fetch(request: Request, peer: Peer): Promise<Response> {
      peers.set(request, peer);
      return edge.fetch(request);
    },
    drain: edge.drain,
  };
}

/** @throws Fault `invalid_request` */
async function readBody(request: Request): Promise<unknown> {
  requireJsonType(request);
  const bytes = await request.bytes();
  if (bytes.length > MAX.settleBodyBytes) {
    throw new Fault("invalid_request", `body: larger than ${MAX.settleBodyBytes} bytes`, { closesConnection: true });
  }
  return parseJson(bytes);
}
