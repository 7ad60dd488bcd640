// What every contract test stands on: one compiled gateway per file and database, a fresh tenant per test, one
// upstream server that tests give answers to, and exact checks of shapes. Tokens come from an issuer of the
// tests' own, since a tenant per test would otherwise cost a process per test.
import { afterAll, beforeAll, expect } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { exportJWK, generateKeyPair, SignJWT } from "jose";
import { type Database, eachDatabase, type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";

// biome-ignore lint/suspicious/noExplicitAny: tests look into bodies of many shapes.
export type Json = any;

export interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  /** The parsed body; undefined when it is empty or no JSON. */
  readonly body: Json;
}

export interface Sending {
  /** Sent as JSON. */
  readonly json?: unknown;
  /** Sent as it is, without a content type of its own. */
  readonly body?: string | Uint8Array<ArrayBuffer> | ReadableStream;
  readonly headers?: Readonly<Record<string, string>>;
  readonly user?: string;
  readonly scope?: string;
  readonly signal?: AbortSignal;
}

export interface Seen {
  readonly method: string;
  readonly url: URL;
  readonly headers: Headers;
  readonly body: Uint8Array;
  readonly signal: AbortSignal;
}

export type Handler = (seen: Seen) => Response | Promise<Response>;

export interface Route {
  readonly url: string;
  /** Every request so far. */
  readonly seen: Seen[];
  /** The request of this number, from 1, as soon as it has come. */
  arrival(number?: number): Promise<Seen>;
}

export interface Tenant {
  readonly name: string;
  token(user?: string, scope?: string): Promise<string>;
  send(method: string, path: string, sending?: Sending): Promise<Answer>;
  /** Creates an agent, of a name of its own unless given. */
  agent(fields?: object): Promise<Json>;
  patch(agentId: string, fields: object): Promise<Json>;
  credential(fields?: object): Promise<Json>;
  /** Calls an agent and gives the ID of the accepted invocation. */
  call(agentId: string, sending?: Sending): Promise<string>;
  poll(agentId: string, invocationId: string): Promise<Json>;
  /** The poll view after the call has ended, for its caller. */
  ended(agentId: string, invocationId: string, user?: string): Promise<Json>;
  invoke(agentId: string, sending?: Sending): Promise<Json>;
  /** The detail view, bodies included. */
  detail(invocationId: string): Promise<Json>;
}

export interface Contract {
  readonly gateway: Gateway;
  /** Set when the database is Postgres. */
  readonly databaseUrl: string | undefined;
  /** 32 bytes in base64. */
  readonly masterKey: string;
  tenant(): Tenant;
  /** A token with just these claims. */
  sign(claims: Record<string, unknown>): Promise<string>;
  upstream(handler?: Handler): Route;
}

export const UNKNOWN_AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
export const UNKNOWN_CREDENTIAL = "cred_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
export const UNKNOWN_INVOCATION = "inv_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
export const PRICING = { amount: "1000", asset: "USDC", network: "base", pay_to: `0x${"aB".repeat(20)}` };
export const MCP = { protocol: "mcp", mcp_transport: "streamable_http" };
export const READ_BODY = "invocations:read_body";
export const PUBLIC_URL = "https://upstream.example.com/run";

const ISSUER = "https://issuer.contract.test";
const AUDIENCE = "contract";
let serial = 0;

/** A name that nothing else in this run has. */
export const unique = (stem: string) => `${stem}-${++serial}`;

interface Issuer {
  readonly env: Record<string, string>;
  sign(claims: Record<string, unknown>): Promise<string>;
  stop(): Promise<void>;
}

async function startIssuer(): Promise<Issuer> {
  const { publicKey, privateKey } = await generateKeyPair("EdDSA");
  const jwk = { ...(await exportJWK(publicKey)), kid: "contract", alg: "EdDSA", use: "sig" };
  const server = startUpstream(() => Response.json({ keys: [jwk] }));
  return {
    env: {
      TOLLGATE_OIDC_ISSUER: ISSUER,
      TOLLGATE_OIDC_AUDIENCE: AUDIENCE,
      TOLLGATE_JWKS_URL: server.url,
    },
    sign: (claims) =>
      new SignJWT(claims)
        .setProtectedHeader({ alg: "EdDSA", kid: "contract" })
        .setIssuer(ISSUER)
        .setAudience(AUDIENCE)
        .setIssuedAt()
        .setExpirationTime("1h")
        .sign(privateKey),
    stop: () => server.stop(),
  };
}

export async function read(response: Response): Promise<Answer> {
  const text = await response.text();
  let body: Json;
  try {
    body = text === "" ? undefined : JSON.parse(text);
  } catch {}
  return { status: response.status, headers: response.headers, text, body };
}

function openTenant(contract: () => { gateway: Gateway; issuer: Issuer }): Tenant {
  const name = unique("tenant");
  const tokens = new Map<string, Promise<string>>();
  const token = (user = "alice", scope = "") => {
    const key = `${user} ${scope}`;
    const known = tokens.get(key) ?? contract().issuer.sign({ tenant_id: name, sub: user, scope });
    tokens.set(key, known);
    return known;
  };
  const tenant: Tenant = {
    name,
    token,
    async send(method, path, { json, body, headers, user, scope, signal } = {}) {
      const response = await fetch(`${contract().gateway.url}${path}`, {
        method,
        redirect: "manual",
        headers: {
          authorization: `Bearer ${await token(user, scope)}`,
          ...(json !== undefined && { "content-type": "application/json" }),
          ...headers,
        },
        ...(json !== undefined && { body: JSON.stringify(json) }),
        ...(body !== undefined && { body }),
        ...(signal !== undefined && { signal }),
      });
      return read(response);
    },
    agent: async (fields = {}) =>
      need(
        201,
        await tenant.send("POST", "/v1/agents", {
          json: { name: unique("agent"), upstream_url: PUBLIC_URL, ...fields },
        }),
      ),
    patch: async (id, fields) => need(200, await tenant.send("PATCH", `/v1/agents/${id}`, { json: fields })),
    credential: async (fields = {}) =>
      need(
        201,
        await tenant.send("POST", "/v1/credentials", {
          json: {
            name: unique("credential"),
            auth_type: "bearer",
            source: "managed",
            plaintext: "some-secret-value",
            ...fields,
          },
        }),
      ),
    call: async (id, sending = { json: {} }) =>
      need(202, await tenant.send("POST", `/v1/proxy/${id}`, sending)).invocation_id,
    poll: async (id, invocation) => need(200, await tenant.send("GET", `/v1/proxy/${id}/invocations/${invocation}`)),
    async ended(id, invocation, user) {
      const sending = { headers: { prefer: "wait=25" }, ...(user !== undefined && { user }) };
      const view = need(200, await tenant.send("GET", `/v1/proxy/${id}/invocations/${invocation}`, sending));
      expect(view.status).toBeOneOf(["succeeded", "failed"]);
      return view;
    },
    invoke: async (id, sending) => tenant.ended(id, await tenant.call(id, sending), sending?.user),
    detail: async (invocation) =>
      need(200, await tenant.send("GET", `/v1/invocations/${invocation}`, { scope: READ_BODY })),
  };
  return tenant;
}

function need(status: number, answer: Answer): Json {
  if (answer.status !== status) throw new Error(`${answer.status} instead of ${status}: ${answer.text}`);
  return answer.body;
}

interface Switchboard extends Upstream {
  route(handler: Handler): Route;
}

function startSwitchboard(): Switchboard {
  const routes = new Map<string, { seen: Seen[]; handler: Handler; told: Set<() => void> }>();
  const server = startUpstream(async (request) => {
    const url = new URL(request.url);
    const route = routes.get(url.pathname.split("/")[1] ?? "");
    if (route === undefined) return new Response("nobody is here", { status: 599 });
    const body = await request.bytes();
    const seen = { method: request.method, url, headers: request.headers, body, signal: request.signal };
    route.seen.push(seen);
    for (const tell of route.told) tell();
    return route.handler(seen);
  });
  return {
    ...server,
    route(handler) {
      const name = unique("route");
      const [seen, told]: [Seen[], Set<() => void>] = [[], new Set()];
      routes.set(name, { seen, handler, told });
      const arrival = (number = 1) => {
        const { promise, resolve } = Promise.withResolvers<Seen>();
        const look = () => {
          const found = seen[number - 1];
          if (found !== undefined) resolve(found);
        };
        told.add(look);
        look();
        return promise.finally(() => told.delete(look));
      };
      return { url: `${server.url}${name}`, seen, arrival };
    },
  };
}

/** The suite on both databases, each against a gateway of its own. */
export function contract(suite: (at: Contract) => void, env: Readonly<Record<string, string>> = {}): void {
  eachDatabase((database: Database) => {
    let running: {
      readonly gateway: Gateway;
      readonly issuer: Issuer;
      readonly board: Switchboard;
      readonly variables: Readonly<Record<string, string>>;
    };
    const current = () => running;
    beforeAll(async () => {
      const [issuer, board, variables] = [await startIssuer(), startSwitchboard(), await database.fresh()];
      const gateway = await startGateway({ env: { ...variables, ...issuer.env, ...env } });
      running = { gateway, issuer, board, variables };
    });
    afterAll(async () => {
      await running?.gateway[Symbol.asyncDispose]();
      await running?.board.stop();
      await running?.issuer.stop();
    });
    suite({
      get gateway() {
        return running.gateway;
      },
      get databaseUrl() {
        return running.variables["DATABASE_URL"];
      },
      get masterKey() {
        const given = running.variables["TOLLGATE_MASTER_KEY"];
        return given ?? readFileSync(join(running.gateway.dataDir, "master.key"), "utf8").trim();
      },
      tenant: () => openTenant(current),
      sign: (claims) => running.issuer.sign(claims),
      upstream: (handler = () => Response.json({ hello: "world" })) => running.board.route(handler),
    });
  });
}

type Check = (value: unknown) => boolean;

const REQUEST_ID = /^[A-Za-z0-9._-]{1,128}$/;
const UUID_V7 = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";

export const is = {
  id: (prefix: string) => matching(new RegExp(`^${prefix}_${UUID_V7}$`)),
  text: ((value) => typeof value === "string") as Check,
  boolean: ((value) => typeof value === "boolean") as Check,
  integer: ((value) => Number.isSafeInteger(value) && Number(value) >= 0) as Check,
  number: ((value) => typeof value === "number") as Check,
  object: ((value) => typeof value === "object" && value !== null && !Array.isArray(value)) as Check,
  dateTime: matching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/),
  base64: ((value) => typeof value === "string" && Buffer.from(value, "base64").toString("base64") === value) as Check,
  nothing: ((value) => value === null) as Check,
  exactly: (expected: unknown) => ((value) => Bun.deepEquals(value, expected, true)) as Check,
  oneOf: (...values: unknown[]) => ((value) => values.includes(value)) as Check,
  orNull: (check: Check) => ((value) => value === null || check(value)) as Check,
  arrayOf: (check: Check) => ((value) => Array.isArray(value) && value.every(check)) as Check,
};

function matching(pattern: RegExp): Check {
  return (value) => typeof value === "string" && pattern.test(value);
}

export type Shape = Readonly<Record<string, Check>>;

/** Exactly the keys of the shape, each with a value that its check takes. */
export function expectShape(value: Json, shape: Shape): void {
  expect(Object.keys(value).sort()).toEqual(Object.keys(shape).sort());
  const wrong = Object.entries(shape).filter(([key, check]) => !check(value[key]));
  expect(Object.fromEntries(wrong.map(([key]) => [key, value[key]]))).toEqual({});
}

/** An Error body and nothing else; `mentions` is the field that it must name. */
export function expectError(answer: Answer, status: number, mentions = ""): void {
  expect([answer.status, answer.text]).toEqual([status, expect.stringContaining(mentions)]);
  expect(answer.headers.get("content-type")).toBe("application/json");
  expectShape(answer.body, { error: is.text });
  expect(answer.body.error.length).toBeGreaterThan(0);
  expectRequestId(answer);
}

export function expectNoBody(answer: Answer, status: number): void {
  expect([answer.status, answer.text]).toEqual([status, ""]);
  expectRequestId(answer);
}

export function expectRequestId(answer: Answer): void {
  expect(answer.headers.get("x-request-id")).toMatch(REQUEST_ID);
}

/** All that a caller sees of an answer, except what differs between any two answers. */
export function visible({ status, headers, text }: Answer): unknown {
  const rest = [...headers].filter(([name]) => !["x-request-id", "date"].includes(name));
  return { status, headers: Object.fromEntries(rest), text };
}

export const AGENT: Shape = {
  id: is.id("agt"),
  name: is.text,
  description: is.text,
  tags: is.orNull(is.arrayOf(is.text)),
  metadata: is.object,
  status: is.oneOf("pending", "active", "inactive"),
  suspended: is.boolean,
  created_by: is.text,
  created_at: is.dateTime,
  updated_at: is.dateTime,
  upstream_url: is.orNull(is.text),
  credential_ref: is.orNull(is.id("cred")),
  invocation_rate_limit: is.orNull(is.number),
  invocation_burst: is.orNull(is.integer),
  emit_receipts: is.boolean,
  capture_body: is.boolean,
  protocol: is.oneOf("http", "mcp"),
  mcp_transport: is.orNull(is.exactly("streamable_http")),
  mcp_protocol_version: is.orNull(is.text),
  pricing: is.orNull(is.object),
};

export const CREDENTIAL: Shape = {
  id: is.id("cred"),
  name: is.text,
  auth_type: is.oneOf("bearer", "api_key", "none"),
  source: is.oneOf("managed", "vault"),
  allowed_hosts: is.orNull(is.arrayOf(is.text)),
  version: is.integer,
  created_at: is.dateTime,
  updated_at: is.dateTime,
};

const PAYMENT: Shape = {
  payment_network: is.nothing,
  payment_asset: is.nothing,
  payment_amount: is.nothing,
  payment_payer: is.nothing,
  payment_nonce: is.nothing,
};

const STATUS = is.oneOf("pending", "running", "succeeded", "failed");
const ERROR_CLASS = is.orNull(
  is.oneOf(...["timeout", "upstream_5xx", "upstream_4xx", "ssrf_blocked", "credential_error", "cancelled"], "internal"),
);

const ERROR_DETAIL = is.orNull(
  is.oneOf(
    ...["connection_refused", "connection_reset", "connect_timeout", "name_not_found", "tls", "host_blocked"],
    ...["credential_unresolved", "credential_host", "response_too_large", "process_ended", "no_answer_in_stream"],
    "deadline",
  ),
);

/** Of an invocation that nobody paid for: `settlement` is absent. */
export const LIST_ITEM: Shape = {
  id: is.id("inv"),
  agent_id: is.id("agt"),
  mode: is.oneOf("transactional", "streaming"),
  status: STATUS,
  error_class: ERROR_CLASS,
  error_detail: ERROR_DETAIL,
  model: is.orNull(is.text),
  mcp_method: is.orNull(is.text),
  mcp_tool: is.orNull(is.text),
  ...PAYMENT,
  upstream_status: is.orNull(is.integer),
  latency_ms: is.orNull(is.integer),
  ttft_ms: is.nothing,
  req_size: is.orNull(is.integer),
  resp_size: is.orNull(is.integer),
  created_at: is.dateTime,
  completed_at: is.orNull(is.dateTime),
};

export const DETAIL: Shape = { ...LIST_ITEM, body_captured: is.boolean };

export const POLL: Shape = {
  invocation_id: is.id("inv"),
  agent_id: is.id("agt"),
  status: STATUS,
  error_class: ERROR_CLASS,
  error_detail: ERROR_DETAIL,
  created_at: is.dateTime,
  updated_at: is.dateTime,
  completed_at: is.orNull(is.dateTime),
  upstream_status: is.orNull(is.integer),
  latency_ms: is.orNull(is.integer),
  mcp_method: is.orNull(is.text),
  mcp_tool: is.orNull(is.text),
  ...PAYMENT,
  settlement: is.nothing,
  response_content_type: is.orNull(is.text),
  response_truncated: is.boolean,
};

export const POLL_WITH_BODY: Shape = { ...POLL, response_body_b64: is.base64 };

/** The bytes of a poll view's captured response, as text. */
export const responseText = (view: Json) => Buffer.from(view.response_body_b64, "base64").toString();
