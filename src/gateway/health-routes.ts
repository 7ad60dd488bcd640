// The open paths: health, readiness, version and public keys. None needs a token, none names a tenant.
import { json } from "../http/answers.ts";
import { routes } from "../http/elysia.ts";
import type { Store } from "../storage/store.ts";
import { health, jwks, ready, version } from "./health-openapi.ts";

const READY_WITHIN_MS = 2_000;

export interface HealthRoutesOptions {
  readonly store: Store;
  readonly version: string;
  readonly commit: string | null;
  /** A JSON Web Key Set (RFC 7517). */
  publicJwks(): unknown;
}

export function healthRoutes(options: HealthRoutesOptions) {
  return routes()
    .get("/healthz", () => json("ok", { status: "ok" }), { detail: health })
    .get(
      "/readyz",
      async () => {
        await options.store.probe(READY_WITHIN_MS);
        return json("ok", { status: "ok" });
      },
      { detail: ready },
    )
    .get("/version", () => json("ok", { version: options.version, commit: options.commit }), {
      detail: version,
    })
    .get("/.well-known/jwks.json", () => json("ok", options.publicJwks()), { detail: jwks });
}
