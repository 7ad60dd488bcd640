// The facilitator's three endpoints. `/settle` stands behind the account of the client certificate, which is looked
// up before anything of the request is read; the other two are open, and all that the plain port has.
import { Fault } from "../core/fault.ts";
import type { Log } from "../core/log.ts";
import type { Meters } from "../core/meters.ts";
import type { Tracer } from "../core/tracing.ts";
import { FINAL_AFTER } from "../http/client/fetch-json.ts";
import { routes } from "../http/elysia.ts";
import { json } from "../http/responses.ts";
import { createGuardedEdge, createScopes } from "../http/server.ts";
import { SETTLE_BODY_BYTES_MAX } from "../kernel/limits.ts";
import type { Reader } from "../storage/store.ts";
import { parseJson } from "../wire/json.ts";
import { parseSettleRequest, type SettleRequest } from "../x402/codec.ts";
import { NETWORK, SCHEME, TOKEN, X402_VERSION } from "../x402/kind.ts";
import { accountOf } from "./accounts.ts";
import type { Peer } from "./mtls.ts";
import type { FacilitatorAccount } from "./payments/guardrails.ts";
import type { SettleResponse } from "./settle/response.ts";

const JSON_TYPE = /^application\/json\s*(;|$)/i;

const SUPPORTED = {
  kinds: [{ x402Version: X402_VERSION, scheme: SCHEME, network: NETWORK, asset: TOKEN }],
};

export interface FacilitatorRoutes {
  readonly read: Reader;
  readonly log: Log;
  readonly meters?: Pick<Meters, "requestsTo">;
  /** Left out where traces are off. */
  readonly tracer?: Tracer | null;
  settle(account: FacilitatorAccount, request: SettleRequest): Promise<SettleResponse>;
  /** After so long no reorganisation changes the transaction of a payment any more. */
  readonly finalAfterSeconds: number;
  readiness(): Promise<{ readonly ready: true } | { readonly ready: false; readonly reason: string }>;
}

function openRoutes({ readiness }: Pick<FacilitatorRoutes, "readiness">) {
  return routes()
    .get("/supported", () => json("ok", SUPPORTED))
    .get("/healthz", async () => {
      const state = await readiness();
      if (state.ready) return json("ok", { status: "ok" });
      const body = { status: "unavailable", reason: state.reason };
      throw new Fault("unavailable", state.reason, { answer: { body, headers: {} } });
    });
}

/** What the plain port answers. */
export function createOpenEdge({ readiness, ...edge }: Pick<FacilitatorRoutes, "readiness" | "log" | "meters">) {
  return createGuardedEdge({ ...edge, app: openRoutes({ readiness }), guard: null });
}

/** What the mutual-TLS port answers. */
export function createPeerEdge(options: FacilitatorRoutes) {
  const { tracer = null } = options;
  const peers = new WeakMap<Request, Peer>();
  const accounts = createScopes<FacilitatorAccount>();
  const app = routes()
    .use(openRoutes(options))
    .post(
      "/settle",
      async ({ request }) => {
        const scope = accounts.of(request);
        const settleRequest = await readSettleRequest(request);
        const settle = () => options.settle(scope.caller, settleRequest);
        const { span } = scope;
        const response = await (span === null || tracer === null ? settle() : tracer.during(span, settle));
        scope.note("outcome", response.success ? "settled" : "failed");
        return json("ok", response, response.success ? { [FINAL_AFTER]: `${options.finalAfterSeconds}` } : {});
      },
      { parse: "none" },
    );
  const edge = createGuardedEdge<FacilitatorAccount>({
    app,
    log: options.log,
    ...(options.meters && { meters: options.meters }),
    tracer,
    guard: {
      covers: (path) => path === "/settle",
      async identify(request) {
        const peer = peers.get(request);
        const account = peer === undefined ? null : await accountOf(options.read, peer.fingerprint);
        if (account !== null) return account;
        options.log.info("account_refused", { fingerprint: peer?.fingerprint });
        throw new Fault("denied", "no active account has this certificate");
      },
      shown: ({ name }) => ["account", name],
      scopes: accounts,
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

/** @throws Fault `invalid_request` that names the field */
async function readSettleRequest(request: Request): Promise<SettleRequest> {
  if (!JSON_TYPE.test(request.headers.get("content-type") ?? "")) {
    throw new Fault("invalid_request", "content-type: must be application/json");
  }
  const bytes = await request.bytes();
  if (bytes.length > SETTLE_BODY_BYTES_MAX) {
    throw new Fault("invalid_request", `body: larger than ${SETTLE_BODY_BYTES_MAX} bytes`, {
      closesConnection: true,
    });
  }
  const parsed = parseSettleRequest(parseJson(bytes));
  if (!parsed.ok) throw new Fault("invalid_request", parsed.reason);
  return parsed.value;
}
