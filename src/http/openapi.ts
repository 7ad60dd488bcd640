// Documents routes: operation() makes the OpenAPI 3.1 operation for a route's `detail`, and adds what all routes share (bearer
// token, request ID, the Error body, 401 and 500).
import { type TSchema, Type } from "@sinclair/typebox";
import type { DocumentDecoration } from "elysia";
import { type FaultKind, methodNotAllowed } from "../core/fault.ts";
import { type IdPrefix, idPattern } from "../core/id.ts";
import { MAX } from "../kernel/limits.ts";
import { STATUS, SUCCESS } from "./responses.ts";

/** Tags in the order in which Swagger shows them. */
export const TAGS = {
  Agents: "The registry: upstream endpoints of protocol http or mcp.",
  Credentials: "Secrets for upstream calls. They go in and never come out.",
  Proxy: "Call an agent, then poll the result.",
  Invocations: "What was called, when, and how it ended.",
  Settlement: "The facilitator that collects the payments of a tenant's calls.",
  Policy: "Rules that allow, warn of or deny calls, and what they decided.",
  Facilitator:
    "Another server: it collects payments on chain for the gateways that have an account there. `/settle` is on its main " +
    "port only, where mutual TLS takes the place of a token. The other two are open, on its plain port as well. They can't " +
    "be tried here: this page calls the gateway only, so its `/healthz` is the gateway's.",
  Service: "Health, version and keys. These need no token.",
} as const;

type Tag = keyof typeof TAGS;

export const SECURITY_SCHEMES = {
  bearer: {
    type: "http",
    scheme: "bearer",
    description:
      "An access token. On the gateway's machine, with its `--data-dir` or `DATABASE_URL`, `tollgate token --tenant acme --user me` " +
      "prints one, in a container `docker compose exec gateway tollgate token --tenant acme --user me`. A gateway with " +
      "`TOLLGATE_OIDC_ISSUER` takes the tokens of that issuer instead.",
  },
  clientCertificate: {
    type: "mutualTLS",
    description:
      "A gateway presents the client certificate of its account at the facilitator. This page calls no facilitator, so " +
      "there is nothing to enter.",
  },
} as const;

/** A server of an operation that is not only on the document's own server. */
export interface ServerDoc {
  readonly url: string;
  readonly description: string;
  /** The variables in braces in the URL. */
  readonly variables?: Readonly<Record<string, { readonly default: string; readonly description: string }>>;
}

interface Parameter {
  readonly description: string;
  /** A string when omitted. */
  readonly schema?: TSchema;
  readonly example?: unknown;
  readonly required?: boolean;
}

/** The parameter of an ID. By the prefix in its pattern the Swagger page knows which ID to fill in. */
export function idParameter(prefix: IdPrefix, description: string): Parameter {
  return { description, schema: Type.String({ pattern: idPattern(prefix) }) };
}

interface ContentDoc {
  /** Bytes of any form when omitted. A schema with an `$id` is shown once, under that name. */
  readonly schema?: TSchema;
  /** `application/json` when omitted. */
  readonly mediaType?: string;
  readonly example?: unknown;
  /** Several examples by name, instead of `example`. */
  readonly examples?: Readonly<Record<string, unknown>>;
}

export interface ResponseDoc extends ContentDoc {
  /** `ok` when omitted. */
  readonly status?: keyof typeof SUCCESS;
  readonly description: string;
  readonly headers?: Readonly<Record<string, string>>;
}

export interface OperationDoc {
  readonly summary: string;
  readonly description?: string;
  readonly tag: Tag | readonly Tag[];
  /** True for paths without authentication. */
  readonly open?: boolean;
  /** A bearer token when omitted. */
  readonly security?: keyof typeof SECURITY_SCHEMES;
  readonly servers?: readonly ServerDoc[];
  /** Parameters by name: in the path, in the query, and in request headers. */
  readonly path?: Readonly<Record<string, Parameter>>;
  readonly query?: Readonly<Record<string, Parameter>>;
  readonly headers?: Readonly<Record<string, Parameter>>;
  readonly body?: ContentDoc & { readonly description?: string };
  readonly response: ResponseDoc;
  /** Faults in addition to `unauthenticated`, `internal` and `unavailable`, which every operation with a token may answer. */
  readonly errors: readonly FaultKind[];
  readonly answers?: Readonly<Partial<Record<FaultKind, FaultAnswerDoc>>>;
}

interface FaultAnswerDoc {
  /** What is said of the fault in general when omitted. */
  readonly description?: string;
  /** A body that says more than an Error; the response may have either. */
  readonly schema?: TSchema;
  /** An example of that body, or else the Error's message. */
  readonly example: unknown;
  readonly headers?: Readonly<Record<string, string>>;
}

export interface Operation extends DocumentDecoration {
  readonly queryNames: readonly string[];
}

/** The operation of a route, for its `detail`, made when the document is serialised: all of them took a tenth of every start. */
export function operation(doc: OperationDoc): Operation {
  return { toJSON: () => operationOf(doc), queryNames: Object.keys(doc.query ?? {}) } as unknown as Operation;
}

function operationOf(doc: OperationDoc) {
  const { security = "bearer" } = doc;
  return {
    operationId: identifier(doc.summary),
    summary: doc.summary,
    description: doc.description,
    tags: [doc.tag].flat(),
    servers: doc.servers,
    security: doc.open ? [] : [{ [security]: [] }],
    parameters: [
      parameters("path", doc.path),
      parameters("query", doc.query),
      parameters("header", doc.headers),
    ].flat(),
    requestBody: doc.body && { description: doc.body.description, required: true, content: content(doc.body) },
    responses: Object.fromEntries([
      success(doc.response),
      ...[...new Set([...doc.errors, ...errorsOf(doc.open ? null : security)])].map((kind) =>
        failure(kind, doc.answers?.[kind] ?? { example: exampleFor(kind, doc) }),
      ),
    ]),
  };
}

/** The message of a fault where it depends on the operation. */
function exampleFor(kind: FaultKind, { tag, body, query = {} }: OperationDoc): string | undefined {
  if (kind === "not_found") return MISSING[[tag].flat()[0] ?? "Agents"];
  if (kind !== "invalid_request") return;
  if (body === undefined) return "limit" in query ? "limit: must be an integer" : undefined;
  const required: readonly string[] = body.schema?.["required"] ?? [];
  return required.length === 0 ? "body: must be a JSON object" : `${required.join(", ")}: required`;
}

const MISSING: Partial<Record<Tag, string>> = {
  Credentials: "no such credential",
  Invocations: "no such invocation",
  Settlement: "no settlement configuration",
};

/** The faults that every operation with this authentication may answer. */
function errorsOf(security: keyof typeof SECURITY_SCHEMES | null): readonly FaultKind[] {
  if (security === null) return ["internal"];
  return security === "bearer" ? ["unauthenticated", "unavailable", "internal"] : ["unavailable", "internal"];
}

const ARTICLES = new Set(["a", "an", "the"]);

/** "Create an agent" becomes `createAgent`, by which generated clients name the call. */
function identifier(summary: string): string {
  const words = summary.replaceAll(/[^A-Za-z0-9 ]/g, "").split(" ");
  return words
    .filter((word) => !ARTICLES.has(word))
    .map((word, at) => (at === 0 ? word.toLowerCase() : word.charAt(0).toUpperCase() + word.slice(1)))
    .join("");
}

/** Takes out of a value of the document what only input.ts needs, and applies the bounds that code checks (`x-bounds`). */
// biome-ignore lint/suspicious/noExplicitAny: what JSON.parse gives.
export function plainSchema(value: any): any {
  if (typeof value !== "object" || value === null) return value;
  Object.assign(value, value["x-bounds"]);
  delete value["x-bounds"];
  delete value["x-expected"];
  return Array.isArray(value.anyOf) ? plainer(value) : value;
}

/** Turns a union of texts into an enumeration, and "X or null" into X with a second type, which Swagger shows better. */
function plainer(schema: { anyOf: readonly { type?: unknown; const?: unknown; enum?: unknown[] }[] }): object {
  const { anyOf, ...rest } = schema;
  const [first, second] = anyOf;
  if (anyOf.every((option) => typeof option.const === "string")) {
    return { ...rest, type: "string", enum: anyOf.map((option) => option.const) };
  }
  const isNamed = first !== undefined && "$id" in first;
  if (anyOf.length !== 2 || second?.type !== "null" || typeof first?.type !== "string" || isNamed) return schema;
  const values = first.enum ?? ("const" in first ? [first.const] : undefined);
  const { const: _only, ...plain } = first;
  return { ...plain, ...rest, type: [first.type, "null"], ...(values && { enum: [...values, null] }) };
}

function parameters(place: "path" | "query" | "header", given: OperationDoc["query"] = {}) {
  return Object.entries(given).map(([name, { schema = Type.String(), required = place === "path", ...rest }]) => {
    // From an example Swagger would send an ID that does not exist. Without one it asks for an ID.
    return { name, in: place, ...rest, ...(place === "path" && { example: undefined }), required, schema };
  });
}

function content({ schema, mediaType = "application/json", example, examples }: ContentDoc) {
  const named = examples && Object.entries(examples).map(([name, value]) => [name, { value }]);
  return { [mediaType]: { schema: schema ?? {}, example, examples: named && Object.fromEntries(named) } };
}

const REQUEST_ID = { "X-Request-ID": "The request's ID: the caller's own when it sent a usable one." };

function headers(texts: Readonly<Record<string, string>>) {
  const all = Object.entries(texts).map(([name, description]) => [name, { description, schema: Type.String() }]);
  return Object.fromEntries(all);
}

function success(response: ResponseDoc) {
  const hasBody = response.schema !== undefined || response.mediaType !== undefined;
  const value = {
    description: response.description,
    headers: headers({ ...response.headers, ...REQUEST_ID }),
    content: hasBody ? content(response) : undefined,
  };
  return [SUCCESS[response.status ?? "ok"], value];
}

const COARSE = "Coarse and safe to show; a field error starts with the field's name.";
const ErrorBody = Type.Object(
  { error: Type.String({ description: COARSE }) },
  { $id: "Error", additionalProperties: false },
);

interface FaultDoc {
  readonly description: string;
  /** The Error's message; the response has no body when omitted. */
  readonly example?: string;
  readonly headers?: Readonly<Record<string, string>>;
}

const RETRY_AFTER = { "Retry-After": "Whole seconds to wait before the next try." };

const FAILURES: Readonly<Record<FaultKind, FaultDoc>> = {
  invalid_request: described("The body, a parameter or a header is malformed or breaks a rule.", "name: required"),
  unauthenticated: {
    description: "The bearer token is missing or invalid, or lacks the tenant or the user. No body.",
    headers: { "WWW-Authenticate": "`Bearer`" },
  },
  payment_required: described("The payment is missing, or could not be verified or settled.", "payment required"),
  denied: described("The tenant's policy denies the call.", "denied by policy"),
  forbidden: described(
    "The token lacks the scope that writing needs (TOLLGATE_MANAGE_SCOPE).",
    "the token lacks the scope tollgate:manage",
    { "WWW-Authenticate": '`Bearer error="insufficient_scope"`, and the scope.' },
  ),
  over_limit: described("A limit of the account is exceeded.", "the payment is outside the limits of this account"),
  not_found: described("The caller's tenant has no such resource.", "no such agent"),
  method_not_allowed: described(
    "Method not allowed; `Allow` names those of the path.",
    methodNotAllowed(["POST"], " for the agent's protocol").message,
    { Allow: "The methods of this path." },
  ),
  conflict: described("The request conflicts with the current state.", "name: already in use"),
  payload_too_large: described("The body is too large.", `body: larger than ${MAX.managementBodyBytes} bytes`),
  agent_not_invocable: described(
    "The agent is inactive, suspended, or has no `upstream_url`; or the call is a loop, by its `Via`.",
    "the agent is suspended",
  ),
  rate_limited: described("The agent's rate limit is exceeded.", "the agent's rate limit is exceeded", RETRY_AFTER),
  internal: { description: "An unexpected error on the server's side. No body." },
  bad_gateway: described("The upstream gave no answer, or could not be reached.", "the upstream gave no answer"),
  gateway_timeout: described("The upstream gave no answer in time.", "the upstream gave no answer in time"),
  unavailable: described(
    "The service cannot do this just now: it is shutting down, or its store takes no writes.",
    "the service is shutting down",
    RETRY_AFTER,
  ),
};

/** @param example the Error's message */
function described(description: string, example: string, headers: FaultDoc["headers"] = {}): FaultDoc {
  return { description, example, headers };
}

function failure(kind: FaultKind, answer: FaultAnswerDoc | undefined) {
  const { description, example, headers: own } = FAILURES[kind];
  const { schema, example: said = example } = answer ?? {};
  const plain = { schema: ErrorBody, example: { error: schema === undefined ? said : example } };
  const examples = { [kind]: said, error: plain.example };
  const either = schema && { schema: Type.Union([schema, ErrorBody]), examples };
  const value = {
    description: answer?.description ?? description,
    headers: headers({ ...own, ...answer?.headers, ...REQUEST_ID }),
    content: example === undefined ? undefined : content(either ?? plain),
  };
  return [STATUS[kind], value];
}
