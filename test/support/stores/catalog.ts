// Agents and credentials behind the real edge, on a real SQLite store in a temporary directory: what the tests
// of both features speak to. A bearer token here is the tenant's name.

import { afterAll, beforeAll, expect } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { hostRules } from "../../../src/core/host.ts";
import type { Log } from "../../../src/core/log.ts";
import { agentRoutes } from "../../../src/gateway/agents/routes.ts";
import { agentsOfCredential } from "../../../src/gateway/agents/service.ts";
import { credentialRoutes } from "../../../src/gateway/credentials/routes.ts";
import { routes } from "../../../src/http/elysia.ts";
import { createEdge } from "../../../src/http/server.ts";
import { type Keyring, openKeyring } from "../../../src/keys/keyring.ts";
import { openStore } from "../../../src/storage/open.ts";
import type { Store } from "../../../src/storage/store.ts";
import { onlyMasterKey } from "../keys.ts";
import { BASE } from "../network.ts";
import { temporaryPlace } from "../temporary.ts";

export interface Answer {
  readonly status: number;
  readonly text: string;
  /** The parsed body; undefined when there is none. */
  // biome-ignore lint/suspicious/noExplicitAny: tests look into bodies of many shapes.
  readonly body: any;
}

export const UNKNOWN_AGENT = "agt_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
export const UPSTREAM_URL = "https://example.com/run";
export const MCP = { protocol: "mcp", mcp_transport: "streamable_http" };
export const PRICING = { amount: "1000", asset: "USDC", network: "base", pay_to: `0x${"aB".repeat(20)}` };

export const outcome = ({ status, body }: Answer) => [status, body?.error];

let serial = 0;
/** The body of a create request under a name of its own. */
export const fresh = (fields: object = {}) => ({ name: `agent ${++serial}`, ...fields });

export interface Catalog extends AsyncDisposable {
  readonly dir: string;
  readonly store: Store;
  readonly keyring: Keyring;
  /** Everything that was logged, a line each. */
  readonly log: readonly string[];
  /** Moved by tests. */
  readonly clock: { time: number; now(): number };
  send(method: string, path: string, body?: unknown, tenant?: string): Promise<Answer>;
}

function recorder(): { log: Log; lines: string[] } {
  const lines: string[] = [];
  const record = (event: string, fields: unknown) => {
    lines.push(Bun.inspect([event, fields], { depth: 10 }));
  };
  return { lines, log: { debug: record, info: record, warn: record, error: record } };
}

export async function openCatalog(databaseUrl: string | null = null): Promise<Catalog> {
  const dir = mkdtempSync(join(temporaryPlace(), "tollgate-catalog-"));
  const { log, lines } = recorder();
  const clock = { time: 1_790_000_000_000, now: () => clock.time++ };
  const store = await openStore({ databaseUrl, dataDir: dir, log, clock });
  const keyring = await openKeyring(store, onlyMasterKey(new Uint8Array(32).fill(7)), clock);
  const app = routes()
    .use(agentRoutes({ network: BASE, store, clock, rules: hostRules({ allow: ["10.1.2.3"] }), agentsMax: 10_000 }))
    .use(
      credentialRoutes({
        store,
        clock,
        keyring,
        uses: [agentsOfCredential],
        credentialsMax: 1_000,
      }),
    );
  const edge = createEdge({
    app,
    log,
    authenticate: (header) => ({
      tenant: header?.replace("Bearer ", "") ?? "",
      user: "alice",
      scopes: new Set<string>(),
    }),
  });
  return {
    dir,
    store,
    keyring,
    log: lines,
    clock,
    async send(method, path, body, tenant = "acme") {
      const response = await edge.fetch(
        new Request(`http://localhost${path}`, {
          method,
          headers: { authorization: `Bearer ${tenant}`, "content-type": "application/json" },
          ...(body !== undefined && { body: typeof body === "string" ? body : JSON.stringify(body) }),
        }),
      );
      const text = await response.text();
      return { status: response.status, text, body: text === "" ? undefined : JSON.parse(text) };
    },
    async [Symbol.asyncDispose]() {
      await store.close();
      rmSync(dir, { recursive: true });
    },
  };
}

/** One catalogue for all tests of a file, and the requests that most of them begin with. */
export function useCatalog() {
  let catalog: Catalog;
  beforeAll(async () => {
    catalog = await openCatalog();
  });
  afterAll(() => catalog[Symbol.asyncDispose]());

  const send: Catalog["send"] = (...parts) => catalog.send(...parts);
  const create = (body: object, tenant?: string) => send("POST", "/v1/agents", body, tenant);
  return {
    /** Once the tests have begun. */
    catalog: () => catalog,
    send,
    create,
    /** An agent under a name of its own, with these fields. */
    async made(fields: object = {}, tenant?: string) {
      const answer = await create(fresh(fields), tenant);
      expect(outcome(answer)).toEqual([201, undefined]);
      return answer.body;
    },
  };
}
