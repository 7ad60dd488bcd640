// The OpenAPI document, made from the routes themselves: each brings its operation as its `detail`. Elysia's own plugin for
// this would read no more of them, but took a tenth of every start (it loads a schema library of its own).
import { plainSchema, SECURITY_SCHEMES, TAGS } from "../../http/openapi.ts";
import { FACILITATOR_ROUTES } from "./facilitator.ts";

const ABOUT = `A multi-tenant registry and proxy for agents. Register an upstream, call it through the gateway,
and poll the result.

Every operation under \`/v1\` needs a bearer token that names a tenant and a user. With the local issuer,
\`tollgate token --tenant acme --user alice\` prints one; give it to **Authorize**.

An agent with a price is paid for by x402: its call is answered 402 with what it costs, and sent again with a payment
in \`X-PAYMENT\`. The **Facilitator**, which collects the payments, is a server of its own.

The [manual](docs) has the rest.`;

/** As much of a router as is described. */
export interface DescribedApi {
  readonly routes: ReadonlyArray<{
    readonly method: string;
    readonly path: string;
    readonly hooks: { readonly detail?: object };
  }>;
}

/**
 * The document of `api`, and of the facilitator's endpoints beside it, as JSON text.
 *
 * @throws Error when two different schemas bear one name
 */
export function apiDocument(api: DescribedApi, version: string): string {
  const paths: Record<string, Record<string, object>> = {};
  for (const { method, path, hooks } of [...FACILITATOR_ROUTES, ...api.routes]) {
    const shown = path.replaceAll(/:([^/]+)/g, "{$1}");
    paths[shown] = { ...paths[shown], [method.toLowerCase()]: hooks.detail ?? {} };
  }
  const schemas: Record<string, unknown> = {};
  const document = {
    openapi: "3.1.0",
    info: { title: "tollgate", version, description: ABOUT },
    servers: [{ url: "/", description: "This gateway" }],
    tags: Object.entries(TAGS).map(([name, description]) => ({ name, description })),
    paths: JSON.parse(JSON.stringify(paths), (_key, value) => named(plainSchema(value), schemas)),
    components: { securitySchemes: SECURITY_SCHEMES, schemas },
  };
  return JSON.stringify(document);
}

/**
 * A schema that has an `$id` moves to the components, so that it appears once and by that name. Inner values come first,
 * so that a named schema may hold others.
 */
// biome-ignore lint/suspicious/noExplicitAny: what JSON.parse gives.
function named(value: any, schemas: Record<string, unknown>): unknown {
  if (typeof value?.$id !== "string") return value;
  const { $id: name, ...schema } = value;
  if (name in schemas && !Bun.deepEquals(schemas[name], schema)) throw new Error(`two schemas are called ${name}`);
  schemas[name] = schema;
  return { $ref: `#/components/schemas/${name}` };
}
