// The routes that need no token: health, readiness, version and public signing keys. Their answers name no tenant.

import { Type } from "@sinclair/typebox";
import { Fault } from "../core/fault.ts";
import { routes } from "../http/elysia.ts";
import { operation } from "../http/openapi.ts";
import { json } from "../http/responses.ts";
import { STRANGERS } from "../http/server.ts";
import { actFor, joinInFlight } from "../kernel/turns.ts";
import type { Keyring } from "../keys/keyring.ts";
import type { Store } from "../storage/store.ts";

const status = Type.Object({ status: Type.String() });

const health = operation({
  tag: ["Facilitator", "Service"],
  open: true,
  summary: "Health",
  description:
    "Liveness of the gateway. The facilitator serves this path on both of its ports, and answers 503 when it " +
    "can't settle payments.",
  response: { description: "The process serves.", schema: status, example: { status: "ok" } },
  errors: ["unavailable"],
  answers: {
    unavailable: {
      description:
        "The service is shutting down; or, at the facilitator, no node of the chain answers or the gas wallets are low.",
      schema: Type.Object({ status: Type.Literal("unavailable"), reason: Type.String() }),
      example: { status: "unavailable", reason: "rpc unreachable" },
    },
  },
});

const ready = operation({
  tag: "Service",
  open: true,
  summary: "Readiness",
  description: "Ready when the database takes a write within two seconds, and no master key is missing.",
  response: { description: "Calls are accepted.", schema: status, example: { status: "ok" } },
  errors: ["unavailable"],
});

const version = operation({
  tag: "Service",
  open: true,
  summary: "Version",
  response: {
    description: "The version of the binary, and the commit it was built from.",
    schema: Type.Object({ version: Type.String(), commit: Type.Union([Type.String(), Type.Null()]) }),
    example: { version: "0.1.0", commit: "4f2a9c81d0be" },
  },
  errors: [],
});

const jwks = operation({
  tag: "Service",
  open: true,
  summary: "Public keys",
  description: "The public signing keys, retired ones included, as a JSON Web Key Set (RFC 7517).",
  response: {
    description: "The keys.",
    schema: Type.Object({ keys: Type.Array(Type.Object({}, { additionalProperties: true })) }),
    example: { keys: [{ kty: "OKP", crv: "Ed25519", kid: "5f0c…", alg: "EdDSA", use: "sig", x: "11qY…" }] },
  },
  errors: [],
});

interface HealthRoutesOptions {
  readonly store: Store;
  readonly version: string;
  readonly commit: string | null;
  readonly keyring: Pick<Keyring, "publicJwks" | "isComplete">;
}

/** Shares each probe's result for its duration and a second more: anybody may ask, and each probe is a database write. */
function createReadiness({ probe }: Pick<Store, "probe">) {
  let latest: Promise<void> | null = null;
  const forget = () => {
    latest = null;
  };
  const ask = () => actFor(null, () => probe(2_000)).finally(() => setTimeout(forget, 1_000).unref());
  return () => {
    latest ??= ask();
    return joinInFlight(latest, STRANGERS);
  };
}

export function healthRoutes(options: HealthRoutesOptions) {
  const isReady = createReadiness(options.store);
  return routes()
    .get("/healthz", () => json("ok", { status: "ok" }), { detail: health })
    .get(
      "/readyz",
      async () => {
        if (!options.keyring.isComplete()) throw new Fault("unavailable", "a master key is missing here");
        await isReady();
        return json("ok", { status: "ok" });
      },
      { detail: ready },
    )
    .get("/version", () => json("ok", { version: options.version, commit: options.commit }), {
      detail: version,
    })
    .get("/.well-known/jwks.json", () => json("ok", options.keyring.publicJwks()), { detail: jwks });
}
