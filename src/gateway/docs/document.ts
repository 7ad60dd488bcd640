// The OpenAPI document, made once from the routes themselves. The plugin that reads them is mounted on an
// instance of its own, because it would also serve a page that loads its scripts from a public network.
import { swagger } from "@elysiajs/swagger";
import { type AnyElysia, Elysia } from "elysia";
import { TAGS } from "../../edge/openapi.ts";

const ABOUT = `A multi-tenant registry and proxy for agents. Register an upstream, call it through the gateway,
and poll the result.

Every operation under \`/v1\` needs a bearer token that names a tenant and a user. With the local issuer,
\`tollgate token --tenant acme --user alice\` prints one; give it to **Authorize**.`;

/** The document of `api` as JSON text. */
export async function apiDocument(api: AnyElysia, version: string): Promise<string> {
  const reader = new Elysia().use(api).use(
    swagger({
      excludeStaticFile: false,
      documentation: {
        openapi: "3.1.0",
        info: { title: "tollgate", version, description: ABOUT },
        servers: [{ url: "/", description: "This gateway" }],
        tags: Object.entries(TAGS).map(([name, description]) => ({ name, description })),
        components: {
          securitySchemes: {
            bearer: {
              type: "http",
              scheme: "bearer",
              description: "An access token of the configured issuer.",
            },
          },
        },
      },
    }),
  );
  const response = await reader.handle(new Request("http://localhost/swagger/json"));
  return nameSchemas(await response.text());
}

/**
 * Moves each schema that has an `$id` to the components, so that it appears once and by that name.
 *
 * @throws Error when two different schemas bear one name
 */
function nameSchemas(text: string): string {
  const schemas: Record<string, unknown> = {};
  // The innermost values come first, so a named schema may hold others.
  const document = JSON.parse(text, (_key, value) => {
    if (typeof value?.$id !== "string") return value;
    const { $id: name, ...schema } = value;
    if (name in schemas && !Bun.deepEquals(schemas[name], schema)) {
      throw new Error(`two schemas are called ${name}`);
    }
    schemas[name] = schema;
    return { $ref: `#/components/schemas/${name}` };
  });
  const components = { ...document.components, schemas };
  return JSON.stringify({ ...document, components });
}
