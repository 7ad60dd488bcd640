// Makes the OpenAPI document from the gateway's routes at the first request for it. The plugin that makes it is mounted on an
// instance of its own, because it also serves a page that would load scripts from a public network.
import { Elysia } from "elysia";
import { operation, plainSchema, SECURITY_SCHEMES, type ServerDoc, TAGS } from "../../http/openapi.ts";
import { STRANGERS } from "../../http/server.ts";
import { inTurn } from "../../kernel/turns.ts";
import { requirementsOf, settleRequestJson } from "../../x402/codec.ts";
import { type Network, SCHEME, X402_VERSION } from "../../x402/network.ts";
import { settleRequest, settleResponse, supportedKinds } from "../../x402/schemas.ts";

const ABOUT = `A multi-tenant registry and proxy for agents. Register an upstream, call it through the gateway,
and poll the result.

Every operation under \`/v1\` needs a bearer token that names a tenant and a user. With the local issuer,
\`tollgate token --tenant acme --user me\` prints one (the [front page](./) has the command in full); give it to **Authorize**.

Calls of an agent with a price are paid by x402: the first response is a 402 with the price, and the caller retries with
a payment in \`X-PAYMENT\`. The **Facilitator**, which collects the payments, is a separate server.

The [manual](docs) has the rest.`;

/** The part of a router that the document describes. */
export interface DescribedApi {
  readonly routes: ReadonlyArray<{
    readonly method: string;
    readonly path: string;
    readonly hooks: { readonly detail?: object };
  }>;
}

/**
 * The document of `api` and of the facilitator's endpoints, as JSON text. Each route is a turn of its own, since all of them in
 * one piece would block the event loop for 40 ms (measured).
 * @throws Error when two different schemas have the same name
 */
export async function apiDocument(api: DescribedApi, version: string, network: Network): Promise<string> {
  // Imported here, since the plugin loads a schema library that took a tenth of every start.
  const { swagger } = await import("@elysiajs/swagger");
  const { reader, schemas } = await described([...facilitatorRoutes(network), ...api.routes]);
  const plugin = swagger({
    excludeStaticFile: false,
    documentation: {
      openapi: "3.1.0",
      info: { title: "tollgate", version, description: ABOUT },
      servers: [{ url: "/", description: "This gateway" }],
      tags: Object.entries(TAGS).map(([name, description]) => ({ name, description })),
      // The plugin's types do not know mutual TLS.
      components: { securitySchemes: SECURITY_SCHEMES as never, schemas },
    },
  });
  const request = new Request("http://localhost/swagger/json");
  const response = await inTurn(STRANGERS, () => reader.use(plugin).handle(request));
  return response.text();
}

/** A router with the routes for the plugin to read, and the named schemas of the routes. */
async function described(routes: DescribedApi["routes"]) {
  // Without `aot: false` Elysia would compile code for the one request that it answers: 10 ms in one piece (measured).
  const reader = new Elysia({ aot: false });
  const schemas: Record<string, object> = {};
  for (const { method, path, hooks } of routes) {
    await inTurn(STRANGERS, () => {
      const text = JSON.stringify(hooks.detail ?? {});
      const detail = JSON.parse(text, (_key, value) => byName(plainSchema(value), schemas));
      reader.route(method, path, nowhere, { detail });
    });
  }
  return { reader, schemas };
}

const nowhere = () => new Response();

/** Moves a schema with an `$id` to the components. JSON.parse revives inner values first, so a named schema may hold others. */
// biome-ignore lint/suspicious/noExplicitAny: what JSON.parse gives.
function byName(value: any, schemas: Record<string, object>): unknown {
  if (typeof value?.$id !== "string") return value;
  const { $id: name, ...schema } = value;
  if (name in schemas && !Bun.deepEquals(schemas[name], schema)) throw new Error(`two schemas are called ${name}`);
  schemas[name] = schema;
  return { $ref: `#/components/schemas/${name}` };
}

const MUTUAL: ServerDoc = {
  url: "{facilitator_url}",
  description: "The facilitator's port with mutual TLS",
  variables: {
    facilitator_url: {
      default: "https://facilitator.example.com:8443",
      description: "As a tenant's settlement configuration names it.",
    },
  },
};

const PLAIN: ServerDoc = {
  url: "{open_url}",
  description: "The facilitator's plain port",
  variables: { open_url: { default: "http://facilitator.example.com:8081", description: "For monitoring." } },
};

const PAYER = "0x70997970c51812dc3a010c7d01b50e0d17dc79c8";
const PAYEE = "0x2096ed1b9b1c4b4a5f8a0b7f3d1d5b6a7c8d9e0f";
const PRICE = 10_000n;

const authorization = {
  from: PAYER,
  to: PAYEE,
  value: PRICE,
  validAfter: 1_795_255_200n,
  validBefore: 1_795_255_860n,
  nonce: "0x476d01a9c531d55412e2a2775c2ba2d10613e730b84248187df77fbec7b30441",
} as const;
const signature = `0x${"2d".repeat(64)}1b` as const;

const exampleRequest = (network: Network) =>
  settleRequestJson(
    { x402Version: X402_VERSION, scheme: SCHEME, network: network.name, authorization, signature },
    requirementsOf(network, {
      amount: PRICE,
      payTo: PAYEE,
      resource: "https://gateway.example.com/v1/proxy/agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
      description: "One call of agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
    }),
  );

const TRANSACTION = "0x3eac2f19045bb22f960302d195991d285ba7b0664d54c50663d8bd36cbf9b2a2";
const failure = { success: false, errorReason: "payment could not be collected" };

const settle = (network: Network) =>
  operation({
    tag: "Facilitator",
    security: "clientCertificate",
    servers: [MUTUAL],
    summary: "Settle a payment",
    description:
      "Verifies the payment again, simulates it, collects it by `transferWithAuthorization` and responds when it is in a " +
      "block, or after the inclusion timeout. A known payment is answered from its record, so a request whose response was " +
      "lost may be retried any number of times: the money moves once. The same authorization with other requirements, or " +
      "from another account, is a failure that names the payment's transaction if that has landed or may still land.",
    body: { schema: settleRequest(network), description: "At most 64 KiB.", example: exampleRequest(network) },
    response: {
      description: "The outcome of the payment.",
      schema: settleResponse(network),
      examples: {
        collected: { success: true, transaction: TRANSACTION, network: network.name, payer: PAYER },
        "not collected": { ...failure, transaction: "", network: network.name, payer: PAYER },
        "may still land": { ...failure, transaction: TRANSACTION, network: network.name, payer: PAYER },
      },
    },
    errors: ["invalid_request", "denied", "over_limit", "unavailable"],
    answers: {
      invalid_request: {
        description:
          "The body is not JSON, malformed or larger than 64 KiB, or the value is 0. The message names the field.",
        example: "paymentPayload.payload.authorization.value: must be a string of decimal digits, of at most 256 bits",
      },
      denied: {
        description: "The client certificate belongs to no account, or the account is disabled.",
        example: "no active account has this certificate",
      },
      over_limit: {
        description:
          "With Retry-After, over a limit that passes with time: the account's daily ceiling, its gas of the day or its share of the settlements in flight, or too many reverts of the payer on this day. Without Retry-After, over the account's limit of one transaction, below the least value, to the payer itself, or of another network or token. Nothing was collected.",
        example: "the payment is outside the limits of this account",
      },
      unavailable: {
        description:
          "No node of the chain answers, the gas wallet is low, the same payment is being settled, the payer's balance is needed for other payments of the payer, or the facilitator is shutting down.",
        example: "this payment is being settled",
      },
    },
  });

const supported = (network: Network) =>
  operation({
    tag: "Facilitator",
    open: true,
    servers: [MUTUAL, PLAIN],
    summary: "List supported kinds",
    description: "The one kind of payment that this facilitator settles.",
    response: {
      description: "The kinds.",
      schema: supportedKinds(network),
      example: {
        kinds: [{ x402Version: X402_VERSION, scheme: SCHEME, network: network.name, asset: network.token.address }],
      },
    },
    errors: ["unavailable"],
  });

/** The facilitator's endpoints, documented here since it has so few that it serves no document of its own. */
const facilitatorRoutes = (network: Network) => [
  { method: "POST", path: "/settle", hooks: { detail: settle(network) } },
  { method: "GET", path: "/supported", hooks: { detail: supported(network) } },
];
