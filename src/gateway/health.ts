// The open paths: health, readiness, version and public keys. None needs a token, none names a tenant.

import { Type } from "@sinclair/typebox";
import { routes } from "../http/elysia.ts";
import { operation } from "../http/openapi.ts";
import { json } from "../http/responses.ts";
import { STRANGERS } from "../http/server.ts";
import { actFor, joinInFlight } from "../kernel/turns.ts";
import type { Store } from "../storage/store.ts";

const status = Type.Object({ status: Type.String() });

const health = operation({
  tag: ["Facilitator", "Service"],
  open: true,
  summary: "Health",
  description:
    "Of the gateway: liveness. The facilitator has the same path on both of its ports, and answers 503 there when it " +
    "could settle nothing.",
  response: { description: "The process serves.", schema: status, example: { status: "ok" } },
  errors: ["unavailable"],
  answers: {
    unavailable: {
      description:
        "Of the facilitator: no node of the chain answers, or its gas wallets are low. Of both: shutting down.",
      schema: Type.Object({ status: Type.Literal("unavailable"), reason: Type.String() }),
      example: { status: "unavailable", reason: "rpc unreachable" },
    },
  },
});

const ready = operation({
  tag: "Service",
  open: true,
  summary: "Readiness",
  description: "Ready when the database takes a write within two seconds.",
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
  /** A JSON Web Key Set (RFC 7517). */
  publicJwks(): unknown;
}

/** All requests during a probe and in the second after it share it: anybody may ask, and each probe is a write. */
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
        await isReady();
        return json("ok", { status: "ok" });
      },
      { detail: ready },
    )
    .get("/version", () => json("ok", { version: options.version, commit: options.commit }), {
      detail: version,
    })
    .get("/.well-known/jwks.json", () => json("ok", options.publicJwks()), { detail: jwks });
}
