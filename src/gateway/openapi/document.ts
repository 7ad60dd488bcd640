// The OpenAPI document, made once from the routes themselves. The plugin that reads them is mounted on an
// instance of its own, because it would also serve a page that loads its scripts from a public network.
import { swagger } from "@elysiajs/swagger";
import { type AnyElysia, Elysia } from "elysia";
import { SECURITY_SCHEMES, TAGS } from "../../http/openapi.ts";
import { facilitatorDocs } from "./facilitator.ts";

const ABOUT = `A multi-tenant registry and proxy for agents. Register an upstream, call it through the gateway,
and poll the result.

Every operation under \`/v1\` needs a bearer token that names a tenant and a user. With the local issuer,
\`tollgate token --tenant acme --user alice\` prints one; give it to **Authorize**.

An agent with a price is paid for by x402: its call is answered 402 with what it costs, and sent again with a payment
in \`X-PAYMENT\`. The **Facilitator**, which collects the payments, is a server of its own.

The [manual](docs) has the rest.`;

/** The document of `api`, and of the facilitator's endpoints beside it, as JSON text. */
export async function apiDocument(api: AnyElysia, version: string): Promise<string> {
  const reader = new Elysia()
    .use(facilitatorDocs())
    .use(api)
    .use(
      swagger({
        excludeStaticFile: false,
        documentation: {
          openapi: "3.1.0",
          info: { title: "tollgate", version, description: ABOUT },
          servers: [{ url: "/", description: "This gateway" }],
          tags: Object.entries(TAGS).map(([name, description]) => ({ name, description })),
        },
      }),
    );
  const response = await reader.handle(new Request("http://localhost/swagger/json"));
  return withComponents(await response.text());
}

/**
 * Adds the components. Each schema that has an `$id` moves there, so that it appears once and by that name.
 *
 * @throws Error when two different schemas bear one name
 */
function withComponents(text: string): string {
  const schemas: Record<string, unknown> = {};
  // Inner values come first, so that a named schema may hold others.
  const document = JSON.parse(text, (_key, value) => {
    if (typeof value?.$id !== "string") return value;
    const { $id: name, ...schema } = value;
    if (name in schemas && !Bun.deepEquals(schemas[name], schema)) {
      throw new Error(`two schemas are called ${name}`);
    }
    schemas[name] = schema;
    return { $ref: `#/components/schemas/${name}` };
  });
  // Added here, since the types of the plugin have no mutual TLS.
  const components = { ...document.components, securitySchemes: SECURITY_SCHEMES, schemas };
  return JSON.stringify({ ...document, components });
}
