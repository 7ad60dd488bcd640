// The routes that need no token: health, readiness, version and public signing keys. Their answers name no tenant.
import { Type } from "@sinclair/typebox";
import { Fault } from "../core/fault.ts";
import { COMMIT, VERSION } from "../core/startup.ts";
import { routes } from "../http/elysia.ts";
import { operation } from "../http/openapi.ts";
import { json } from "../http/responses.ts";
import { STRANGERS } from "../http/server.ts";
import { joinInFlight } from "../kernel/turns.ts";
import { actFor } from "../kernel/wait.ts";
import type { Keyring } from "../keys/keyring.ts";
import type { Store } from "../storage/store.ts";

const status = Type.Object({ status: Type.Literal("ok", { description: "Always `ok`: a failure has another body." }) });

const health = operation({
  tag: ["Facilitator", "Service"],
  open: true,
  summary: "Get health",
  description:
    "Liveness of the gateway. The facilitator serves this path on both of its ports, and answers 503 when it " +
    "can't settle payments.",
  response: { description: "The process serves.", schema: status, example: { status: "ok" } },
  errors: ["unavailable"],
  answers: {
    unavailable: {
      description:
        "The service is shutting down; or, at the facilitator, no node of the chain answers or the gas wallets are low.",
      schema: Type.Object({
        status: Type.Literal("unavailable", { description: "Always `unavailable`." }),
        reason: Type.String({ description: "What is missing." }),
      }),
      example: { status: "unavailable", reason: "rpc unreachable" },
    },
  },
});

const ready = operation({
  tag: "Service",
  open: true,
  summary: "Get readiness",
  description: "Ready when the database takes a write within two seconds, and no master key is missing.",
  response: { description: "Calls are accepted.", schema: status, example: { status: "ok" } },
  errors: ["unavailable"],
});

const version = operation({
  tag: "Service",
  open: true,
  summary: "Get the version",
  response: {
    description: "The version of the binary, and the commit it was built from.",
    schema: Type.Object({
      version: Type.String({ description: "The version of the binary." }),
      commit: Type.Union([Type.String(), Type.Null()], { description: "Null for a build outside a repository." }),
    }),
    example: { version: "0.1.0", commit: "4f2a9c81d0be" },
  },
  errors: [],
});

const jwks = operation({
  tag: "Service",
  open: true,
  summary: "Get public keys",
  description: "The public signing keys, retired ones included, as a JSON Web Key Set (RFC 7517).",
  response: {
    description: "The keys.",
    schema: Type.Object({
      keys: Type.Array(Type.Object({}, { additionalProperties: true }), { description: "JSON Web Keys (RFC 7517)." }),
    }),
    example: { keys: [{ kty: "OKP", crv: "Ed25519", kid: "5f0c…", alg: "EdDSA", use: "sig", x: "11qY…" }] },
  },
  errors: [],
});

/** Whether calls are accepted. A probe, which is a database write, is shared for a second more, since anybody may ask. */
export function createReadiness({ probe }: Pick<Store, "probe">, { isComplete }: Pick<Keyring, "isComplete">) {
  let latest: Promise<void> | null = null;
  const forget = () => {
    latest = null;
  };
  const ask = () => actFor(null, () => probe(2_000)).finally(() => setTimeout(forget, 1_000).unref());
  /** @throws Fault `unavailable` */
  return async (): Promise<void> => {
    if (!isComplete()) throw new Fault("unavailable", "a master key is missing here");
    latest ??= ask();
    await joinInFlight(latest, STRANGERS);
  };
}

export function healthRoutes(checkReady: () => Promise<void>, keyring: Pick<Keyring, "publicJwks">) {
  const ok = () => json("ok", { status: "ok" });
  return routes()
    .get("/healthz", ok, { detail: health })
    .get("/readyz", () => checkReady().then(ok), { detail: ready })
    .get("/version", () => json("ok", { version: VERSION, commit: COMMIT }), { detail: version })
    .get("/.well-known/jwks.json", () => json("ok", keyring.publicJwks()), { detail: jwks });
}
