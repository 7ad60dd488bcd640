// The OpenAPI document, made from the routes themselves when it is first asked for. The plugin that makes it is mounted on
// an instance of its own, because it would also serve a page that loads its scripts from a public network.
import { Elysia } from "elysia";
import { inOneStep, inTurnSteps, type Steps } from "../../concurrency/steps.ts";
import { plainSchema, SECURITY_SCHEMES, TAGS } from "../../http/openapi.ts";
import { STRANGERS } from "../../http/server.ts";
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
 * The document of `api`, and of the facilitator's endpoints beside it, as JSON text. It is made in steps, a route each, since
 * all of it in one piece would hold the event loop for 40 ms (measured).
 *
 * @throws Error when two different schemas bear one name
 */
export async function apiDocument(api: DescribedApi, version: string): Promise<string> {
  // Loaded here, since it brings a schema library along that took a tenth of every start.
  const { swagger } = await import("@elysiajs/swagger");
  const { reader, schemas } = await inTurnSteps(described([...FACILITATOR_ROUTES, ...api.routes]), STRANGERS);
  const plugin = swagger({
    excludeStaticFile: false,
    documentation: {
      openapi: "3.1.0",
      info: { title: "tollgate", version, description: ABOUT },
      servers: [{ url: "/", description: "This gateway" }],
      tags: Object.entries(TAGS).map(([name, description]) => ({ name, description })),
      // The types of the plugin have no mutual TLS.
      components: { securitySchemes: SECURITY_SCHEMES as never, schemas },
    },
  });
  const request = new Request("http://localhost/swagger/json");
  const response = await inOneStep(() => reader.use(plugin).handle(request), STRANGERS);
  return response.text();
}

/** The routes as the plugin reads them, and the schemas that they name. */
function* described(routes: DescribedApi["routes"]): Steps<{ reader: Elysia; schemas: Record<string, object> }> {
  // The one request that it answers is not worth the code that Elysia would write for it: 10 ms in one piece (measured).
  const reader = new Elysia({ aot: false });
  const schemas: Record<string, object> = {};
  for (const { method, path, hooks } of routes) {
    const detail = JSON.parse(JSON.stringify(hooks.detail ?? {}), (_key, value) => byName(plainSchema(value), schemas));
    reader.route(method, path, nowhere, { detail });
    yield;
  }
  return { reader, schemas };
}

const nowhere = () => new Response();

/**
 * A schema that has an `$id` moves to the components, so that it appears once and by that name. Inner values come first,
 * so that a named schema may hold others.
 */
// biome-ignore lint/suspicious/noExplicitAny: what JSON.parse gives.
function byName(value: any, schemas: Record<string, object>): unknown {
  if (typeof value?.$id !== "string") return value;
  const { $id: name, ...schema } = value;
  if (name in schemas && !Bun.deepEquals(schemas[name], schema)) throw new Error(`two schemas are called ${name}`);
  schemas[name] = schema;
  return { $ref: `#/components/schemas/${name}` };
}
