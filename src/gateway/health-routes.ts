// The open paths: health, readiness, version and public keys. None needs a token, none names a tenant.
import { actFor, afterShared } from "../concurrency/request-turns.ts";
import { routes } from "../http/elysia.ts";
import { json } from "../http/responses.ts";
import { STRANGERS } from "../http/server.ts";
import type { Store } from "../storage/store.ts";
import { health, jwks, ready, version } from "./health-openapi.ts";

const READY_WITHIN_MS = 2_000;
const GOOD_FOR_MS = 1_000;

export interface HealthRoutesOptions {
  readonly store: Store;
  readonly version: string;
  readonly commit: string | null;
  /** A JSON Web Key Set (RFC 7517). */
  publicJwks(): unknown;
}

/** One probe for all who ask while it runs, and in the second after it: anybody may ask, and each probe is a write. */
function createReadiness({ probe }: Pick<Store, "probe">) {
  let latest: Promise<void> | null = null;
  const forget = () => {
    latest = null;
  };
  const ask = () => actFor(null, () => probe(READY_WITHIN_MS)).finally(() => setTimeout(forget, GOOD_FOR_MS).unref());
  return () => {
    latest ??= ask();
    return afterShared(latest, STRANGERS);
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
